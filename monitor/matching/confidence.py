"""Confidence: the chance that a segment is a copy, so that of alerts that say 0.9 nine in ten are right.

A logistic model of what the matcher knows about a segment: its score, and how well its changes match once refined. A
segment that is not refined yet has the confidence that it can reach at best, so that only those are refined that may
become alerts. Both are functions of the segment alone: live, in a replay, after a restart and in Kafka a segment has
the same confidence. It is rounded before anything compares it.

The weights stand in `weights/confidence.json` with what they were fitted on. A higher score or changes that match
better never lower the confidence.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, Self

SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / "confidence.json"
DECIMALS = 3  # finer than any calibration, coarser than the last bits of a float
MAX_CONFIDENCE = 0.99  # no test here has enough alerts to confirm a higher one
MIN_SCORE = 1e-3  # a lower score counts as this one
ENOUGH = 0.12  # score below which a segment is too short or too weak to judge: its confidence falls with its score


class SegmentEvidence(Protocol):
    """What the confidence depends on; a `SegmentView` has it."""

    @property
    def score(self) -> float: ...

    @property
    def change(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class ConfidenceModel:
    """A logistic model."""

    intercept: float
    score: float  # weight of the logit of the score
    change: float  # weight of the correlation of changes
    still: float  # correlation that a scene without comparable changes counts as

    def __post_init__(self) -> None:
        if self.score < 0 or self.change < 0:
            raise ValueError(f"more evidence must not lower the confidence, got {self}")

    def of(self, segment: SegmentEvidence) -> float:
        """The confidence of a refined segment, 0 to MAX_CONFIDENCE; 0 without any evidence."""
        return self._at(segment.score, self.still if segment.change is None else segment.change)

    def at_best(self, segment: SegmentEvidence) -> float:
        """The confidence that a segment may have once it is refined."""
        return self._at(segment.score, 1.0)

    def _at(self, score: float, change: float) -> float:
        if score <= 0:
            return 0.0
        odds = self.intercept + self.score * logit(score) + self.change * min(max(change, 0.0), 1.0)
        chance = min(MAX_CONFIDENCE, 1.0 / (1.0 + math.exp(-odds)))
        return round(chance * min(1.0, score / ENOUGH), DECIMALS)

    def save(self, path: Path, about: dict[str, object]) -> None:
        """Writes the weights, with what they were fitted on."""
        path.write_text(json.dumps({**about, "weights": asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text())["weights"])


def logit(score: float) -> float:
    """The logarithm of a score's odds, within bounds."""
    bounded = min(max(score, MIN_SCORE), 1 - MIN_SCORE)
    return math.log(bounded / (1 - bounded))


@cache
def shipped_model() -> ConfidenceModel:
    return ConfidenceModel.load(SHIPPED_WEIGHTS)


def confidence(segment: SegmentEvidence) -> float:
    """The confidence of a refined segment by the shipped model."""
    return shipped_model().of(segment)


def best_confidence(segment: SegmentEvidence) -> float:
    """The confidence that a segment may have once it is refined, by the shipped model."""
    return shipped_model().at_best(segment)
