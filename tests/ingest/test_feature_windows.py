"""The rolling window: every second once, with holes marked."""

from __future__ import annotations

import numpy as np
import pytest

from monitor.ingest.feature_windows import FeatureWindow


def unit(*numbers: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    row = np.array(numbers, np.float32)
    return row / np.linalg.norm(row)


def test_skipped_seconds_are_added_as_unseen() -> None:
    window = FeatureWindow()
    window.push(10, unit(1, 0), True)
    added = window.push(13, unit(0, 1), True)
    assert [(live.second, live.counts) for live in added] == [(11, False), (12, False), (13, True)]
    assert [live.second for live in window.since(11)] == [11, 12, 13]


def test_the_window_forgets_the_oldest() -> None:
    window = FeatureWindow(length_s=4)
    for second in range(10):
        window.push(second, unit(1, second + 1), True)
    assert [live.second for live in window] == [6, 7, 8, 9]


def test_a_second_cannot_be_added_twice() -> None:
    window = FeatureWindow()
    window.push(5, unit(1, 0), True)
    with pytest.raises(ValueError, match="does not come after"):
        window.push(5, unit(1, 0), True)


def test_a_still_picture_has_no_novelty() -> None:
    window = FeatureWindow()
    (first,) = window.push(0, unit(1, 0), True)
    (same,) = window.push(1, unit(1, 0), True)
    (other,) = window.push(2, unit(0, 1), True)
    assert first.novelty == 1.0
    assert same.novelty == pytest.approx(0.0, abs=1e-6)
    assert other.novelty == 1.0


def test_a_black_second_has_a_row_but_does_not_count() -> None:
    (black,) = FeatureWindow().push(0, unit(1, 0), False)
    assert black.row is not None
    assert not black.counts


def test_a_held_second_is_as_new_as_the_picture_it_repeats() -> None:
    window = FeatureWindow()
    window.push(0, unit(1, 0), True)
    (new,) = window.push(1, unit(0, 1), True)
    (held,) = window.push(2, unit(0, 1), True, held=True)
    (frozen,) = window.push(3, unit(0, 1), True)
    assert new.novelty == held.novelty == 1
    assert frozen.novelty == 0
