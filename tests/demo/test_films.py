"""Synthetic films: reproducible, and different from each other."""

from itertools import pairwise

import numpy as np
import pytest

from monitor.demo.films import HEIGHT, PAINTERS, WIDTH, Film
from monitor.demo.media import PROGRAMME, REFERENCES


def film(*painters: str, seed: int = 7) -> Film:
    return Film("test", "Test", seed, painters or ("hills", "city"), 60.0)


def test_a_picture_depends_on_film_and_time_only() -> None:
    times = [0.0, 31.4, 2.5, 58.0]
    forwards = [film().picture(at) for at in sorted(times)]
    unordered = {at: film().picture(at) for at in times}
    for at, picture in zip(sorted(times), forwards, strict=True):
        assert np.array_equal(picture, unordered[at])


@pytest.mark.parametrize("painter", PAINTERS)
def test_every_painter_fills_the_picture_with_detail(painter: str) -> None:
    for at in (0.0, 5.0, 11.0):
        picture = film(painter).picture(at)
        assert picture.shape == (HEIGHT, WIDTH, 3)
        assert picture.dtype == np.uint8
        assert picture.astype(float).std() > 12, f"{painter} at {at} is flat"


def test_pictures_move_within_a_scene_and_change_at_cuts() -> None:
    pictures = [film().picture(at / 2).astype(float) for at in range(60)]
    change = [np.abs(b - a).mean() for a, b in pairwise(pictures)]
    assert min(change) > 0.2  # never frozen
    n_cuts = sum(c > 40 for c in change)
    assert 3 <= n_cuts <= 11  # 30 s of scenes of 3-6 s


def test_no_two_films_look_alike() -> None:
    films = [*REFERENCES, PROGRAMME]
    small = [
        np.stack([one.picture(at)[::20, ::20].astype(float) for at in np.arange(0, 64, 2.0)]).reshape(32, -1)
        for one in films
    ]
    for n, one in enumerate(small):
        for other in small[n + 1 :]:
            nearest = np.abs(one[:, None] - other[None]).mean(axis=2).min()
            assert nearest > 15
