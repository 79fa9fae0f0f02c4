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
    """Alerts whose odds of being right are 1.5 logit(score) + 4 change; a fifth are still and count as 0.25."""
    rng = np.random.default_rng(seed)
    samples = []
    for score, change in zip(rng.uniform(0.02, 0.9, n), rng.uniform(0, 1, n), strict=True):
        known = float(change) if rng.random() < 0.8 else None
        odds = 1.5 * np.log(score / (1 - score)) + sign * 4 * (0.25 if known is None else known)
        is_right = bool(rng.random() < 1 / (1 + np.exp(-odds)))
        samples.append(AlertSample("alert.ended", FOUND, 0.0, float(score), known, is_right))
    return samples


def test_the_fit_finds_the_weights_and_is_calibrated_on_other_samples() -> None:
    model = fit(planted(6000, seed=1))
    assert model.intercept == pytest.approx(0.0, abs=0.4)
    assert model.score == pytest.approx(1.5, abs=0.2)
    assert model.change == pytest.approx(4.0, abs=0.5)
    assert model.still == pytest.approx(0.25, abs=0.1)
    assert calibration_error(reliability(restated(planted(6000, seed=2), model))) < 0.03


def test_a_weight_that_would_be_negative_is_0() -> None:
    model = fit(planted(2000, seed=3, sign=-1.0))
    assert model.change == 0.0
    assert model.score > 0
