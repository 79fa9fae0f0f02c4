"""Scoring, on cases small enough to count by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.scoring import (
    LEVELS,
    Delays,
    FoundCopy,
    Rates,
    TrueCopy,
    iou,
    overlap,
    read_truth,
    score,
)

# channel  0....10....20....30....40....50
# truth        AAAAAA      BBBBBB            A: film, B: film later on
# found        aaa          bbbbbb    cc     a: half of A, b: B shifted by a second, c: false alarm
A = TrueCopy("ch0", "film", 10, 20, 100, 110, ("logo", "speed1.25"))
B = TrueCopy("ch0", "film", 30, 40, 200, 210)
a = FoundCopy("ch0", "film", 10, 15, 100, 105, 0.9, 14.0)
b = FoundCopy("ch0", "film", 31, 41, 201, 211, 0.8, 36.0)
c = FoundCopy("ch0", "film", 45, 48, 10, 13, 0.4, 47.0)


def test_iou_is_shared_time_over_all_time() -> None:
    assert iou(0, 10, 5, 20) == pytest.approx(5 / 20)
    assert iou(0, 10, 10, 20) == 0.0
    assert iou(0, 10, 12, 20) == 0.0
    assert iou(3, 4, 3, 4) == 1.0


def test_overlap_is_the_smaller_side() -> None:
    found = FoundCopy("ch0", "film", 10, 20, 100, 105, 1.0)
    assert overlap(found, A) == pytest.approx(0.5)
    assert overlap(replace(found, channel_end=12), A) == pytest.approx(0.2)


def test_another_channel_or_reference_does_not_overlap() -> None:
    assert overlap(replace(a, channel="ch1"), A) == 0.0
    assert overlap(replace(a, reference="other"), A) == 0.0


def test_rates_by_level() -> None:
    result = score([a, b, c], [A, B], threshold=0.0)
    assert result.own[0.0] == Rates(2 / 3, 1.0)
    assert result.own[0.3] == Rates(2 / 3, 1.0)
    assert result.own[0.5] == Rates(1 / 3, 0.5)  # a is exactly half of A: not more than 0.5
    assert result.own[0.7] == Rates(1 / 3, 0.5)
    assert result.own[0.0].f1 == pytest.approx(0.8)


def test_the_best_threshold_excludes_the_false_alarm() -> None:
    best = score([a, b, c], [A, B], threshold=0.0).best
    assert best[0.0].rates == Rates(1.0, 1.0)
    assert best[0.0].threshold == 0.8
    assert best[0.5].rates == Rates(0.5, 0.5)


def test_our_own_threshold_decides_what_is_an_alert() -> None:
    result = score([a, b, c], [A, B], threshold=0.85, hours=0.5)
    assert (result.n_found, result.false_alarms) == (1, 0)
    assert result.own[0.0] == Rates(1.0, 0.5)
    assert result.best[0.0].rates == Rates(1.0, 1.0)  # the best threshold may be lower
    low = score([a, b, c], [A, B], threshold=0.4, hours=0.5)
    assert low.false_alarms_per_hour == pytest.approx(2.0)


def test_a_copy_told_in_pieces_counts_each_piece() -> None:
    second_half = FoundCopy("ch0", "film", 16, 20, 106, 110, 0.7, 19.0)
    result = score([a, second_half], [A, B], threshold=0.0)
    assert result.alerts_per_copy == 2.0
    assert result.own[0.0] == Rates(1.0, 0.5)


def test_seconds_to_alert_are_of_the_first_alert_of_each_found_copy() -> None:
    later = FoundCopy("ch0", "film", 16, 20, 106, 110, 0.95, 12.5)
    assert score([a, later, b, c], [A, B], threshold=0.0).seconds_to_alert == Delays(6.0, 6.0)
    assert score([a, later], [A, B], threshold=0.0).seconds_to_alert == Delays(2.5, 2.5)
    assert score([replace(a, detected_at=None)], [A], threshold=0.0).seconds_to_alert is None


def test_recall_by_edit_counts_a_copy_under_each_of_its_edits() -> None:
    result = score([a], [A, B, replace(B, channel_start=70, channel_end=80, edits=("logo",))], threshold=0.0)
    assert result.recall_by_edit == {"logo": (1, 2), "none": (0, 1), "speed1.25": (1, 1)}


def test_a_broadcast_without_copies_has_only_false_alarms() -> None:
    result = score([a, c], [], threshold=0.5, hours=2.0)
    assert (result.false_alarms, result.false_alarms_per_hour) == (1, 0.5)
    assert result.own[0.0] == Rates(0.0, 0.0)
    assert result.alerts_per_copy is None


def test_nothing_found() -> None:
    result = score([], [A, B], threshold=0.5)
    assert result.best[0.0].rates == Rates(0.0, 0.0)
    assert result.recall_by_edit["none"] == (0, 1)


def test_truth_is_read_line_by_line(tmp_path: Path) -> None:
    line = {
        "channel": "ch0",
        "reference": "film",
        "channel_start": 10,
        "channel_end": 20,
        "reference_start": 100,
        "reference_end": 110,
        "edits": ["logo", "speed1.25"],
    }
    (tmp_path / "truth.jsonl").write_text(json.dumps(line) + "\n\n")
    assert read_truth(tmp_path / "truth.jsonl") == [A]


def _copies(values: list[tuple[int, int, int]]) -> list[FoundCopy]:
    return [FoundCopy("ch0", "film", s, s + n, s + 90, s + 90 + n, w / 10) for s, n, w in values]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 15), st.integers(0, 10)), max_size=12))
def test_best_is_the_best_of_all_thresholds_tried_one_by_one(values: list[tuple[int, int, int]]) -> None:
    found = _copies(values)
    result = score(found, [A, B], threshold=0.0)
    for level in LEVELS:
        tried = []
        for cut in {copy.score for copy in found}:
            passing = [copy for copy in found if copy.score >= cut]
            correct = sum(any(overlap(copy, true) > level for true in (A, B)) for copy in passing)
            hit = sum(any(overlap(copy, true) > level for copy in passing) for true in (A, B))
            tried.append(Rates(correct / len(passing), hit / 2).f1)
        assert result.best[level].rates.f1 == pytest.approx(max(tried, default=0.0))
        above = [copy for copy in found if copy.score >= result.best[level].threshold]
        assert score(above, [A, B], threshold=0.0).own[level].f1 == pytest.approx(max(tried, default=0.0))


def test_the_dict_is_plain_json() -> None:
    rates = json.loads(json.dumps(score([a, b, c], [A, B], threshold=0.5, hours=1.0).as_dict()))
    assert rates["own"]["iou>0"] == {"sp": 1.0, "sr": 1.0, "f1": 1.0}
    assert rates["recall_by_edit"] == {"logo": "1/1", "none": "1/1", "speed1.25": "1/1"}
    assert not np.isnan(rates["alerts_per_found_copy"])
