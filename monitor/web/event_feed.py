"""The feed of server-sent events: alerts, reviews, changes of channels and of the library.

One task reads the outbox for all listeners, and each listener has a bounded queue. A listener that does not read is
dropped; it reconnects with the number of the last event it received (`Last-Event-ID`) and gets what it missed. Only
alert events are numbered and can be sent again; changes of channels and references reach current listeners only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sse_starlette import ServerSentEvent

from monitor.alerting.outbox import History
from monitor.errors import MonitorError, OutboxFailed, RightsStoreFailed
from monitor.evidence.store import EvidenceStore
from monitor.ops.change_signal import ChangeSignal, watch
from monitor.ops.process import wait_for_event
from monitor.rights.store import RightsStore
from monitor.web.alert_views import alert_views
from monitor.web.channel_views import ChannelViews
from reference_db.errors import CatalogError
from reference_db.store.catalog import Contents

logger = logging.getLogger(__name__)

POLL_S = 0.5  # changes of channels and of the library; alerts and reviews wake the feed at once
IDLE_S = 1.0  # poll without listeners: only changes of channels are noted
QUEUE = 256  # events waiting for one listener; when full, the listener is dropped
MAX_MISSED = 10_000  # events sent again to a listener that reconnects; the list of alerts has the rest
BATCH = 500


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens: the name of its token, and whether it may go on."""

    name: str
    is_current: Callable[[], bool]


class EventFeed:
    """Reads once for all listeners; `run` works until cancelled."""

    def __init__(
        self,
        history: History,
        rights: RightsStore,
        evidence: EvidenceStore,
        channel_views: ChannelViews,
        contents: Callable[[], Contents],
        emitted: ChangeSignal,
    ) -> None:
        self._history, self._rights, self._evidence = history, rights, evidence
        self._channel_views, self._contents, self._emitted = channel_views, contents, emitted
        self._queues: dict[asyncio.Queue[ServerSentEvent | None], Listener] = {}
        self._last_alert_event = self._last_review = 0  # the newest ones published
        self._has_reviews = False  # the rights changed since reviews were last read
        self._generation = -1
        self._is_behind = True  # without listeners nothing is read
        self._lock = threading.Lock()

    async def run(self) -> None:
        try:
            with watch(self._rights.changed) as reviewed, watch(self._rights.changed, self._emitted) as changed:
                while True:
                    await wait_for_event(changed, POLL_S if self._queues else IDLE_S)
                    changed.clear()
                    self._has_reviews |= reviewed.is_set()
                    reviewed.clear()
                    events = await asyncio.to_thread(self._new_events)
                    self._drop_outdated()
                    for event in events:
                        self.publish(event)
        finally:
            for queue in list(self._queues):
                self._drop(queue)

    def publish(self, event: ServerSentEvent) -> None:
        """Queues the event for every listener; drops a listener whose queue is full."""
        for queue in list(self._queues):
            if queue.full():
                self._drop(queue)
                logger.info("dropped an event listener that did not read")
            else:
                queue.put_nowait(event)

    def _drop_outdated(self) -> None:
        """Drops the listeners whose token was removed or whose session has ended; they get no further event."""
        for queue, listener in list(self._queues.items()):
            if not listener.is_current():
                self._drop(queue)
                logger.info("ended the events of %s: its token or session is not valid any more", listener.name)

    def _drop(self, queue: asyncio.Queue[ServerSentEvent | None]) -> None:
        self._queues.pop(queue, None)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    async def listen(self, after: int, listener: Listener) -> AsyncIterator[ServerSentEvent]:
        """The alert events after this number, then all events as they come, while the listener is current."""
        queue: asyncio.Queue[ServerSentEvent | None] = asyncio.Queue(QUEUE)  # when full, its listener is dropped
        self._queues[queue] = listener
        try:
            yield ServerSentEvent(comment="welcome", retry=2000)
            last = self._last_alert_event
            at = max(after, last - MAX_MISSED)
            while at < last:
                missed = await asyncio.to_thread(self._alert_events, at, min(BATCH, last - at))
                for one in missed:
                    at = int(one.id or 0)
                    if at <= last:
                        yield one
                if not missed:
                    break
            while (event := await queue.get()) is not None:
                if event.id is None or int(event.id) > last:
                    yield event
        finally:
            self._queues.pop(queue, None)

    def n_of(self, name: str) -> int:
        """How many listeners have this name."""
        return sum(listener.name == name for listener in self._queues.values())

    @property
    def n_listeners(self) -> int:
        return len(self._queues)

    def newest(self) -> int:
        """The number of the newest alert event, for a new listener; without listeners so far, reading starts there."""
        with self._lock:
            if not self._is_behind:
                return self._last_alert_event
            with suppress(OutboxFailed):
                self._last_alert_event = self._history.newest()
            with suppress(MonitorError):
                self._last_review = self._rights.newest_review()
            with suppress(CatalogError):
                self._generation = self._contents().generation
            self._is_behind = False
            return self._last_alert_event

    def _new_events(self) -> list[ServerSentEvent]:
        """All events since the last call; runs in a thread."""
        changed = self._channel_views.changes()
        with self._lock:
            self._is_behind = not self._queues
            return [] if self._is_behind else self._read(changed)

    def _read(self, changed: set[str]) -> list[ServerSentEvent]:
        try:
            alerts = self._alert_events(self._last_alert_event, BATCH)
            self._last_alert_event = max([self._last_alert_event, *(int(event.id or 0) for event in alerts)])
            views = {one.name: one for one in self._channel_views.channels()} if changed else {}
            reviews = self._review_events()
        except (OutboxFailed, RightsStoreFailed):
            return []  # readiness reports it; the events follow when the disk works again
        channels = [
            _event("channel", views[name].model_dump() if name in views else {"name": name, "state": "removed"})
            for name in sorted(changed)
        ]
        return [*alerts, *reviews, *channels, *self._library_events()]

    def _alert_events(self, after: int, limit: int) -> list[ServerSentEvent]:
        events = self._history.events(after=after, limit=limit)
        views = alert_views(events, self._rights, self._evidence)
        return [_event(one.alert.type, v.model_dump(), str(one.n)) for one, v in zip(events, views, strict=True)]

    def _review_events(self) -> list[ServerSentEvent]:
        """New reviews, made here or on the command line."""
        if not self._has_reviews:
            return []
        reviews = self._rights.reviews(after=self._last_review, limit=BATCH)
        self._has_reviews = len(reviews) == BATCH
        self._last_review = max([self._last_review, *(review.n for review in reviews)])
        histories = [self._history.alert(id) for id in dict.fromkeys(review.alert_id for review in reviews)]
        views = alert_views([events[-1] for events in histories if events], self._rights, self._evidence)
        return [_event("alert.reviewed", view.model_dump()) for view in views]

    def _library_events(self) -> list[ServerSentEvent]:
        """One event after a change of the library; listeners fetch the references themselves."""
        try:
            contents = self._contents()
        except CatalogError:
            return []
        before, self._generation = self._generation, contents.generation
        if before in (-1, contents.generation):
            return []
        n_references = len(contents.references)
        return [_event("reference", {"generation": contents.generation, "references": n_references})]


def _event(kind: str, data: dict[str, Any], id: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps(data, ensure_ascii=False), event=kind, id=id)
