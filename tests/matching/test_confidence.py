"""The confidence of segments: monotone, rounded, and the same wherever it is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.config.settings import Settings
from monitor.matching.confidence import (
    MAX_CONFIDENCE,
    SHIPPED_WEIGHTS,
    ConfidenceModel,
    best_confidence,
    confidence,
    logit,
    shipped_model,
)

SHARES = st.floats(0.0, 1.0)


@dataclass(frozen=True)
class Evidence:
    score: float
    change: float | None = None


@given(SHARES, SHARES, SHARES, SHARES)
def test_more_evidence_never_lowers_the_confidence(score: float, more: float, change: float, better: float) -> None:
    low = confidence(Evidence(min(score, more), min(change, better)))
    high = confidence(Evidence(max(score, more), max(change, better)))
    assert 0.0 <= low <= high <= MAX_CONFIDENCE


@given(SHARES, SHARES | st.none())
def test_a_confidence_has_three_decimals_and_at_most_the_best_one(score: float, change: float | None) -> None:
    stated = confidence(Evidence(score, change))
    assert stated == round(stated, 3)
    assert json.loads(json.dumps(stated)) == stated
    assert stated <= best_confidence(Evidence(score, change)) == best_confidence(Evidence(score))


def test_a_segment_without_evidence_has_none() -> None:
    assert confidence(Evidence(0.0, 1.0)) == best_confidence(Evidence(0.0)) == 0.0


def test_the_default_minimum_admits_about_the_scores_that_alerts_began_with() -> None:
    least = Settings().alerting.min_confidence
    assert best_confidence(Evidence(0.03)) < least <= best_confidence(Evidence(0.2))


def test_a_look_alike_has_less_than_a_copy_of_the_same_score() -> None:
    assert confidence(Evidence(0.3, 0.25)) <= confidence(Evidence(0.3, 0.8)) - 0.1


def test_the_shipped_weights_name_what_they_were_fitted_on() -> None:
    stored = json.loads(SHIPPED_WEIGHTS.read_text())
    assert "scripts/fit_confidence.py" in stored["about"]
    assert 0 < stored["right"] < stored["samples"]
    assert shipped_model() == ConfidenceModel(**stored["weights"])


def test_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = ConfidenceModel(1.5, 2.0, 0.25, 0.5)
    model.save(tmp_path / "confidence.json", {"samples": 3})
    assert ConfidenceModel.load(tmp_path / "confidence.json") == model
    assert json.loads((tmp_path / "confidence.json").read_text())["samples"] == 3


def test_a_weight_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="must not lower"):
        ConfidenceModel(0.0, -1.0, 0.0, 0.0)


def test_a_model_is_the_logistic_function_of_its_quantities() -> None:
    assert logit(0.5) == 0.0
    model = ConfidenceModel(0.0, 1.0, 2.0, 0.5)
    assert model.of(Evidence(0.2, 0.0)) == 0.2
    assert model.of(Evidence(0.12, 0.0)) == 0.12
    assert model.of(Evidence(0.06, 0.0)) == 0.03  # half of it: less than enough to judge
    assert model.of(Evidence(0.5, 0.5)) == model.of(Evidence(0.5)) == 0.731
    assert model.at_best(Evidence(0.5)) == model.of(Evidence(0.5, 1.0)) == 0.881
