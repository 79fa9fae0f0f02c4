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
    confidence,
    quantities,
    shipped_model,
)

SCORES = st.floats(0.0, 1.0)
SECONDS = st.floats(0.0, 10_000.0)


@dataclass(frozen=True)
class Evidence:
    score: float
    evidence_s: float = 9.0


@given(SCORES, SCORES, SECONDS, SECONDS)
def test_more_evidence_never_lowers_the_confidence(score: float, more: float, seconds: float, longer: float) -> None:
    low = confidence(Evidence(min(score, more), min(seconds, longer)))
    high = confidence(Evidence(max(score, more), max(seconds, longer)))
    assert 0.0 <= low <= high <= MAX_CONFIDENCE


@given(SCORES, SECONDS)
def test_a_confidence_has_three_decimals(score: float, seconds: float) -> None:
    stated = confidence(Evidence(score, seconds))
    assert stated == round(stated, 3)
    assert json.loads(json.dumps(stated)) == stated


def test_a_segment_without_evidence_has_none() -> None:
    assert confidence(Evidence(0.0)) == 0.0


def test_the_default_minimum_gives_about_the_alerts_of_a_score_of_12_hundredths() -> None:
    least = Settings().alerting.min_confidence
    assert confidence(Evidence(0.08)) < least <= confidence(Evidence(0.2))


def test_the_shipped_weights_name_what_they_were_fitted_on() -> None:
    stored = json.loads(SHIPPED_WEIGHTS.read_text())
    assert "scripts/fit_confidence.py" in stored["about"]
    assert 0 < stored["right"] < stored["samples"]
    assert shipped_model() == ConfidenceModel(**stored["weights"])


def test_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = ConfidenceModel(1.5, 2.0, 0.25)
    model.save(tmp_path / "confidence.json", {"samples": 3})
    assert ConfidenceModel.load(tmp_path / "confidence.json") == model
    assert json.loads((tmp_path / "confidence.json").read_text())["samples"] == 3


def test_a_weight_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="must not lower"):
        ConfidenceModel(0.0, -1.0, 0.0)


def test_a_model_is_the_logistic_function_of_its_quantities() -> None:
    score, seconds = quantities(Evidence(0.5, 0.0))
    assert (score, seconds) == (0.0, 0.0)
    assert ConfidenceModel(0.0, 1.0, 1.0).of(Evidence(0.5, 0.0)) == 0.5
    assert ConfidenceModel(0.0, 1.0, 0.0).of(Evidence(0.2)) == 0.2
