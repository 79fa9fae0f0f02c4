"""Samples of alerts: what each event of an alert stated, and whether it was right.

A broadcast goes through the live matcher once; its segments are given to several alert books that differ only in the
score from which they alert. So there are samples of alerts that have just started at any score, and of ended ones, as
the product would have emitted them with that threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evaluation.alert_statements import copy_of
from evaluation.recordings import Recording
from evaluation.scoring import FoundCopy, TrueCopy, overlap
from monitor.alerting.alert_book import AlertBook
from monitor.alerting.alerts import ENDED, STARTED, Alert
from monitor.ingest.clock import ChannelEpoch
from monitor.matching.confidence import confidence
from monitor.matching.matcher import Matcher, MatchParameters
from monitor.matching.stitching import SegmentView
from monitor.matching.tiles import SimilarityTile, TileMaps
from reference_db.search.index import ReferenceIndex

UPDATE_EVERY_S = 10.0  # updates are no samples

Reader = Callable[[list[SimilarityTile]], list[TileMaps]]
Strength = Callable[[SegmentView], float]


@dataclass(frozen=True, slots=True)
class AlertSample:
    """One event of an alert. It has the names of a segment's evidence, so that a confidence model can read it."""

    stage: str  # STARTED or ENDED
    found: FoundCopy
    confidence: float  # that was stated
    score: float
    change: float | None
    is_right: bool


class SampledChannel:
    """One channel through the matcher and an alert book for each threshold; `strength` is what thresholds apply to."""

    def __init__(
        self,
        channel: Recording,
        index: ReferenceIndex,
        read: Reader,
        matching: MatchParameters,
        strength: Strength,
        thresholds: Sequence[float],
    ) -> None:
        self._channel, self._index, self._read = channel, index, read
        self._matcher = Matcher(matching)
        by_id = {reference.id: reference for reference in self._index.references}
        epoch = ChannelEpoch(channel.name, "samples", None)
        self._books = [
            AlertBook(epoch, "samples", threshold, UPDATE_EVERY_S, by_id.__getitem__, self._matcher, strength)
            for threshold in thresholds
        ]

    def samples(self, truth: Sequence[TrueCopy]) -> list[AlertSample]:
        """Every started and every ended alert, each once."""
        samples: dict[tuple[str, str, float], AlertSample] = {}
        newest_s = 0
        for second in np.flatnonzero(self._channel.seen).tolist():
            for live in self._matcher.window.push(
                second, self._channel.rows[second], bool(self._channel.informative[second])
            ):
                row = live.row if live.counts else None
                hits = None if row is None else self._index.search(row[None], self._matcher.matching.hits)
                views = self._matcher.apply(self._read(self._matcher.plan(live, hits, self._index)))
                newest_s = live.second
                self._collect(samples, newest_s, views, truth)
        self._collect(samples, newest_s, self._matcher.finish(), truth)
        return list(samples.values())

    def _collect(
        self,
        samples: dict[tuple[str, str, float], AlertSample],
        now_s: int,
        views: list[SegmentView],
        truth: Sequence[TrueCopy],
    ) -> None:
        for book in self._books:
            alerts = [alert for alert in book.apply(now_s, views, []) if alert.type in (STARTED, ENDED)]
            emitted = book.take_views()
            for alert in (
                alert for alert in alerts if alert.id in emitted
            ):  # an earlier claim of a version has no view
                sample = _sample(alert, emitted[alert.id], truth)
                samples.setdefault((alert.id, alert.type, alert.score), sample)


def _sample(alert: Alert, view: SegmentView, truth: Sequence[TrueCopy]) -> AlertSample:
    found = replace(copy_of(alert), confidence=confidence(view))
    is_right = any(overlap(found, true) > 0 for true in truth)
    return AlertSample(alert.type, found, found.strength, view.score, view.change, is_right)
