"""Paths: the row-wise tracker against the whole matrix aligned at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from monitor.matching.paths import MAX_POINTS, AlignmentPath, PathTracker, soft_weight
from monitor.matching.tiles import NO_STEP, MapRow
from tests.support import oracles

TAU, SIGMA = 0.3, 0.1


class Maps:
    """Similarity, mask, step and counts of one matrix."""

    def __init__(self, height: int, width: int, seed: int, density: float, holes: float) -> None:
        rng = np.random.default_rng(seed)
        self.similarity = rng.uniform(0, 1, (height, width)).astype(np.float32)
        self.mask = np.where(rng.uniform(size=(height, width)) < density, rng.uniform(size=(height, width)), 0.05)
        self.mask = self.mask.astype(np.float32)
        self.step = rng.choice(3, (max(0, height - 1), max(0, width - 1)), p=(0.6, 0.2, 0.2)).astype(np.uint8)
        self.counts = np.ones((height, width), np.bool_)
        self.counts[rng.uniform(size=height) < holes] = False
        self.counts[:, rng.uniform(size=width) < holes] = False

    def rows(self, first_s: int = 0) -> list[MapRow]:
        height, width = self.similarity.shape
        step = np.full((height, width), NO_STEP, np.uint8)
        step[:-1, :-1] = self.step
        return [
            MapRow(first_s + i, 0, self.similarity[i], self.mask[i], step[i], self.counts[i]) for i in range(height)
        ]

    def whole(self) -> list[oracles.WholePath]:
        return oracles.align_whole(self.similarity, self.mask, self.step, self.counts, TAU, SIGMA)


@st.composite
def maps(draw: st.DrawFn, max_side: int = 24) -> Maps:
    return Maps(
        draw(st.integers(1, max_side)),
        draw(st.integers(1, max_side)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from((0.1, 0.3, 0.7))),
        draw(st.sampled_from((0.0, 0.0, 0.2, 0.6))),
    )


def track(rows: list[MapRow]) -> list[AlignmentPath]:
    tracker = PathTracker(TAU, SIGMA)
    paths = [path for row in rows for path in tracker.push(row)] + tracker.finish()
    return sorted(paths, key=lambda path: path.start)


def same(path: AlignmentPath, whole: oracles.WholePath) -> bool:
    return (
        path.start == whole.start
        and path.first == whole.members[0]
        and path.last == whole.members[-1]
        and path.n_members == len(whole.members)
        and path.n_live == len({i for i, _ in whole.members})
        and path.sum_weight == sum(whole.weights)  # exactly: the same numbers added in the same order
        and set(path.points) <= set(whole.members)
    )


@settings(max_examples=300, deadline=None)
@given(maps())
def test_rows_one_by_one_give_the_paths_of_the_whole_matrix(drawn: Maps) -> None:
    paths, whole = track(drawn.rows()), sorted(drawn.whole(), key=lambda path: path.start)
    assert [path.start for path in paths] == [path.start for path in whole]
    assert all(same(path, other) for path, other in zip(paths, whole, strict=True))


@settings(max_examples=100, deadline=None)
@given(maps(), st.integers(-50, 100_000))
def test_paths_shift_with_the_first_stream_second_of_the_matrix(drawn: Maps, first_s: int) -> None:
    here, there = track(drawn.rows()), track(drawn.rows(first_s))
    assert [(p.start[0] + first_s, p.start[1], p.sum_weight) for p in here] == [
        (p.start[0], p.start[1], p.sum_weight) for p in there
    ]


@settings(max_examples=100, deadline=None)
@given(maps(), st.integers(0, 20))
def test_peek_does_not_change_the_tracker(drawn: Maps, at: int) -> None:
    rows, tracker, paths = drawn.rows(), PathTracker(TAU, SIGMA), []
    for n, row in enumerate(rows):
        paths += tracker.push(row)
        if n == at:
            tracker.peek(rows[n + 1 : n + 5])
    paths += tracker.finish()
    assert sorted(paths, key=lambda path: path.start) == track(rows)


def diagonal(n: int, weight: float = 0.8) -> NDArray[np.float32]:
    cells = np.full((n, n), 0.01, np.float32)
    np.fill_diagonal(cells, weight)
    return cells


def test_a_copy_is_one_path_and_misses_reset() -> None:
    # 0 1 2 . . 5 6 . . 9   two misses twice: a path ends only after three in a row
    cells = diagonal(10)
    for i in (3, 4, 7, 8):
        cells[i, i] = 0.01
    drawn = Maps(10, 10, 0, 0, 0)
    drawn.similarity, drawn.mask = np.ones_like(cells), cells
    drawn.step = np.zeros((9, 9), np.uint8)
    (path,) = track(drawn.rows())
    assert (path.first, path.last, path.n_members, path.shorter_side) == ((0, 0), (9, 9), 6, 10)
    assert path.speed == pytest.approx(1.0)


def test_a_long_path_has_a_bounded_number_of_points() -> None:
    tracker = PathTracker(TAU, SIGMA)
    for i in range(5_000):  # a band that moves with the path: one column each side of it
        mask = np.array([0.0, 0.9, 0.0], np.float32)
        tracker.push(MapRow(i, i - 1, np.ones(3, np.float32), mask, np.zeros(3, np.uint8), np.ones(3, np.bool_)))
    (path,) = tracker.open_paths()
    assert path.live_seconds >= 4_999
    assert 8 < len(path.points) <= MAX_POINTS


def test_the_soft_weight_is_that_of_the_paper() -> None:
    assert soft_weight(5, 100) == pytest.approx(1 / (1 + 100 * math.exp(-5)))
