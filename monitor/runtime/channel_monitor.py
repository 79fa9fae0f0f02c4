"""One channel's decisions: samples with their feature rows in, alerts out.

    sample -> FeatureWindow -> index search -> Matcher (candidates, tiles, network, paths, segments) -> AlertBook

`ChannelMonitor` is plain code that reads no wall clock and never waits; it pauses only where the network must read its
tiles (`match_step.py`). `runner.py` puts a source before it and the delivery of alerts behind it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from monitor.alerting.alert_book import AlertBook
from monitor.alerting.alerts import Alert, Gap
from monitor.alerting.claims import BookState
from monitor.config.settings import Settings
from monitor.errors import SnapshotRefused
from monitor.evidence.keeper import AlertMaterial, EvidenceKeeper
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.feature_windows import LiveSecond
from monitor.ingest.sources import Position, Sample
from monitor.matching.matcher import Matcher, MatcherState, MatchParameters
from monitor.matching.stitching import Scoring, SegmentView
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.match_step import MatchStep, Outcome
from monitor.runtime.models import Models
from monitor.runtime.snapshots import pack, unpack
from reference_db.search.index import Hits, ReferenceIndex
from reference_db.store.catalog import ReferenceId

# reasons for which an alert ends before its copy does
REMOVED, REPLACED, QUARANTINED = "reference removed", "reference replaced", "reference quarantined"
MAX_GAPS = 256  # of an epoch, for the alerts that they fall into; the oldest go first


def match_parameters(settings: Settings) -> MatchParameters:
    """The parameters of matching that the settings give."""
    given = settings.matching
    return MatchParameters(tau=given.tau, sigma=given.sigma, scoring=Scoring(gamma=given.gamma))


@dataclass(frozen=True, slots=True, eq=False)
class EpochState:
    """The matching of one stream epoch between two samples, as it is stored."""

    epoch: ChannelEpoch
    book: BookState
    matcher: MatcherState


@dataclass(frozen=True, slots=True, eq=False)
class ChannelState:
    """A channel monitor between two samples, as it is stored."""

    epoch: EpochState | None
    gaps: list[Gap]
    seen_at: datetime | None


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of restoring a channel: where its source resumes, and the alerts to emit at once."""

    position: Position
    alerts: list[Alert]


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    """The matcher of one stream epoch and the book of its alerts.

    They are created and dropped together: the book asks the matcher to refine the segments that the matcher found.
    """

    matcher: Matcher
    book: AlertBook

    @property
    def newest_s(self) -> int:
        return self.matcher.window.newest_s or 0


