"""Found copies against true ones, scored as VCDB and FIVR-200k-PVCD do.

A found copy is correct when it has the true channel and reference and overlaps the true copy on both time lines by
more than the level; level 0 is any shared time. SP is the share of found copies that are correct, SR the share of true
copies that are found; F1 is given at the best threshold, as in the papers, and at our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LEVELS = (0.0, 0.3, 0.5, 0.7)
UNEDITED = "none"  # name of the count of copies without an edit


@dataclass(frozen=True, slots=True)
class Copy:
    """A section of a channel that shows a section of a reference. Spans are half-open seconds."""

    channel: str
    reference: str
    channel_start: float
    channel_end: float
    reference_start: float
    reference_end: float


@dataclass(frozen=True, slots=True)
class TrueCopy(Copy):
    """A true copy, and the edits that were made to it."""

    edits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundCopy(Copy):
    """A copy that was found; `detected_at` is the channel second of its first alert, if any.

    Where the alert says that other places of the reference fit as well, these count too.
    """

    score: float
    detected_at: float | None = None
    alternatives: tuple[tuple[float, float], ...] = ()
    confidence: float | None = None  # of methods that state one

    @property
    def strength(self) -> float:
        """What a threshold applies to: the confidence, or the score of a method that states none."""
        return self.score if self.confidence is None else self.confidence


@dataclass(frozen=True, slots=True)
class Rates:
    """Segment precision and recall."""

    sp: float
    sr: float

    @property
    def f1(self) -> float:
        return 2 * self.sp * self.sr / (self.sp + self.sr) if self.sp + self.sr else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"sp": round(self.sp, 4), "sr": round(self.sr, 4), "f1": round(self.f1, 4)}


@dataclass(frozen=True, slots=True)
class Best:
    """The rates at the threshold that gives the highest F1."""

    rates: Rates
    threshold: float


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds from the start of a copy to its first alert, over the copies found."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class Score:
    """All figures of one row of a table."""

    n_true: int
    n_found: int  # at our own threshold
    own: Mapping[float, Rates]  # by level
    best: Mapping[float, Best]
    false_alarms: int
    false_alarms_per_hour: float | None
    alerts_per_copy: float | None  # alerts for each copy found; None when none was
    seconds_to_alert: Delays | None
    recall_by_edit: Mapping[str, tuple[int, int]]  # edit -> (found, true)

    def as_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        delays = self.seconds_to_alert
        return {
            "true_copies": self.n_true,
            "alerts": self.n_found,
            "own": {f"iou>{level:g}": rates.as_dict() for level, rates in self.own.items()},
            "best": {
                f"iou>{level:g}": best.rates.as_dict() | {"threshold": round(best.threshold, 4)}
                for level, best in self.best.items()
            },
            "false_alarms": self.false_alarms,
            "false_alarms_per_hour": _rounded(self.false_alarms_per_hour),
            "alerts_per_found_copy": _rounded(self.alerts_per_copy),
            "seconds_to_alert": None
            if delays is None
            else {"median": round(delays.median, 2), "p95": round(delays.p95, 2)},
            "recall_by_edit": {edit: f"{found}/{true}" for edit, (found, true) in self.recall_by_edit.items()},
        }


def iou(a_start: float, a_end: float, b_start: float, b_end: float) -> float:
    """Intersection over union of two spans."""
    shared = min(a_end, b_end) - max(a_start, b_start)
    return shared / (max(a_end, b_end) - min(a_start, b_start)) if shared > 0 else 0.0


def overlap(a: Copy, b: Copy) -> float:
    """The smaller of the two IoUs, on channel and on reference; 0 for different channels or references."""
    if a.channel != b.channel or a.reference != b.reference:
        return 0.0
    places = [(a.reference_start, a.reference_end), *(a.alternatives if isinstance(a, FoundCopy) else ())]
    return min(
        iou(a.channel_start, a.channel_end, b.channel_start, b.channel_end),
        max(iou(start, end, b.reference_start, b.reference_end) for start, end in places),
    )


def score(found: Sequence[FoundCopy], truth: Sequence[TrueCopy], threshold: float, hours: float | None = None) -> Score:
    """The score of all copies found: `best` may use any threshold, the other figures use `threshold`."""
    table = _overlaps(found, truth)
    passes = np.array([copy.strength >= threshold for copy in found], dtype=bool)
    alerts, alert_table = [copy for copy in found if copy.strength >= threshold], table[passes]
    hits = alert_table > 0  # [alert, true copy]
    false_alarms = int((~hits.any(axis=1)).sum())
    per_copy = hits.sum(axis=0)
    n_copies_found = int((per_copy > 0).sum())
    return Score(
        n_true=len(truth),
        n_found=len(alerts),
        own={level: _rates(alert_table > level) for level in LEVELS},
        best={level: _best(found, table > level) for level in LEVELS},
        false_alarms=false_alarms,
        false_alarms_per_hour=false_alarms / hours if hours else None,
        alerts_per_copy=float(per_copy.sum()) / n_copies_found if n_copies_found else None,
        seconds_to_alert=_delays(alerts, truth, hits),
        recall_by_edit=_recall_by_edit(truth, per_copy > 0),
    )


def read_truth(path: Path) -> list[TrueCopy]:
    """The copies of a broadcast's truth.jsonl, one JSON object per line."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [
        TrueCopy(
            row["channel"],
            row["reference"],
            row["channel_start"],
            row["channel_end"],
            row["reference_start"],
            row["reference_end"],
            tuple(row["edits"]),
        )
        for row in rows
    ]


