"""Hough voting on planted matrices."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.matching.hough import MAX_SEGMENTS, hough_segments
from monitor.matching.paths import soft_weight


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(0, 0.3, (height, width)).astype(np.float32)


def everywhere(cells: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.ones(cells.shape, bool)


def test_a_diagonal_is_one_segment() -> None:
    cells = noise(60, 80)
    rows = np.arange(20, 35)
    cells[rows, rows + 30] = 0.8
    (found,) = hough_segments(cells, everywhere(cells), 0.5)
    assert (found.live_start, found.live_end, found.ref_start, found.ref_end) == (20, 35, 50, 65)
    assert found.n_cells == 15
    assert found.mean_similarity == pytest.approx(0.8)


def test_the_offset_may_wander_by_a_second() -> None:
    cells = noise(40, 40)
    rows = np.arange(10, 20)
    cells[rows, rows + 5 + rows % 2] = 0.8
    (found,) = hough_segments(cells, everywhere(cells), 0.5)
    assert (found.live_start, found.live_end) == (10, 20)


def test_a_short_gap_is_bridged_and_a_long_one_is_not() -> None:
    cells = noise(60, 60)
    for rows in (np.arange(5, 12), np.arange(16, 22), np.arange(40, 48)):
        cells[rows, rows + 3] = 0.9
    found = sorted((s.live_start, s.live_end) for s in hough_segments(cells, everywhere(cells), 0.5))
    assert found == [(5, 22), (40, 48)]


def test_two_offsets_are_two_segments_strongest_first() -> None:
    cells = noise(60, 90)
    short, long = np.arange(5, 10), np.arange(30, 50)
    cells[short, short + 40] = 0.9
    cells[long, long + 7] = 0.6
    found = hough_segments(cells, everywhere(cells), 0.5)
    assert [(s.live_start, s.ref_start) for s in found] == [(30, 37), (5, 45)]


def test_cells_that_do_not_count_do_not_vote() -> None:
    cells = noise(30, 30)
    rows = np.arange(5, 20)
    cells[rows, rows] = 0.9
    counts = everywhere(cells)
    counts[5:15] = False
    (found,) = hough_segments(cells, counts, 0.5)
    assert (found.live_start, found.live_end) == (15, 20)
    assert hough_segments(cells, np.zeros_like(counts), 0.5) == []


def test_hard_weight_drops_a_short_segment_and_soft_weight_lowers_its_score() -> None:
    cells = noise(30, 30)
    for rows in (np.arange(2, 4), np.arange(15, 25)):
        cells[rows, rows + 2] = 0.8
    long, short = sorted(hough_segments(cells, everywhere(cells), 0.5), key=lambda s: -s.n_cells)
    assert long.score(None) == pytest.approx(0.8)
    assert short.score(None) == 0.0
    assert long.score(100.0) == pytest.approx(0.8 * soft_weight(10, 100.0))
    assert short.score(100.0) == pytest.approx(0.8 * soft_weight(2, 100.0))


def test_a_static_picture_gives_a_bounded_number_of_segments() -> None:
    still = np.full((40, 50), 0.9, np.float32)
    assert 0 < len(hough_segments(still, everywhere(still), 0.5)) <= MAX_SEGMENTS
