"""One channel of a partition: its records in, outcomes out, and its state as a record of the state topic.

The state's value is the watch's snapshot, with the channel's place on stream time. Its headers are plain JSON, for
where the snapshot is refused: `offset`, how far the channel's records are in the state; `start`, where they can be read
from anew (`starts.py`); `open`, the alerts that are open, as they were told last. What reading anew does not find again
is ended with a reason.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from monitor.alerting.alerts import ENDED, RETRACTED, Alert
from monitor.errors import SnapshotRefused
from monitor.ingest.sources import Sample
from monitor.kafka.records import MS, FrameRecord, Headers
from monitor.kafka.replay_points import ReplayPoint, ReplayPoints
from monitor.kafka.timeline import Place, Timeline
from monitor.runtime.boot import MatchServices
from monitor.runtime.match_step import Outcome
from reference_db.media.frames import Frame

logger = logging.getLogger(__name__)

NO_PICTURE = np.zeros((1, 1, 3), np.uint8)  # of a second that came as a feature row
STATE_LOST = "state lost"  # why an alert ended that nobody knows how to go on with


class TopicChannel:
    """All that is known of one channel, between two of its records."""

    def __init__(self, name: str, services: MatchServices) -> None:
        self.name = name
        self.is_changed = False  # since it was kept last
        self.gap_reason: str | None = None  # why the records before the next one are missing, where we know better
        self.heard_s = time.monotonic()
        self.next_offset = 0  # its records before it are in the state
        self._services = services
        self._watch = services.channel_monitor()
        self._slot = services.batcher.slot()
        self._timeline = Timeline(name)
        self._status = services.metrics.channels.of(name)
        self._starts = ReplayPoints()
        self._open: dict[str, Alert] = {}
        self._is_over = True  # nothing was seen since the last end
        self._lost: dict[str, Alert] = {}  # alerts of a state that was refused, until they are found again
        self._told_until = 0  # up to this offset that state had read, so by then they must be

    @property
    def wants(self) -> int | None:
        """Where its records are to be read from, though a state that was refused was further."""
        return self.next_offset if self.next_offset < self._told_until else None

    @property
    def is_on_air(self) -> bool:
        """Whether it has a wall clock and has not ended: after a silence it has."""
        newest = self._timeline.newest
        return bool(self._lost) or (not self._is_over and newest is not None and newest.epoch.began_at is not None)

    def forget_offsets(self) -> None:
        """The partition was made anew: its offsets say nothing of what is in the state."""
        self.next_offset, self._told_until, self._starts = 0, 0, ReplayPoints()

    async def take(self, record: FrameRecord) -> Outcome | None:
        """What the record led to; None where it is passed over."""
        self.heard_s, self.is_changed, self.next_offset = time.monotonic(), True, record.offset + 1
        if record.is_end:
            return await self.end(record)
        self._status.count_received()
        before, position, seen_at = self._timeline.newest, self._timeline.position(), self._watch.seen_at
        place = self._timeline.place(record)
        if isinstance(place, str):
            self._status.count_dropped(place)
            return None
        outcome = await self._match(record, place)
        start = ReplayPoint(record.offset, place.second, position, None if seen_at is None else seen_at.isoformat())
        if self._is_over or before is None or before.epoch != place.epoch:
            self._starts.begin(start)
        else:
            self._starts.push(start, self._watch.spans)
        self._is_over = False
        self._note(outcome.alerts)
        return replace(outcome, alerts=outcome.alerts + self._give_up())

    async def end(self, record: FrameRecord | None = None) -> Outcome | None:
        """The last word on what is open: the stream said that it ended, or is silent."""
        newest_s = 0 if self._timeline.newest is None else self._timeline.newest.second
        if (self._is_over and not self._lost) or (record is not None and record.pts_ms // MS < newest_s):
            return None
        alerts = await self._services.batcher.run("match", self._watch.finish)
        self._is_over, self.is_changed = True, True
        self._note(alerts)
        alerts = alerts + self._give_up(is_over=True)
        return Outcome(newest_s, alerts, record.seen_at if record is not None else datetime.now(UTC))

    async def state(self) -> tuple[bytes, Headers]:
        """Value and headers of its state's record."""
        content = await self._services.batcher.run("snapshot", self._watch.snapshot, self._timeline.position())
        newest = self._timeline.newest
        start = None if newest is None else self._starts.safe(newest.second)
        about = {
            "offset": [self.next_offset, self._told_until],
            "start": None if start is None else start.as_dict(),
            "open": [alert.as_dict() for alert in (self._open | self._lost).values()],
            "over": self._is_over,
        }
        return content, [(name, json.dumps(value, ensure_ascii=False).encode()) for name, value in about.items()]

    def restore(self, content: bytes, headers: Headers, first: int) -> list[Alert]:
        """Goes on from its state's record; what there is to tell at once. Blocks.

        Where the snapshot is refused it `wants` some of its records again, if the broker has them still: `first` is the
        oldest that it has.
        """
        about: dict[str, Any] = {"offset": [0, 0], "start": None, "open": [], "over": False}
        about |= {name: json.loads(value) for name, value in headers}
        told = [Alert.from_dict(one) for one in about["open"]]
        self._open = {alert.id: alert for alert in told}
        self.next_offset, self._told_until = about["offset"]
        start = ReplayPoint(**about["start"]) if about["start"] is not None else None
        self._starts = ReplayPoints(start)
        alerts: list[Alert] = []
        try:
            resumed = self._watch.restore(content)
            self._timeline.resume(resumed.position)
            alerts = resumed.alerts
            self._is_over = about["over"]
            self._services.metrics.restores.labels(self.name, "continued").inc()
        except SnapshotRefused as refused:
            if start is not None and first <= start.offset:
                self._services.metrics.restores.labels(self.name, "replayed").inc()
                logger.warning("channel %s is read again from offset %d: %s", self.name, start.offset, refused)
                self._timeline.resume(start.position)
                self._watch.seen_at = None if start.seen_at is None else datetime.fromisoformat(start.seen_at)
                self._told_until = max(self._told_until, self.next_offset)
                self.next_offset = start.offset
            else:
                self._services.metrics.restores.labels(self.name, "refused").inc()
                logger.warning("channel %s begins anew: %s", self.name, refused)
                if refused.notes is not None:
                    self._timeline.resume(refused.notes["position"])
                self.gap_reason = "restart"
        self._note(alerts)
        known = self._watch.open_alerts
        self._lost = {alert_id: alert for alert_id, alert in self._open.items() if alert_id not in known}
        alerts = alerts + self._give_up()
        self.is_changed = bool(alerts)
        return alerts

    def _give_up(self, *, is_over: bool = False) -> list[Alert]:
        """Ends what a state that was refused had open, once its records were read again and nobody found it."""
        if not self._lost or (self.next_offset < self._told_until and not is_over):
            return []
        known = self._watch.open_alerts
        ended = [alert.ended(STATE_LOST) for alert_id, alert in self._lost.items() if alert_id not in known]
        self._lost = {}
        self._note(ended)
        return ended

    async def _match(self, record: FrameRecord, place: Place) -> Outcome:
        picture = NO_PICTURE if record.picture is None else record.picture
        frame = Frame(place.second, record.pts_ms / MS, picture, record.held, record.age_ms / MS)
        reason, self.gap_reason = self.gap_reason or record.gap, None
        sample = Sample(place.epoch, place.second, frame, record.seen_at, reason, {})
        new_step = partial(self._watch.match_step, sample)
        try:
            if record.encoded is not None:
                outcome = await self._slot.submit_encoded(record.encoded, new_step)
            else:
                outcome = await self._slot.submit(frame, new_step)
        except Exception:  # it is this channel's own fault and second; the others go on
            logger.exception("channel %s begins anew: a second of it could not be matched", self.name)
            self._status.count_dropped("failed")
            self._watch, self._is_over = self._services.channel_monitor(), True
            return Outcome(place.second, [alert.ended("failed") for alert in self._open.values()], record.seen_at)
        self._status.count_processed()
        return outcome

    def _note(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            if alert.type in (ENDED, RETRACTED):
                self._open.pop(alert.id, None)
                self._lost.pop(alert.id, None)
            else:
                self._open[alert.id] = alert
