"""Segments: which paths belong to one copy, and the view of a segment."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.matching.paths import AlignmentPath, joined
from monitor.matching.stitching import MAX_PATHS, PathState, Scoring, SegmentView, Stitcher
from reference_db.store.catalog import ReferenceId

FILM = ReferenceId("film")


def path(live: int, ref: int, n: int, weight: float = 0.8) -> AlignmentPath:
    """A path at normal speed."""
    moments = (
        float(sum(range(n))),
        float(sum(range(n))),
        float(sum(i * i for i in range(n))),
        float(sum(i * i for i in range(n))),
    )
    points = tuple((live + i, ref + i) for i in range(n))
    return AlignmentPath(points[0], points[0], points[-1], n, n, n * weight, float(n), moments, points)


def distinct(n: int = 400) -> NDArray[np.float32]:
    return np.eye(n, dtype=np.float32)


def segments(
    paths: list[AlignmentPath], rows: NDArray[np.float32] | None = None, scoring: Scoring | None = None
) -> list[SegmentView]:
    """Pushes paths as a live stream does: each second every path started so far, up to that second."""
    reference_rows = distinct() if rows is None else rows
    stitcher = Stitcher(scoring or Scoring(), lambda reference: reference_rows)
    closed = []
    end = max(p.last[0] for p in paths) + 1
    for second in range(end):
        states = []
        for p in paths:
            n = min(second, p.last[0]) - p.first[0] + 1
            if n >= 1 and second <= p.last[0] + 1:
                so_far = path(*p.first, n, p.mean_weight)
                states.append(PathState(FILM, so_far, so_far, second <= p.last[0]))
        closed += [view for view in stitcher.push(second, states) if not view.is_open]
    return sorted(closed + stitcher.finish(), key=lambda view: view.start)


def test_a_cut_a_freeze_and_a_break_are_bridged() -> None:
    #       live 10..15, 4 s of the film cut out, 16..21, 4 s held, 26..31
    (view,) = segments([path(10, 50, 6), path(16, 60, 6), path(26, 67, 6)])
    assert (view.live_start_s, view.live_end_s, view.ref_start_s, view.ref_end_s) == (10, 32, 50, 73)
    assert view.start == (10, 50)
    assert view.n_live == 18
    assert view.score == pytest.approx(0.8, abs=0.01)


def test_a_copy_in_many_pieces_stays_small() -> None:
    stitcher, n = Stitcher(Scoring(), lambda reference: distinct(6_000)), 400
    views = []
    for number in range(n):  # ten seconds, two cut out, for more than an hour
        piece = path(number * 10, number * 12, 10)
        views = stitcher.push(number * 10 + 10, [PathState(FILM, piece, piece, False)])
    (view,) = views
    assert len(view.paths) <= MAX_PATHS
    assert (view.start, view.live_start_s, view.live_end_s) == ((0, 0), 0, n * 10)
    assert (view.ref_start_s, view.ref_end_s, view.n_live) == (0, n * 12 - 2, n * 10)
    assert view.score == pytest.approx(0.8, abs=0.01)


def test_joined_paths_add_up() -> None:
    parts = [path(10, 50, 6, 0.5), path(17, 57, 8, 0.9)]
    whole = joined(parts)
    assert (whole.start, whole.first, whole.last, whole.n_members) == ((10, 50), (10, 50), (24, 64), 14)
    assert whole.sum_weight == pytest.approx(6 * 0.5 + 8 * 0.9)
    assert whole.speed == pytest.approx(1.0)


def test_a_second_airing_is_a_second_segment() -> None:
    assert len(segments([path(10, 50, 10), path(40, 50, 10)])) == 2  # later
    assert len(segments([path(10, 50, 10), path(10, 200, 10)])) == 2  # at once, another part
    assert len(segments([path(10, 50, 10), path(21, 50, 10)])) == 2  # a loop: back to the start


def test_paths_side_by_side_are_one_copy_counted_once() -> None:
    (view,) = segments([path(10, 50, 10, 0.8), path(11, 53, 4, 0.3)])
    assert (view.n_live, view.ref_end_s) == (10, 60)
    assert view.score == pytest.approx(0.8, abs=0.01)


def test_a_static_shot_mirrored_elsewhere_in_the_reference_is_an_echo() -> None:
    rows = distinct()
    rows[200:220] = rows[50:70]  # the same shot again
    strong, echo = segments([path(10, 50, 20, 0.8), path(10, 200, 20, 0.6)], rows)
    assert strong.echo_of is None
    assert echo.echo_of == strong.start
    assert all(view.echo_of is None for view in segments([path(10, 50, 20, 0.8), path(10, 200, 20, 0.6)]))


def test_a_segment_that_another_explains_on_its_own_line_is_its_echo() -> None:
    # A still shot, live 10..40 from 50 on; the path was lost at 30 and found again ten seconds off.
    rows = distinct()
    rows[50:100] = rows[50] + 0.3 * rows[50:100]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    stitcher = Stitcher(Scoring(), lambda reference: rows, lambda second: rows[40 + second])
    first, again = path(10, 50, 20, 0.8), path(33, 83, 8, 0.6)
    stitcher.push(31, [PathState(FILM, first, first, False)])
    views = {view.start: view for view in stitcher.push(41, [PathState(FILM, again, again, True)])}
    views |= {view.start: view for view in stitcher.finish()}
    assert views[again.start].echo_of == first.start
    other = Stitcher(Scoring(), lambda reference: distinct(), lambda second: distinct()[50 + second])
    other.push(31, [PathState(FILM, first, first, False)])
    assert all(view.echo_of is None for view in other.push(41, [PathState(FILM, again, again, True)]))


def test_a_still_picture_is_discounted() -> None:
    moving = path(10, 50, 5)
    still = AlignmentPath(
        moving.start, moving.first, moving.last, 5, 5, moving.sum_weight, 0.0, moving.moments, moving.points
    )
    scoring = Scoring(novelty_floor=0.4)
    assert scoring.evidence_s([moving]) == pytest.approx(5)
    assert scoring.evidence_s([still]) == pytest.approx(2)
    assert Scoring(novelty_floor=1.0).evidence_s([still]) == pytest.approx(5)
