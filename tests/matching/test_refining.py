"""Refining: the line that fits corrects a path that wanders."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.ingest.feature_windows import LiveSecond
from monitor.matching.paths import AlignmentPath
from monitor.matching.refining import refine
from monitor.matching.stitching import SegmentView
from reference_db.store.catalog import ReferenceId

N_SECONDS = 200


def unit(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)


def slow_film(seed: int) -> NDArray[np.float32]:
    """A reference whose neighbouring seconds look alike."""
    rng = np.random.default_rng(seed)
    change = rng.normal(size=(N_SECONDS, 64))
    for second in range(1, N_SECONDS):
        change[second] += 0.8 * change[second - 1]
    return unit(rng.normal(size=64) + change)


def stream(film: NDArray[np.float32], start: int, ref: float, length: int, speed: float, seed: int) -> list[LiveSecond]:
    """A minute of other pictures with a noisy copy in it."""
    rng = np.random.default_rng(seed)
    rows = unit(rng.normal(size=(60, 64)))
    for i in range(length):
        rows[start + i] = unit(film[round(ref + speed * i)] + 0.05 * rng.normal(size=64))
    return [LiveSecond(i, row, True, 1.0) for i, row in enumerate(rows)]


def wandering(points: list[tuple[int, int]]) -> SegmentView:
    path = AlignmentPath(
        points[0], points[0], points[-1], len(points), len(points), 1.0, 1.0, (0, 0, 0, 0), tuple(points)
    )
    first, last = points[0], points[-1]
    return SegmentView(
        ReferenceId("film"),
        first,
        first[0],
        last[0] + 1,
        first[1],
        last[1] + 1,
        0.5,
        len(points),
        5,
        1,
        (path,),
        True,
    )


@pytest.mark.parametrize("speed", [1.0, 1.25, 0.8])
def test_the_line_corrects_a_wandering_path(speed: float) -> None:
    film = slow_film(1)
    # On air from second 20 for 16 s, from the film's 100; the path starts late, ends early and wanders.
    lives = stream(film, 20, 100, 16, speed, 2)
    view = refine(wandering([(23, 97), (26, 108), (31, 110), (33, 121)]), lives, film, np.ones(N_SECONDS, np.bool_))
    assert view.live_start_s == pytest.approx(20, abs=1)
    assert view.live_end_s == pytest.approx(36, abs=1)
    assert view.ref_start_s == pytest.approx(100, abs=1.5)
    assert view.ref_end_s == pytest.approx(100 + 16 * speed, abs=2)


def test_a_path_over_a_cut_is_unchanged() -> None:
    rng = np.random.default_rng(3)
    film = unit(rng.normal(size=(N_SECONDS, 64)))  # every second another picture
    lives = stream(film, 20, 100, 5, 1.0, 4)
    lives[25:30] = stream(film, 25, 109, 5, 1.0, 4)[25:30]  # five seconds, four cut out, five more
    view = wandering([(20, 100), (24, 104), (25, 109), (29, 113)])
    refined = refine(view, lives, film, np.ones(N_SECONDS, np.bool_))
    assert (refined.live_start_s, refined.live_end_s, refined.ref_start_s, refined.ref_end_s) == (20, 30, 100, 114)


def test_without_the_seconds_in_memory_the_view_is_unchanged() -> None:
    film = slow_film(5)
    view = wandering([(20, 100), (35, 115)])
    assert refine(view, [], film, np.ones(N_SECONDS, np.bool_)) == view


def test_a_segment_stays_within_the_reference() -> None:
    film = slow_film(6)
    lives = stream(film, 20, 192, 8, 1.0, 7)
    view = refine(wandering([(21, 193), (26, 198)]), lives, film, np.ones(N_SECONDS, np.bool_))
    assert view.ref_end_s <= N_SECONDS
    assert view.live_end_s == pytest.approx(28, abs=1)


def held(
    film: NDArray[np.float32], keys_s: list[float], start_s: float, end_s: float, ref_s: float
) -> list[LiveSecond]:
    """A minute of which key pictures alone are decoded; a copy is on air from start_s to end_s, from ref_s on."""
    rng = np.random.default_rng(8)
    pictures = [
        unit(film[int(ref_s + key - start_s)] + 0.05 * rng.normal(size=64))  # the reference's picture of that second
        if start_s <= key < end_s
        else unit(rng.normal(size=64))
        for key in keys_s
    ]
    lives = []
    for second in range(60):
        newest = max(n for n, key in enumerate(keys_s) if key <= second + 0.5)
        lives.append(LiveSecond(second, pictures[newest], True, 1.0, second + 0.5 - keys_s[newest]))
    return lives


def refined_path(lives: list[LiveSecond], film: NDArray[np.float32]) -> SegmentView:
    return refine(wandering([(20, 99), (36, 115)]), lives, film, np.ones(N_SECONDS, np.bool_))


def test_held_pictures_count_where_they_were_on_air() -> None:
    # A key every 2 s, whatever airs:  ...  18.3 | 20.3  22.3  ...  36.3 | 38.3  ...
    #                                        19.3 is half-way        37.3 is half-way
    film = unit(np.random.default_rng(9).normal(size=(N_SECONDS, 64)))
    view = refined_path(held(film, [2 * n + 0.3 - 2 for n in range(32)], 19.0, 37.5, 100.0), film)
    assert [view.live_start_s, view.live_end_s] == pytest.approx([19.3, 37.3])
    assert view.ref_start_s == pytest.approx(100.3, abs=0.5)
    assert view.ref_end_s == pytest.approx(118.3, abs=0.5)


def test_an_early_key_picture_is_where_the_copy_starts_or_ends() -> None:
    # The encoder sets a key where the picture changes:  ...  16  18 | 19  21  ...  35  37 | 37.6  39.6  ...
    film = unit(np.random.default_rng(9).normal(size=(N_SECONDS, 64)))
    keys = [*range(-2, 19, 2), *range(19, 38, 2), *(37.6 + 2 * n for n in range(12))]
    view = refined_path(held(film, keys, 19.0, 37.6, 100.0), film)
    assert [view.live_start_s, view.live_end_s] == pytest.approx([19.0, 37.6])
    assert view.ref_start_s == pytest.approx(100.0, abs=0.5)
    assert view.ref_end_s == pytest.approx(118.6, abs=0.5)


def test_an_echo_is_moved_to_the_place_that_airs() -> None:
    film = unit(np.random.default_rng(10).normal(size=(N_SECONDS, 64)))
    view = refine(
        wandering([(21, 61), (34, 74)]), stream(film, 20, 100, 16, 1.0, 11), film, np.ones(N_SECONDS, np.bool_)
    )
    assert (view.live_start_s, view.live_end_s, view.ref_start_s, view.ref_end_s) == (20, 36, 100, 116)


def test_a_copy_does_not_start_before_the_stream() -> None:
    film = unit(np.random.default_rng(9).normal(size=(N_SECONDS, 64)))
    lives = held(film, [-1.0, *(n + 0.45 for n in range(60))], 0.0, 20.0, 100.0)
    view = refine(wandering([(1, 101), (18, 118)]), lives, film, np.ones(N_SECONDS, np.bool_))
    assert view.live_start_s == 0
