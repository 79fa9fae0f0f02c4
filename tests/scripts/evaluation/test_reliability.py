"""Reliability tables of samples with known confidence."""

from __future__ import annotations

import pytest

from evaluation.alert_samples import AlertSample
from evaluation.reliability import calibration_error, reliability, wilson
from evaluation.scoring import FoundCopy

FOUND = FoundCopy("ch0", "film", 0.0, 10.0, 0.0, 10.0, 0.5)


def samples_of(confidence: float, n: int, n_right: int) -> list[AlertSample]:
    return [AlertSample("alert.ended", FOUND, confidence, 0.5, 0.9, at < n_right) for at in range(n)]


def test_alerts_are_counted_by_their_confidence() -> None:
    low, high = reliability([*samples_of(0.55, 10, 5), *samples_of(0.92, 20, 18)])
    assert (low.low, low.high, low.n, low.share_right) == (0.5, 0.6, 10, 0.5)
    assert (high.low, high.high, high.n, high.share_right) == (0.9, 0.95, 20, 0.9)
    assert high.mean_confidence == pytest.approx(0.92)
    assert high.interval[0] < 0.9 < high.interval[1]


def test_a_calibrated_system_has_no_error_and_an_overconfident_one_has() -> None:
    assert calibration_error(reliability(samples_of(0.9, 10, 9))) == pytest.approx(0.0)
    assert calibration_error(reliability(samples_of(0.9, 10, 4))) == pytest.approx(0.5)
    assert calibration_error([]) == 0.0


def test_the_interval_narrows_with_more_alerts() -> None:
    few, many = wilson(9, 10), wilson(900, 1000)
    assert 0.0 <= few[0] < many[0] < 0.9 < many[1] < few[1] <= 1.0
    assert wilson(10, 10)[1] == 1.0