class ChannelMonitor:
    """Matches one channel and decides on its alerts.

    `snapshot` and `restore` move it between processes: a restored monitor emits what one that never stopped emits.
    The match steps must be run with its `models`, whose name stamps snapshots and alerts.
    """

    def __init__(
        self,
        library: ActiveLibrary,
        models: Models,
        settings: Settings,
        metrics: Metrics,
        evidence: EvidenceKeeper | None = None,
    ) -> None:
        self.models = models
        self._library = library
        self._evidence = evidence
        self._settings = settings
        self._metrics = metrics
        self._epoch: _Epoch | None = None  # None before the first sample and after `finish`
        self._index = library.index  # the generation that the last second was matched with
        self._last_search: tuple[ReferenceIndex, NDArray[np.float32], Hits] | None = None  # valid for a held picture
        self._gaps: deque[Gap] = deque(maxlen=MAX_GAPS)
        self.seen_at: datetime | None = None  # when the newest sample arrived, in this run or the previous one
        self._refused_at: tuple[str, int] | None = None  # epoch and newest second of a snapshot that was refused

    def snapshot(self, position: Position) -> bytes:
        """All of its state, with the position of the newest sample; some 0.2 MB. Not while a match step runs."""
        state, name, newest_s = None, None, None
        if self._epoch is not None:
            book, matcher = self._epoch.book, self._epoch.matcher
            state = EpochState(book.epoch, book.state(), matcher.state())
            name, newest_s = book.epoch.name, matcher.window.newest_s
        notes = {"position": dict(position), "epoch": name, "newest_s": newest_s}
        return pack(ChannelState(state, list(self._gaps), self.seen_at), {"model": self.models.name}, notes)

    def restore(self, content: bytes) -> Restored:
        """Resumes from a snapshot, in a monitor that has matched nothing yet.

        Raises SnapshotRefused if that is impossible. The monitor then starts fresh; if the snapshot says up to which
        second the stream was seen, the seconds missed since become a gap. The error's `notes`, if any, have the
        position.
        """
        try:
            state, notes = unpack(ChannelState, content, {"model": self.models.name})
        except SnapshotRefused as refused:
            if refused.notes and refused.notes.get("epoch") is not None and refused.notes.get("newest_s") is not None:
                self._refused_at = (refused.notes["epoch"], refused.notes["newest_s"])
            raise
        epoch, gone = None, set[ReferenceId]()
        if state.epoch is not None:
            epoch = self._new_epoch(state.epoch.epoch)
            try:
                gone = epoch.matcher.restore(state.epoch.matcher, self._library.index)
            except (ValueError, IndexError, KeyError) as error:
                raise SnapshotRefused(f"its parts do not fit together ({error})", notes) from error
            epoch.book.restore(state.epoch.book)
        self._epoch = epoch
        self.seen_at = state.seen_at
        self._gaps.extend(state.gaps)
        alerts: list[Alert] = []
        if epoch is not None:
            alerts = self._with_evidence(epoch, self._end_gone(epoch, gone, self._library.index, epoch.newest_s))
        return Restored(notes["position"], alerts)

    @property
    def open_alerts(self) -> set[str]:
        """Ids of the alerts that have not ended."""
        return self._epoch.book.open_alerts if self._epoch is not None else set()

    def spans(self) -> list[range]:
        """Stream seconds of every path that is open or closed a short time ago."""
        return self._epoch.matcher.spans() if self._epoch is not None else []

    def match_step(self, sample: Sample, row: NDArray[np.float32], informative: bool) -> MatchStep[Outcome]:
        """Matches one sample, given its feature row and whether its picture carries information."""
        epoch, alerts = self._enter_epoch(sample)
        if self._evidence is not None:
            self._evidence.add_picture(sample.epoch, sample.second, sample.frame.picture, row, sample.frame.age_s)
        frame = sample.frame
        added = epoch.matcher.window.push(sample.second, row, informative, frame.held, frame.age_s)
        self._note_gap(sample, added[0].second)
        if not informative:
            self._metrics.low_information_seconds.labels(sample.epoch.channel).inc()
        for live in added:
            alerts += yield from self._match(epoch, live)
        self._metrics.open_paths.labels(sample.epoch.channel).set(epoch.matcher.n_open_paths)
        self.seen_at = sample.arrived_at
        return Outcome(sample.second, alerts, sample.arrived_at)

    def finish(self, silent_s: int = 0, reason: str = "reconnect") -> list[Alert]:
        """Ends every open alert, when the stream or its epoch ends.

        If it ends because nothing arrived for `silent_s`, those seconds are a gap of the alerts that were open.
        """
        epoch = self._epoch
        if epoch is None:
            return []
        if silent_s:
            self._gaps.append(Gap(epoch.newest_s + 1, silent_s, reason))
        alerts = epoch.book.apply_rules(self._library.rules, epoch.newest_s, list(self._gaps))
        alerts += self._update_book(epoch, epoch.newest_s, epoch.matcher.finish())
        alerts = self._with_evidence(epoch, alerts)
        self._gaps.clear()
        self._epoch = None
        return alerts

    def _enter_epoch(self, sample: Sample) -> tuple[_Epoch, list[Alert]]:
        """The epoch of this sample, and the last alerts of the one before if this sample starts a new one."""
        if self._epoch is not None and self._epoch.book.epoch == sample.epoch:
            self._epoch.book.epoch = sample.epoch  # its wall time may be known better by now
            return self._epoch, []
        silent_s = self._silent_s(sample)
        alerts = self.finish(silent_s, sample.gap_reason)
        self._epoch = self._new_epoch(sample.epoch)
        if silent_s:
            self._add_gap(sample.epoch, Gap(sample.second - silent_s, silent_s, sample.gap_reason))
        return self._epoch, alerts

    def _silent_s(self, sample: Sample) -> int:
        """Seconds that were missed between two epochs; none if only the stream's clock jumped."""
        if self.seen_at is None or sample.gap_reason == "unseen":
            return 0
        return max(0, round((sample.arrived_at - self.seen_at).total_seconds()) - 1)

    def _new_epoch(self, epoch: ChannelEpoch) -> _Epoch:
        alerting = self._settings.alerting
        matcher = Matcher(match_parameters(self._settings), min_confidence=alerting.min_confidence)
        book = AlertBook(
            epoch, self.models.name, alerting.min_confidence, alerting.update_every_s, self._library.reference, matcher
        )
        return _Epoch(matcher, book)

    def _note_gap(self, sample: Sample, first_s: int) -> None:
        """Records the seconds missed before this sample: in this run, or since a snapshot that was refused."""
        if self._refused_at is not None:
            epoch_name, newest_s = self._refused_at
            self._refused_at = None
            if epoch_name == sample.epoch.name:
                first_s = min(first_s, newest_s + 1)
        if first_s < sample.second:
            self._add_gap(sample.epoch, Gap(first_s, sample.second - first_s, sample.gap_reason))

    def _add_gap(self, epoch: ChannelEpoch, gap: Gap) -> None:
        self._gaps.append(gap)
        self._metrics.channels.of(epoch.channel).add_gap(gap.seconds)

    def _match(self, epoch: _Epoch, live: LiveSecond) -> MatchStep[list[Alert]]:
        index, matcher, book = self._library.index, epoch.matcher, epoch.book  # one generation for all of this second
        alerts: list[Alert] = []
        if index is not self._index:
            self._index = index
            alerts = self._end_gone(epoch, matcher.drop_gone(index), index, live.second)
        alerts += book.apply_rules(self._library.rules, live.second, list(self._gaps))
        hits = self._search(index, live.row, matcher.matching.hits) if live.counts and live.row is not None else None
        maps = yield matcher.plan(live, hits, index)
        alerts += self._update_book(epoch, live.second, matcher.apply(maps, book.open_segments))
        return self._with_evidence(epoch, alerts)

    def _end_gone(self, epoch: _Epoch, gone: set[ReferenceId], index: ReferenceIndex, now_s: int) -> list[Alert]:
        """Ends the open alerts of references that this index no longer has, each with its reason."""
        damaged = gone & index.damaged.keys()
        replaced = {reference for reference in gone - damaged if index.place(reference) is not None}
        return [
            *epoch.book.end(damaged, now_s, list(self._gaps), QUARANTINED),
            *epoch.book.end(replaced, now_s, list(self._gaps), REPLACED),
            *epoch.book.end(gone - damaged - replaced, now_s, list(self._gaps), REMOVED),
        ]

    def _with_evidence(self, epoch: _Epoch, alerts: list[Alert]) -> list[Alert]:
        """Passes the material of each alert to the evidence keeper; the alerts then say where their evidence is."""
        views = epoch.book.take_views()
        if self._evidence is None or not alerts:
            return alerts
        lives = list(epoch.matcher.window)
        alerts = [replace(alert, evidence=self._evidence.store.address(alert.id)) for alert in alerts]
        for alert in alerts:
            points = views[alert.id].points if alert.id in views else []
            self._evidence.add_alert(AlertMaterial(alert, points, lives, *epoch.matcher.features(alert.reference)))
        return alerts

    def _update_book(self, epoch: _Epoch, now_s: int, views: list[SegmentView]) -> list[Alert]:
        """The alerts that the segments of this second lead to."""
        book, channel = epoch.book, epoch.book.epoch.channel
        alerts = book.apply(now_s, views, list(self._gaps))
        self._metrics.suppressed.labels(channel, "exclusion").inc(book.n_excluded)
        book.n_excluded = 0
        self._library.retracted_open[channel] = book.retracted_open
        return alerts

    def _search(self, index: ReferenceIndex, row: NDArray[np.float32], n_hits: int) -> Hits:
        if self._last_search is not None:
            searched, last_row, hits = self._last_search
            if searched is index and np.array_equal(last_row, row):
                return hits
        hits = index.search(row[None], n_hits)
        self._last_search = index, row, hits
        return hits
