"""What alerts state, compared with the truth: one alert per copy, the right place and speed, reasons of retractions.

`Statements.of` counts over the events of channels whose copies are known. `first_and_second_halves` cuts films in two,
to see what alerts when a scene goes on that is not registered: the first half is a reference, the second is aired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from evaluation.recordings import Recording
from evaluation.scoring import FoundCopy, TrueCopy, overlap
from monitor.alerting.alerts import ENDED, RETRACTED, Alert

MAX_DISAGREEMENT = 0.02  # between an alert's speed and its own spans
MIN_HALF_S = 8


@dataclass(frozen=True, slots=True)
class Statements:
    """Counts over all alerts, and errors of the speeds that they state."""

    n_true: int
    n_found: int
    n_started: int
    n_ended: int
    n_retracted: int
    n_without_reason: int  # retracted ones
    n_ambiguous: int
    n_wrong: int  # ended at a place that neither the alert nor its alternatives name correctly
    n_speeds: int
    speed_error_median: float | None
    speed_error_p90: float | None
    n_speeds_unlike_spans: int

    @property
    def started_per_found(self) -> float | None:
        return round(self.n_started / self.n_found, 3) if self.n_found else None

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"started_per_found": self.started_per_found}

    @classmethod
    def of(cls, events: Sequence[Alert], truth: Sequence[TrueCopy]) -> Statements:
        ended = [event for event in events if event.type == ENDED]
        retracted = [event for event in events if event.type == RETRACTED]
        found = [[true for true in truth if overlap(copy_of(alert), true) > 0] for alert in ended]
        errors = [
            abs(alert.speed - _speed(true[0]))
            for alert, true in zip(ended, found, strict=True)
            if alert.speed is not None and true
        ]
        return cls(
            n_true=len(truth),
            n_found=len({true for copies in found for true in copies}),
            n_started=len({event.id for event in events}),
            n_ended=len(ended),
            n_retracted=len(retracted),
            n_without_reason=sum(not event.reason for event in retracted),
            n_ambiguous=sum(alert.ambiguous for alert in ended),
            n_wrong=sum(not copies for copies in found),
            n_speeds=len(errors),
            speed_error_median=_rounded(np.median(errors)) if errors else None,
            speed_error_p90=_rounded(np.quantile(errors, 0.9)) if errors else None,
            n_speeds_unlike_spans=sum(not _agrees(event) for event in events),
        )


def copy_of(alert: Alert) -> FoundCopy:
    """The copy that an alert claims."""
    return FoundCopy(
        alert.channel,
        alert.reference,
        alert.channel_start,
        alert.channel_end,
        alert.reference_start,
        alert.reference_end,
        alert.score,
        alert.detected_at,
        alert.alternatives,
        confidence=alert.confidence,
    )


def first_and_second_halves(recordings: Sequence[Recording]) -> tuple[list[Recording], list[Recording]]:
    """The first halves of all films that are long enough, and the second ones under the same names."""
    long = [recording for recording in recordings if len(recording.rows) >= 2 * MIN_HALF_S]
    halves = [len(recording.rows) // 2 for recording in long]
    return (
        [_cut(recording, 0, half) for recording, half in zip(long, halves, strict=True)],
        [_cut(recording, half, len(recording.rows)) for recording, half in zip(long, halves, strict=True)],
    )


def _cut(recording: Recording, first: int, last: int) -> Recording:
    return Recording(recording.name, recording.rows[first:last].copy(), recording.informative[first:last].copy())


def _speed(true: TrueCopy) -> float:
    return (true.reference_end - true.reference_start) / (true.channel_end - true.channel_start)


def _agrees(alert: Alert) -> bool:
    """Whether the alert states no speed, or the one of its own spans."""
    if alert.speed is None:
        return True
    spans = (alert.reference_end - alert.reference_start) / (alert.channel_end - alert.channel_start)
    return abs(alert.speed - spans) <= MAX_DISAGREEMENT


def _rounded(value: float | np.floating) -> float:
    return round(float(value), 4)
