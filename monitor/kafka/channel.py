"""One channel of a partition: records in, outcomes out, and its state as a record of the state topic.

Why Kafka has its own runner: offsets belong to a partition, not to a channel, so all channels of a partition must store
their state and advance together, in one transaction with their alerts (`partition.py`). A channel is therefore driven
record by record instead of reading a source of its own, and a rebalance can move it at any record. The matching itself
is the same: `ChannelMonitor` and the batcher know nothing of Kafka.

The value of the state record is the snapshot of the channel monitor, with the channel's position on stream time. Its
headers are plain JSON, for when the snapshot is refused: `offset`, how far the channel's records are in the state;
`start`, where they can be replayed from (`replay_points.py`); `open`, the last event of each open alert. Open alerts
that a replay does not find again are ended with a reason.
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

NO_PICTURE = np.zeros((1, 1, 3), np.uint8)  # of a second that arrived as a feature row
STATE_LOST = "state lost"  # why an alert ended that no state or replay can continue


class KafkaChannel:
    """The state of one channel between two of its records."""

    def __init__(self, name: str, services: MatchServices) -> None:
        self.name = name
        self.is_changed = False  # since the last commit
        self.gap_reason: str | None = None  # why the records before the next one are missing, if the reader knows
        self.last_record_s = time.monotonic()
        self.next_offset = 0  # its records before it are in the state
        self._services = services
        self._monitor = services.channel_monitor()
        self._slot = services.batcher.slot()
        self._timeline = Timeline(name)
        self._status = services.metrics.channels.of(name)
        self._replay_points = ReplayPoints()
        self._open_alerts: dict[str, Alert] = {}
        self._has_ended = True  # no frame since the last end
        self._lost_alerts: dict[str, Alert] = {}  # open in a refused state, and not found again so far
        self._replay_until = 0  # the refused state had read up to this offset: by then they must be found again

    @property
    def replay_from(self) -> int | None:
        """Where its records must be read from again, after its state was refused."""
        return self.next_offset if self.next_offset < self._replay_until else None

    @property
    def ends_by_silence(self) -> bool:
        """Whether silence ends it: it has a wall clock and is not over."""
        newest = self._timeline.newest
        has_clock = newest is not None and newest.epoch.began_at is not None
        return bool(self._lost_alerts) or (not self._has_ended and has_clock)

    def forget_offsets(self) -> None:
        """The partition was created again: old offsets mean nothing in it."""
        self.next_offset, self._replay_until, self._replay_points = 0, 0, ReplayPoints()

    async def process(self, record: FrameRecord) -> Outcome | None:
        """The outcome of one record; None if it is dropped."""
        self.last_record_s, self.is_changed, self.next_offset = time.monotonic(), True, record.offset + 1
        if record.is_end:
            return await self.end(record)
        self._status.count_received()
        before, position, seen_at = self._timeline.newest, self._timeline.position(), self._monitor.seen_at
        place = self._timeline.place(record)
        if isinstance(place, str):
            self._status.count_dropped(place)
            return None
        outcome = await self._match(record, place)
        point = ReplayPoint(record.offset, place.second, position, None if seen_at is None else seen_at.isoformat())
        if self._has_ended or before is None or before.epoch != place.epoch:
            self._replay_points.start_epoch(point)
        else:
            self._replay_points.push(point, self._monitor.spans)
        self._has_ended = False
        self._track(outcome.alerts)
        return replace(outcome, alerts=outcome.alerts + self._end_lost_alerts())

    async def end(self, record: FrameRecord | None = None) -> Outcome | None:
        """Ends all open alerts: the stream has ended, or is silent for too long."""
        newest_s = 0 if self._timeline.newest is None else self._timeline.newest.second
        if (self._has_ended and not self._lost_alerts) or (record is not None and record.pts_ms // MS < newest_s):
            return None
        alerts = await self._services.batcher.run("match", self._monitor.finish)
        self._has_ended, self.is_changed = True, True
        self._track(alerts)
        alerts = alerts + self._end_lost_alerts(is_over=True)
        return Outcome(newest_s, alerts, record.seen_at if record is not None else datetime.now(UTC))

    async def state_record(self) -> tuple[bytes, Headers]:
        """Value and headers of its record in the state topic."""
        content = await self._services.batcher.run("snapshot", self._monitor.snapshot, self._timeline.position())
        newest = self._timeline.newest
        point = None if newest is None else self._replay_points.newest_safe(newest.second)
        fields = {
            "offset": [self.next_offset, self._replay_until],
            "start": None if point is None else point.as_dict(),
            "open": [alert.as_dict() for alert in (self._open_alerts | self._lost_alerts).values()],
            "over": self._has_ended,
        }
        return content, [(name, json.dumps(value, ensure_ascii=False).encode()) for name, value in fields.items()]

    def restore(self, content: bytes, headers: Headers, first: int) -> list[Alert]:
        """Restores the channel from its state record; returns the alerts to emit at once. Blocks.

        If the snapshot is refused, `replay_from` says which records must be read again, as far as the broker still has
        them: `first` is its oldest.
        """
        fields: dict[str, Any] = {"offset": [0, 0], "start": None, "open": [], "over": False}
        fields |= {name: json.loads(value) for name, value in headers}
        self._open_alerts = {alert.id: alert for alert in map(Alert.from_dict, fields["open"])}
        self.next_offset, self._replay_until = fields["offset"]
        point = ReplayPoint(**fields["start"]) if fields["start"] is not None else None
        self._replay_points = ReplayPoints(point)
        alerts: list[Alert] = []
        try:
            restored = self._monitor.restore(content)
            self._timeline.resume(restored.position)
            alerts = restored.alerts
            self._has_ended = fields["over"]
            self._count_restore("continued")
        except SnapshotRefused as refused:
            if point is not None and first <= point.offset:
                self._start_replay(point, refused)
            else:
                self._start_fresh(refused)
        self._track(alerts)
        known = self._monitor.open_alerts
        self._lost_alerts = {alert_id: alert for alert_id, alert in self._open_alerts.items() if alert_id not in known}
        alerts = alerts + self._end_lost_alerts()
        self.is_changed = bool(alerts)
        return alerts

    def _start_replay(self, point: ReplayPoint, refused: SnapshotRefused) -> None:
        self._count_restore("replayed")
        logger.warning("replaying channel %s from offset %d: %s", self.name, point.offset, refused)
        self._timeline.resume(point.position)
        self._monitor.seen_at = None if point.seen_at is None else datetime.fromisoformat(point.seen_at)
        self._replay_until = max(self._replay_until, self.next_offset)
        self.next_offset = point.offset

    def _start_fresh(self, refused: SnapshotRefused) -> None:
        self._count_restore("refused")
        logger.warning("could not restore channel %s; starting fresh: %s", self.name, refused)
        if refused.notes is not None:
            self._timeline.resume(refused.notes["position"])
        self.gap_reason = "restart"

    def _count_restore(self, result: str) -> None:
        self._services.metrics.restores.labels(self.name, result).inc()

    def _end_lost_alerts(self, *, is_over: bool = False) -> list[Alert]:
        """Ends the alerts of a refused state that the replay, once complete, did not find again."""
        if not self._lost_alerts or (self.next_offset < self._replay_until and not is_over):
            return []
        known = self._monitor.open_alerts
        ended = [alert.ended(STATE_LOST) for alert_id, alert in self._lost_alerts.items() if alert_id not in known]
        self._lost_alerts = {}
        self._track(ended)
        return ended

    async def _match(self, record: FrameRecord, place: Place) -> Outcome:
        picture = NO_PICTURE if record.picture is None else record.picture
        frame = Frame(place.second, record.pts_ms / MS, picture, record.held, record.age_ms / MS)
        reason, self.gap_reason = self.gap_reason or record.gap, None
        sample = Sample(place.epoch, place.second, frame, record.seen_at, reason, {})
        new_step = partial(self._monitor.match_step, sample)
        try:
            if record.encoded is not None:
                outcome = await self._slot.submit_encoded(record.encoded, new_step)
            else:
                outcome = await self._slot.submit(frame, new_step)
        except Exception:  # of this channel only; the others continue
            logger.exception("could not match a frame of channel %s; restarting the channel", self.name)
            self._status.count_dropped("failed")
            self._monitor, self._has_ended = self._services.channel_monitor(), True
            alerts = [alert.ended("failed") for alert in self._open_alerts.values()]
            return Outcome(place.second, alerts, record.seen_at)
        self._status.count_processed()
        return outcome

    def _track(self, alerts: list[Alert]) -> None:
        """Updates the open alerts by new events."""
        for alert in alerts:
            if alert.type in (ENDED, RETRACTED):
                self._open_alerts.pop(alert.id, None)
                self._lost_alerts.pop(alert.id, None)
            else:
                self._open_alerts[alert.id] = alert
