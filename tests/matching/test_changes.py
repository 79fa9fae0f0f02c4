"""Changes: another recording of the same scene does not correlate, an edited copy does."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.matching.changes import MIN_END, MIN_START, STILL, change_correlation, is_steady, min_change


def unit(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def scene(seed: int, n: int = 8, moving: float = 0.5) -> NDArray[np.float32]:
    """Unit rows of one fixed camera: the same background for every seed, other movement."""
    background = np.random.default_rng(1).normal(size=128)
    background /= np.linalg.norm(background)
    movement = np.random.default_rng(seed).normal(size=(n, 128))
    return unit(background + moving * movement / np.linalg.norm(movement, axis=1, keepdims=True))


@pytest.mark.parametrize("seed", range(10))
def test_another_recording_of_the_same_scene_looks_alike_but_its_changes_do_not_match(seed: int) -> None:
    film, other = scene(2 * seed + 10), scene(2 * seed + 11)
    assert float(np.einsum("ij,ij->i", film, other).mean()) > 0.7
    correlation = change_correlation(other, film)
    assert correlation is not None
    assert correlation < MIN_END <= MIN_START < min_change(40)


@pytest.mark.parametrize("seed", range(10))
def test_an_edited_copy_has_the_changes_of_its_film(seed: int) -> None:
    film = scene(seed + 50)
    overlay = np.random.default_rng(seed).normal(size=128)
    noise = np.random.default_rng(seed + 1).normal(size=film.shape)
    copy = film + 0.6 * overlay / np.linalg.norm(overlay) + 0.4 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    correlation = change_correlation(unit(copy), film)
    assert correlation is not None
    assert correlation > 2 * MIN_START


def test_a_cut_at_the_same_time_counts_less_than_changes_in_every_second() -> None:
    studio, camera = (np.random.default_rng(seed).normal(size=128) for seed in (20, 21))
    live, ref = (
        unit(np.stack([studio] * 15 + [camera] * 15) + 0.2 * np.random.default_rng(seed).normal(size=(30, 128)))
        for seed in (22, 23)
    )
    correlation = change_correlation(live, ref)
    assert correlation is not None
    whole = np.corrcoef((live - live.mean(axis=0)).ravel(), (ref - ref.mean(axis=0)).ravel())[0, 1]
    assert correlation < 0.5 * whole


def test_movement_that_is_over_within_a_second_is_not_steady() -> None:
    rng = np.random.default_rng(6)
    drift = np.cumsum(rng.normal(size=(30, 128)), axis=0)
    assert is_steady(unit(drift))
    assert not is_steady(scene(7, 30))
    assert not is_steady(scene(7, 30, moving=0.5 * STILL))  # nor is a still scene


def test_a_still_reference_or_too_few_seconds_have_no_changes() -> None:
    assert change_correlation(scene(3), scene(4, moving=0.5 * STILL)) is None
    assert change_correlation(scene(3, 2), scene(3, 2)) is None
    assert change_correlation(scene(3), scene(3)) == pytest.approx(1)