def _overlaps(found: Sequence[FoundCopy], truth: Sequence[TrueCopy]) -> NDArray[np.float64]:
    """overlap() of each found copy with each true one, [found, true]."""
    table = np.zeros((len(found), len(truth)))
    columns: dict[tuple[str, str], list[int]] = {}
    for column, true in enumerate(truth):
        columns.setdefault((true.channel, true.reference), []).append(column)
    for row, copy in enumerate(found):
        for column in columns.get((copy.channel, copy.reference), []):
            table[row, column] = overlap(copy, truth[column])
    return table


def _rates(hits: NDArray[np.bool_]) -> Rates:
    n_found, n_true = hits.shape
    return Rates(
        float(hits.any(axis=1).sum()) / n_found if n_found else 0.0,
        float(hits.any(axis=0).sum()) / n_true if n_true else 0.0,
    )


def _best(found: Sequence[FoundCopy], hits: NDArray[np.bool_]) -> Best:
    """The best of all thresholds, which are the scores that occur."""
    n_found, n_true = hits.shape
    if not n_found or not n_true:
        return Best(_rates(hits), 0.0)
    scores = np.array([copy.strength for copy in found])
    by_score = np.sort(scores)
    correct = np.sort(scores[hits.any(axis=1)])
    # A true copy is found at every threshold up to the score of its strongest hit.
    strongest = np.sort(np.where(hits, scores[:, None], -np.inf).max(axis=0))
    cuts = np.unique(scores)
    at_least = [len(values) - np.searchsorted(values, cuts, side="left") for values in (by_score, correct, strongest)]
    sp, sr = at_least[1] / at_least[0], at_least[2] / n_true
    f1 = 2 * sp * sr / np.maximum(sp + sr, 1e-12)
    at = int(np.argmax(f1))
    return Best(Rates(float(sp[at]), float(sr[at])), float(cuts[at]))


def _delays(alerts: Sequence[FoundCopy], truth: Sequence[TrueCopy], hits: NDArray[np.bool_]) -> Delays | None:
    delays = []
    for column, true in enumerate(truth):
        detected = [
            at
            for alert, hit in zip(alerts, hits[:, column], strict=True)
            if hit and (at := alert.detected_at) is not None
        ]
        if detected:
            delays.append(min(detected) - true.channel_start)
    if not delays:
        return None
    delays.sort()
    return Delays(delays[len(delays) // 2], delays[int(len(delays) * 0.95)])


def _recall_by_edit(truth: Sequence[TrueCopy], is_found: Iterable[np.bool_]) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for true, hit in zip(truth, is_found, strict=True):
        for edit in true.edits or (UNEDITED,):
            n_found, n_true = counts.get(edit, (0, 0))
            counts[edit] = n_found + int(hit), n_true + 1
    return dict(sorted(counts.items()))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
