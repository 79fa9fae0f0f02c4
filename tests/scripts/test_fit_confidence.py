"""Fitting the confidence to planted samples."""

from __future__ import annotations

import numpy as np
import pytest
from fit_confidence import fit, restated

from evaluation.alert_samples import AlertSample
from evaluation.reliability import calibration_error, reliability
from evaluation.scoring import FoundCopy

FOUND = FoundCopy("ch0", "film", 0.0, 10.0, 0.0, 10.0, 0.5)


def planted(n: int, seed: int, sign: float = 1.0) -> list[AlertSample]:
    """Alerts that are right with the chance 1 / (1 + exp(-(3 + 1.5 logit(score)))), or less likely with evidence."""
    rng = np.random.default_rng(seed)
    samples = []
    for score, evidence_s in zip(rng.uniform(0.02, 0.9, n), rng.uniform(1, 30, n), strict=True):
        logit = 3 + 1.5 * np.log(score / (1 - score)) + (0.0 if sign > 0 else 2 - np.log1p(evidence_s))
        is_right = bool(rng.random() < 1 / (1 + np.exp(-logit)))
        samples.append(AlertSample("alert.ended", FOUND, 0.0, float(score), float(evidence_s), is_right))
    return samples


def test_the_fit_finds_the_weights_and_is_calibrated_on_other_samples() -> None:
    model = fit(planted(4000, seed=1))
    assert model.intercept == pytest.approx(3.0, abs=0.4)
    assert model.score == pytest.approx(1.5, abs=0.2)
    assert calibration_error(reliability(restated(planted(4000, seed=2), model))) < 0.03


def test_a_weight_that_would_be_negative_is_0() -> None:
    model = fit(planted(2000, seed=3, sign=-1.0))
    assert model.evidence == 0.0
    assert model.score > 0
