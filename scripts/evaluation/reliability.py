"""Reliability: of alerts that state a confidence, the share that is right.

Alerts are put into bins by the confidence that they state; in a calibrated system the share of right ones in a bin is
the bin's mean confidence, within what chance allows for that number of alerts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from evaluation.alert_samples import AlertSample

EDGES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
Z = 1.96  # of an interval that has the true share in 95 of 100 cases


@dataclass(frozen=True, slots=True)
class Bin:
    """The alerts whose confidence lies in [low, high)."""

    low: float
    high: float
    n: int
    mean_confidence: float
    share_right: float
    interval: tuple[float, float]  # of the true share, by Wilson

    def as_dict(self) -> dict[str, object]:
        return {
            "from": self.low,
            "to": self.high,
            "alerts": self.n,
            "mean_confidence": round(self.mean_confidence, 3),
            "share_right": round(self.share_right, 3),
            "interval": [round(edge, 3) for edge in self.interval],
        }


def reliability(samples: Sequence[AlertSample]) -> list[Bin]:
    """The bins that have alerts, by rising confidence."""
    bins = []
    for low, high in pairwise(EDGES):
        inside = [sample for sample in samples if low <= sample.confidence < high]
        if inside:
            n, n_right = len(inside), sum(sample.is_right for sample in inside)
            mean = sum(sample.confidence for sample in inside) / n
            bins.append(Bin(low, high, n, mean, n_right / n, wilson(n_right, n)))
    return bins


def calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance of stated confidence and share of right ones, over all alerts."""
    n = sum(one.n for one in bins)
    return sum(one.n * abs(one.mean_confidence - one.share_right) for one in bins) / n if n else 0.0


def wilson(n_right: int, n: int) -> tuple[float, float]:
    """The interval in which the true share lies, given how many of `n` were right."""
    share, z2 = n_right / n, Z * Z / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)
