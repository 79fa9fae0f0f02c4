"""Borders: bars around a picture are cropped, scenes are not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from reference_db.features.borders import crop_borders
from tests.support.media import picture

TEAL, BLACK = (0, 128, 128), (0, 0, 0)


def framed(
    inner_picture: NDArray[np.uint8], height: int, width: int, colour: tuple[int, int, int], top: int, left: int
) -> NDArray[np.uint8]:
    canvas = np.empty((height, width, 3), np.uint8)
    canvas[:] = colour
    canvas[top : top + inner_picture.shape[0], left : left + inner_picture.shape[1]] = inner_picture
    return canvas


@pytest.mark.parametrize(
    ("height", "width", "top", "left"),
    [(192, 340, 24, 0), (192, 340, 0, 40), (192, 340, 20, 30), (192, 340, 0, 116)],
    ids=["letterbox", "pillarbox", "frame", "upright"],
)
@pytest.mark.parametrize("colour", [BLACK, TEAL])
def test_bars_in_pairs_are_cropped(height: int, width: int, top: int, left: int, colour: tuple[int, int, int]) -> None:
    inner_picture = picture(3, 1.0, width - 2 * left, height - 2 * top)
    noise = np.random.default_rng(1).integers(-4, 5, (height, width, 3))
    broadcast = np.clip(framed(inner_picture, height, width, colour, top, left) + noise, 0, 255).astype(np.uint8)
    found = crop_borders(broadcast)
    assert found.shape[0] == pytest.approx(height - 2 * top, abs=7)
    assert found.shape[1] == pytest.approx(width - 2 * left, abs=7)


def test_a_frame_around_a_pillarbox_is_cropped_too() -> None:
    inner = framed(picture(4, 1.0, 100, 150), 150, 260, BLACK, 0, 80)
    found = crop_borders(framed(inner, 192, 340, TEAL, 21, 40))
    assert found.shape[:2] == (pytest.approx(150, abs=7), pytest.approx(100, abs=10))


def test_a_logo_on_a_bar_does_not_hide_it() -> None:
    broadcast = framed(picture(5, 1.0, 108, 192), 192, 340, BLACK, 0, 116)
    broadcast[8:30, 250:330] = (220, 30, 30)
    assert crop_borders(broadcast).shape[1] == pytest.approx(108, abs=7)


def test_one_bar_alone_belongs_to_the_scene() -> None:
    broadcast = framed(picture(6, 1.0, 250, 192), 192, 340, BLACK, 0, 0)
    assert crop_borders(broadcast).shape == broadcast.shape


def test_scenes_and_empty_pictures_are_not_cropped() -> None:
    for second in range(0, 40, 2):
        scene = picture(7, float(second))
        assert crop_borders(scene).shape == scene.shape
    black = np.zeros((192, 340, 3), np.uint8)
    assert crop_borders(black).shape == black.shape


def test_bars_within_bars_within_bars_are_cropped() -> None:
    letterbox = framed(picture(4, 1.0, 88, 50), 156, 88, BLACK, 53, 0)
    upright = framed(letterbox, 156, 278, BLACK, 0, 95)
    found = crop_borders(framed(upright, 192, 341, TEAL, 18, 31))
    assert found.shape[:2] == (pytest.approx(50, abs=5), pytest.approx(88, abs=5))


def test_a_white_margin_inside_bars_belongs_to_the_picture() -> None:
    page = framed(picture(5, 1.0, 60, 30), 120, 340, (250, 250, 250), 45, 140)
    found = crop_borders(framed(page, 192, 340, BLACK, 36, 0))
    assert found.shape[:2] == (pytest.approx(120, abs=4), 340)
