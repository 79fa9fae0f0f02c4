"""`/events`: what happens, as it happens, by server-sent events.

One task reads the outbox for all listeners, and each listener has a bounded queue: who does not read is dropped and
comes back by itself with the number of the last event it saw (`Last-Event-ID`), from which on it is told what it
missed. Only alert events are numbered and told again; changes of channels and references are told to who listens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query
from sse_starlette import EventSourceResponse, ServerSentEvent

from monitor.errors import MonitorError, OutboxFailed, RightsStoreFailed
from monitor.web.channel_board import ChannelBoard
from monitor.web.context import AppContext
from monitor.web.requests.problems import MAY_FAIL, Problem
from monitor.web.routes.alerts import told
from reference_db.errors import CatalogError

logger = logging.getLogger(__name__)

POLL_S = 0.5
IDLE_S = 1.0  # while nobody listens only the board is kept up
LISTENERS = 200  # at once
QUEUE = 256  # events that wait for one listener; beyond, it is dropped
MISSED = 10_000  # events that who comes back is told at most; the list of alerts has the rest
BATCH = 500
PING_S = 15
SEND_S = 30.0  # that a listener's connection may be stuck


class Events:
    """Reads once, tells all; `run` works until it is cancelled."""

    def __init__(self, station: AppContext, board: ChannelBoard) -> None:
        self._station, self._board = station, board
        self._queues: set[asyncio.Queue[ServerSentEvent | None]] = set()
        self._at = self._reviewed = 0  # the newest alert event and review that were told
        self._generation = -1
        self._is_behind = True  # nobody listens, so nothing is read
        self._reading = threading.Lock()

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(POLL_S if self._queues else IDLE_S)
                for event in await asyncio.to_thread(self._news):
                    self.publish(event)
        finally:
            for queue in list(self._queues):
                self._drop(queue)

    def publish(self, event: ServerSentEvent) -> None:
        """Tells every listener; one that is too far behind is dropped."""
        for queue in list(self._queues):
            if queue.full():
                self._drop(queue)
                logger.info("a listener that did not read was dropped")
            else:
                queue.put_nowait(event)

    def _drop(self, queue: asyncio.Queue[ServerSentEvent | None]) -> None:
        self._queues.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    async def listen(self, after: int) -> AsyncIterator[ServerSentEvent]:
        """What was missed after this event, then what happens."""
        queue: asyncio.Queue[ServerSentEvent | None] = asyncio.Queue(QUEUE)  # when full, its listener is dropped
        self._queues.add(queue)
        try:
            yield ServerSentEvent(comment="welcome", retry=2000)
            last = self._at
            at = max(after, last - MISSED)
            while at < last:
                missed = await asyncio.to_thread(self._told_after, at, min(BATCH, last - at))
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
            self._queues.discard(queue)

    @property
    def n_listeners(self) -> int:
        return len(self._queues)

    def newest(self) -> int:
        """The newest event, for who comes to listen. Where nobody did for a while, reading begins anew with it."""
        with self._reading:
            if not self._is_behind:
                return self._at
            with suppress(OutboxFailed):
                self._at = self._station.history.newest()
            with suppress(MonitorError):
                self._reviewed = self._station.rights.newest_review()
            with suppress(CatalogError):
                self._generation = self._station.contents().generation
            self._is_behind = False
            return self._at

    def _news(self) -> list[ServerSentEvent]:
        """What came since the last look; runs in a thread."""
        changed = self._board.changes()
        with self._reading:
            self._is_behind = not self._queues
            return [] if self._is_behind else self._read(changed)

    def _read(self, changed: set[str]) -> list[ServerSentEvent]:
        try:
            alerts = self._told_after(self._at, BATCH)
            self._at = max([self._at, *(int(event.id or 0) for event in alerts)])
            channels = {one.name: one for one in self._board.channels()} if changed else {}
            reviewed = self._reviews()
        except (OutboxFailed, RightsStoreFailed):
            return []  # it is told by the readiness; the events come when it works again
        news = [
            _event("channel", channels[name].model_dump() if name in channels else {"name": name, "state": "removed"})
            for name in sorted(changed)
        ]
        return [*alerts, *reviewed, *news, *self._references()]

    def _reviews(self) -> list[ServerSentEvent]:
        """What people said, here or on the command line."""
        reviews = self._station.rights.reviews(after=self._reviewed, limit=BATCH)
        self._reviewed = max([self._reviewed, *(review.n for review in reviews)])
        lives = [self._station.history.alert(id) for id in dict.fromkeys(review.alert_id for review in reviews)]
        views = told([life[-1] for life in lives if life], self._station)
        return [_event("alert.reviewed", view.model_dump()) for view in views]

    def _references(self) -> list[ServerSentEvent]:
        """That the library has changed; what in it, the listener asks for."""
        try:
            contents = self._station.contents()
        except CatalogError:
            return []
        before, self._generation = self._generation, contents.generation
        if before in (-1, contents.generation):
            return []
        n_references = len(contents.references)
        return [_event("reference", {"generation": contents.generation, "references": n_references})]

    def _told_after(self, n: int, limit: int) -> list[ServerSentEvent]:
        events = self._station.history.events(after=n, limit=limit)
        views = told(events, self._station)
        return [_event(one.alert.type, v.model_dump(), str(one.n)) for one, v in zip(events, views, strict=True)]


def add_events(api: FastAPI, events: Events) -> None:
    @api.get(
        "/api/v1/events",
        responses=MAY_FAIL | {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
        response_class=EventSourceResponse,
        tags=["events"],
    )
    async def listen(
        last_event_id: Annotated[str | None, Header(max_length=20, pattern=r"^[0-9]*$")] = None,
        after: Annotated[int | None, Query(ge=0, le=2**62, description="Like Last-Event-ID, for programs.")] = None,
    ) -> EventSourceResponse:
        """Server-sent events: alert.started, updated, ended, retracted, reviewed; channel; reference."""
        if events.n_listeners >= LISTENERS:
            raise Problem(429, f"{LISTENERS} listen already; try again later.", {"Retry-After": "10"})
        newest = await asyncio.to_thread(events.newest)  # before the answer begins: what comes from then on is told
        since = int(last_event_id) if last_event_id else newest if after is None else after
        return EventSourceResponse(events.listen(since), ping=PING_S, send_timeout=SEND_S)


def _event(kind: str, data: dict[str, Any], id: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps(data, ensure_ascii=False), event=kind, id=id)
