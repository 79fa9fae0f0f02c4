"""Ambiguity: films that repeat themselves or stand still have several places that explain a copy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monitor.matching.ambiguity import MAX_PLACES, alternatives
from monitor.matching.stitching import SegmentView
from reference_db.store.catalog import ReferenceId

N_SECONDS = 60


def unit(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)


def found(film: NDArray[np.float32], ref_s: int, length: int, noise: float = 0.3) -> tuple[tuple[float, float], ...]:
    """The alternatives of a noisy copy of the film from `ref_s` on, found at its place."""
    rng = np.random.default_rng(5)
    rows = unit(film[ref_s : ref_s + length] + noise * rng.normal(size=(length, film.shape[1])) / film.shape[1] ** 0.5)
    lives = {100 + n: row for n, row in enumerate(rows)}
    end_s, ref_end_s = 100.0 + length, float(ref_s + length)
    view = SegmentView(
        ReferenceId("film"), (100, ref_s), 100.0, end_s, float(ref_s), ref_end_s, 0.5, length, 5, 3, (), True
    )
    return alternatives(view, lives, film, np.ones(len(film), np.bool_))


def varied(n: int = N_SECONDS, seed: int = 1) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).normal(size=(n, 64)))


def test_a_film_of_different_pictures_has_one_place() -> None:
    assert found(varied(), 20, 10) == ()


def test_another_recording_of_a_scene_is_no_alternative() -> None:
    background = np.random.default_rng(2).normal(size=64)
    assert found(unit(background + 0.6 * np.random.default_rng(3).normal(size=(N_SECONDS, 64))), 20, 10) == ()


def test_every_repeat_of_a_loop_is_listed() -> None:
    film = np.tile(varied(12), (5, 1))  # 12 s, five times
    assert sorted(found(film, 12, 10)) == [(0.0, 10.0), (24.0, 34.0), (36.0, 46.0), (48.0, 58.0)]


def test_a_loop_of_fractional_length_is_ambiguous_where_its_repeats_are_out_of_phase() -> None:
    phase = 2 * np.pi * np.arange(N_SECONDS) / 7.4  # seconds 37 apart are alike, those 7 apart out of phase
    turns = [wave(k * phase) for k in (1, 2) for wave in (np.cos, np.sin)]
    film = unit(np.stack([*turns, np.full(N_SECONDS, 1.0)], axis=1))
    assert (37.0, 45.0) in [(round(start), round(end)) for start, end in found(film, 0, 8, noise=0.05)]


def test_a_still_film_fits_anywhere() -> None:
    film = np.repeat(varied(1), N_SECONDS, axis=0)
    places = found(film, 20, 9)
    assert 4 < len(places) <= MAX_PLACES
    assert all(start >= 0 and end <= N_SECONDS and abs(start - 20) >= 3 for start, end in places)


def test_too_few_seconds_are_not_examined() -> None:
    assert found(np.repeat(varied(1), N_SECONDS, axis=0), 20, 3) == ()
