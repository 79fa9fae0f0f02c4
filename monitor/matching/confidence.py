"""Confidence: the chance that a segment is a copy, so that of alerts that say 0.9 nine in ten are right.

A logistic model of what the matcher knows about a segment: its score and its seconds of evidence. Both are sums over
its paths that refining does not change, so the confidence of a segment in one second is one number wherever it is asked
for: live, in a replay, after a restart, at the decision whether to alert and in the alert itself. It is rounded before
anything compares it.

The weights stand in `weights/confidence.json` with the command that fitted them. Each is at least 0: a higher score or
more evidence never lowers the confidence.
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
MAX_CONFIDENCE = 0.99  # no test here could tell a higher one from it
MIN_SCORE = 1e-3  # a lower score counts as this one


class SegmentEvidence(Protocol):
    """What the confidence depends on; a `SegmentView` has it."""

    @property
    def score(self) -> float: ...

    @property
    def evidence_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ConfidenceModel:
    """A logistic model; a weight for each quantity of `quantities`."""

    intercept: float
    score: float  # weight of the logit of the score
    evidence: float  # weight of the logarithm of the seconds of evidence

    def __post_init__(self) -> None:
        if self.score < 0 or self.evidence < 0:
            raise ValueError(f"more evidence must not lower the confidence, got {self}")

    def of(self, segment: SegmentEvidence) -> float:
        """The confidence of a segment, 0 to MAX_CONFIDENCE; 0 without any evidence."""
        if segment.score <= 0:
            return 0.0
        score, evidence = quantities(segment)
        logit = self.intercept + self.score * score + self.evidence * evidence
        return round(min(MAX_CONFIDENCE, 1.0 / (1.0 + math.exp(-logit))), DECIMALS)

    def save(self, path: Path, about: dict[str, object]) -> None:
        """Writes the weights, with what they were fitted on."""
        path.write_text(json.dumps({**about, "weights": asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text())["weights"])


def quantities(segment: SegmentEvidence) -> tuple[float, float]:
    """What the model weighs: the logit of the score, and the logarithm of the seconds of evidence."""
    score = min(max(segment.score, MIN_SCORE), 1 - MIN_SCORE)
    return math.log(score / (1 - score)), math.log1p(segment.evidence_s)


@cache
def shipped_model() -> ConfidenceModel:
    return ConfidenceModel.load(SHIPPED_WEIGHTS)


def confidence(segment: SegmentEvidence) -> float:
    """The confidence of a segment by the shipped model."""
    return shipped_model().of(segment)
