"""Black and frozen pictures, and pictures that only look like them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monitor.ingest.picture_health import PictureHealth
from reference_db.media.frames import Frame
from tests.support.media import picture


def frame(second: int, shown: NDArray[np.uint8], held: bool = False) -> Frame:
    return Frame(second, second + 0.5, shown.copy(), held)


def results(pictures: list[NDArray[np.uint8]], held: bool = False) -> list[str | None]:
    health = PictureHealth(10)
    return [health.push(n, frame(n, shown, held and n > 0)) for n, shown in enumerate(pictures)]


def test_black_is_reported_once_it_has_lasted_and_until_the_first_picture() -> None:
    noise = np.random.default_rng(1)
    black = [np.clip(noise.normal(16, 2, (192, 341, 3)), 0, 255).astype(np.uint8) for _ in range(15)]
    assert results([*black, picture(1, 0.0)]) == [None] * 10 + ["black"] * 5 + [None]


def test_a_still_picture_is_frozen_whatever_the_encoder_does_to_it() -> None:
    noise = np.random.default_rng(2)
    still = picture(1, 0.0).astype(np.int16)
    grainy = [np.clip(still + noise.integers(-6, 7, still.shape), 0, 255).astype(np.uint8) for _ in range(14)]
    assert results(grainy) == [None] * 10 + ["frozen"] * 4


def test_a_film_and_a_slow_fade_are_not_frozen() -> None:
    assert set(results([picture(1, n) for n in range(40)])) == {None}
    fade = [np.clip(picture(1, 0.0).astype(np.float32) * (1 - n / 60), 0, 255).astype(np.uint8) for n in range(40)]
    assert set(results(fade)) == {None}


def test_a_talking_head_in_a_corner_is_not_frozen() -> None:
    def shown(n: int) -> NDArray[np.uint8]:
        slate = picture(3, 0.0).copy()
        slate[60:84, 80:120] = picture(4, float(n))[60:84, 80:120]
        return slate

    assert set(results([shown(n) for n in range(40)])) == {None}
