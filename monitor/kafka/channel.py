"""One channel of a partition: its records in, outcomes out, and its state as a record of the state topic.

The state's value is the watch's snapshot, with the channel's place on stream time; its header `open` has the alerts
that are open as they were told last, so that they can be ended even where the snapshot cannot be gone on from.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np

from monitor.alerting.alerts import ENDED, RETRACTED, Alert
from monitor.compute import Compute, Models
from monitor.errors import SnapshotRefused
from monitor.evidence.keeper import EvidenceKeeper
from monitor.ingest.ledger import FrameLedger
from monitor.ingest.sources import Sample
from monitor.kafka.records import MS, FrameRecord, Headers
from monitor.kafka.timeline import Place, Timeline
from monitor.metrics import Metrics
from monitor.pipeline import Library, Outcome, Watch
from monitor.settings import Settings
from reference_db.frames import Frame

logger = logging.getLogger(__name__)

NO_PICTURE = np.zeros((1, 1, 3), np.uint8)  # of a second that came as a feature row


@dataclass(frozen=True, slots=True, eq=False)
class Works:
    """What every channel of a process is matched with."""

    settings: Settings
    library: Library
    models: Models
    compute: Compute
    metrics: Metrics
    evidence: EvidenceKeeper | None

    def watch(self) -> Watch:
        return Watch(self.library, self.models, self.settings, self.metrics, self.evidence)


class Channel:
    """All that is known of one channel, between two of its records."""

    def __init__(self, name: str, works: Works) -> None:
        self.name = name
        self.is_changed = False  # since it was kept last
        self.gap_reason: str | None = None  # why the records before the next one are missing, where we know better
        self.heard_s = time.monotonic()
        self._works = works
        self._watch = works.watch()
        self._lane = works.compute.lane()
        self._timeline = Timeline(name)
        self._ledger = FrameLedger(name, works.metrics)
        self._open: dict[str, Alert] = {}
        self._is_over = True  # nothing was seen since the last end

    @property
    def is_on_air(self) -> bool:
        """Whether it has a wall clock and has not ended: after a silence it has."""
        newest = self._timeline.newest
        return not self._is_over and newest is not None and newest.epoch.began_at is not None

    async def take(self, record: FrameRecord) -> Outcome | None:
        """What the record led to; None where it is passed over."""
        self.heard_s, self.is_changed = time.monotonic(), True
        if record.is_end:
            return await self.end(record)
        self._ledger.received()
        place = self._timeline.place(record)
        if isinstance(place, str):
            self._ledger.dropped(place)
            return None
        outcome = await self._match(record, place)
        self._is_over = False
        self._note(outcome.alerts)
        return outcome

    async def end(self, record: FrameRecord | None = None) -> Outcome | None:
        """The last word on what is open: the stream said that it ended, or is silent."""
        newest = self._timeline.newest
        if self._is_over or newest is None or (record is not None and record.pts_ms // MS < newest.second):
            return None
        alerts = await self._works.compute.run("match", self._watch.finish)
        self._is_over, self.is_changed = True, True
        self._note(alerts)
        return Outcome(newest.second, alerts, record.seen_at if record is not None else datetime.now(UTC))

    async def state(self) -> tuple[bytes, Headers]:
        """Value and headers of its state's record."""
        content = await self._works.compute.run("snapshot", self._watch.snapshot, self._timeline.position())
        told = [alert.as_dict() for alert in self._open.values()]
        return content, [("open", json.dumps(told, ensure_ascii=False).encode())]

    def restore(self, content: bytes, headers: Headers) -> list[Alert]:
        """Goes on from its state's record; what there is to tell at once. Blocks."""
        told = [Alert.from_dict(one) for name, value in headers if name == "open" for one in json.loads(value)]
        self._open = {alert.id: alert for alert in told}
        alerts: list[Alert] = []
        try:
            resumed = self._watch.restore(content)
            self._timeline.resume(resumed.position)
            alerts = resumed.alerts
            self._is_over = False
            self._works.metrics.restores.labels(self.name, "continued").inc()
        except SnapshotRefused as refused:
            self._works.metrics.restores.labels(self.name, "refused").inc()
            logger.warning("channel %s begins anew: %s", self.name, refused)
            if refused.notes is not None:
                self._timeline.resume(refused.notes["position"])
            self.gap_reason = "restart"
        known = self._watch.open_alerts | {alert.id for alert in alerts}
        alerts = [*alerts, *(alert.ended("state lost") for alert in told if alert.id not in known)]
        self._note(alerts)
        self.is_changed = bool(alerts)
        return alerts

    async def _match(self, record: FrameRecord, place: Place) -> Outcome:
        picture = NO_PICTURE if record.picture is None else record.picture
        frame = Frame(place.second, record.pts_ms / MS, picture, record.held)
        reason, self.gap_reason = self.gap_reason or record.gap, None
        sample = Sample(place.epoch, place.second, frame, record.seen_at, reason, {})
        think = partial(self._watch.second, sample)
        try:
            if record.encoded is not None:
                outcome = await self._lane.encoded(record.encoded, think)
            else:
                outcome = await self._lane.second(frame, think)
        except Exception:  # it is this channel's own fault and second; the others go on
            logger.exception("channel %s begins anew: a second of it could not be matched", self.name)
            self._ledger.dropped("failed")
            self._watch = self._works.watch()
            return Outcome(place.second, [alert.ended("failed") for alert in self._open.values()], record.seen_at)
        self._ledger.processed()
        return outcome

    def _note(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            if alert.type in (ENDED, RETRACTED):
                self._open.pop(alert.id, None)
            else:
                self._open[alert.id] = alert
