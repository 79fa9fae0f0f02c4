"""Edits: each does what its name says; a drawn one does the same to every picture of a clip and keeps its size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from training.edits import (
    Blend,
    Blur,
    Crop,
    Edit,
    EditStep,
    FilmedScreen,
    Flip,
    Inset,
    Jpeg,
    Noise,
    Overlay,
    Recolour,
    Rescale,
    TextBox,
    Warp,
    draw_edit,
    draw_inside,
)

SQUARE = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
SAME = (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def rough(seed: int = 0, height: int = 120, width: int = 160) -> NDArray[np.uint8]:
    """A picture with detail of all sizes."""
    rng = np.random.default_rng(seed)
    picture = np.zeros((height, width, 3))
    for cell in (4, 16, 40):
        coarse = rng.uniform(0, 85, (height // cell + 1, width // cell + 1, 3))
        picture += coarse.repeat(cell, 0).repeat(cell, 1)[:height, :width]
    return picture.astype(np.uint8)


def quarters(height: int = 80, width: int = 120) -> NDArray[np.uint8]:
    """Red and green above, blue and white below."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[: height // 2, : width // 2] = (255, 0, 0)
    picture[: height // 2, width // 2 :] = (0, 255, 0)
    picture[height // 2 :, : width // 2] = (0, 0, 255)
    picture[height // 2 :, width // 2 :] = (255, 255, 255)
    return picture


def apply(step: EditStep, picture: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    return Edit((step,))(picture, np.random.default_rng(seed))


def test_crop_stretches_its_box() -> None:
    assert (apply(Crop((0.0, 0.0, 0.5, 0.5)), quarters())[:-2, :-2] == (255, 0, 0)).all()  # its edges are mixed
    assert (apply(Crop((0.5, 0.5, 1.0, 1.0)), quarters())[2:, 2:] == 255).all()


def test_an_inset_shows_the_full_picture_on_its_backdrop() -> None:
    out = apply(Inset((0.25, 0.5, 0.75, 1.0), (9, 8, 7)), quarters())
    assert (out[:40] == (9, 8, 7)).all()
    assert (out[:, :30] == (9, 8, 7)).all()
    assert tuple(out[45, 35]) == (255, 0, 0)
    assert tuple(out[75, 35]) == (0, 0, 255)
    assert tuple(out[75, 85]) == (255, 255, 255)
    other = np.full((30, 30, 3), 77, np.uint8)
    assert (apply(Inset((0.5, 0.0, 1.0, 1.0), other), quarters())[:, :60] == 77).all()


def test_an_inset_without_backdrop_has_its_own_blur_behind_it() -> None:
    out = apply(Inset((0.25, 0.0, 0.75, 1.0), None), np.full((80, 120, 3), (50, 60, 70), np.uint8))
    assert (np.abs(out.astype(int) - (50, 60, 70)) <= 1).all()


def test_a_warp_follows_its_corners() -> None:
    picture = rough()
    assert np.abs(apply(Warp(SQUARE, (0, 0, 0)), picture).astype(int) - picture).mean() < 1
    turned = apply(Warp(SQUARE[2:] + SQUARE[:2], (0, 0, 0)), quarters())  # upside down
    assert tuple(turned[10, 10]) == (255, 255, 255)
    assert tuple(turned[70, 110]) == (255, 0, 0)
    away = apply(Warp(((2.0, 2.0), (3.0, 2.0), (3.0, 3.0), (2.0, 3.0)), (5, 6, 7)), picture)
    assert (away == (5, 6, 7)).all()


def test_flip_exchanges_left_and_right() -> None:
    assert np.array_equal(apply(Flip(), rough()), rough()[:, ::-1])


def test_recolour_maps_colours_and_applies_gamma() -> None:
    exchanged = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    assert np.array_equal(apply(Recolour(exchanged, 1.0), rough()), rough()[..., [1, 2, 0]])
    bent = apply(Recolour(SAME, 2.0), np.full((9, 9, 3), 128, np.uint8))
    assert (bent == round(255 * (128 / 255) ** 2)).all()


def test_a_filmed_screen_shows_the_full_picture_between_its_corners_and_the_backdrop_outside() -> None:
    corners = ((0.2, 0.1), (0.9, 0.2), (0.8, 0.9), (0.1, 0.7))
    out = apply(FilmedScreen(corners, (1, 2, 3)), np.full((200, 200, 3), 255, np.uint8))
    assert tuple(out[0, 0]) == tuple(out[199, 199]) == (1, 2, 3)
    for x, y in corners:  # a little towards the middle, and a little away from it
        assert out[int(200 * (0.5 + 0.9 * (y - 0.5))), int(200 * (0.5 + 0.9 * (x - 0.5)))].min() == 255
        assert tuple(out[int(200 * (0.5 + 1.1 * (y - 0.5))), int(200 * (0.5 + 1.1 * (x - 0.5)))]) == (1, 2, 3)
    assert np.array_equal(apply(FilmedScreen(SQUARE, (1, 2, 3)), rough())[2:-2, 2:-2], rough()[2:-2, 2:-2])


def test_blend_mixes_another_picture_in() -> None:
    white = np.full((10, 10, 3), 255, np.uint8)
    out = apply(Blend(white, 0.2), np.zeros((40, 50, 3), np.uint8))
    assert (np.abs(out.astype(int) - 51) <= 1).all()


def test_an_overlay_covers_its_box_and_no_more() -> None:
    box = TextBox((0.5, 0.75, 1.0, 1.0), "", (10, 20, 30, 255), (0, 0, 0, 255))
    out = apply(Overlay((box,)), quarters())
    assert tuple(out[70, 90]) == (10, 20, 30)
    assert np.array_equal(out[:59], quarters()[:59])
    words = TextBox((0.0, 0.5, 1.0, 0.8), "Hello", None, (255, 0, 255, 255))
    assert (apply(Overlay((words,)), np.zeros((80, 120, 3), np.uint8)) == (255, 0, 255)).all(-1).sum() > 50


def test_quality_steps_remove_detail() -> None:
    picture = rough()
    detail = np.abs(np.diff(picture.astype(int), axis=1)).mean()
    assert np.abs(np.diff(apply(Blur(0.02), picture).astype(int), axis=1)).mean() < 0.7 * detail
    assert np.abs(np.diff(apply(Rescale(0.2, False), picture).astype(int), axis=1)).mean() < 0.8 * detail
    blocky = apply(Rescale(0.25, True), picture)
    assert np.array_equal(blocky[::4, ::4], blocky[3::4, 3::4])
    fine, coarse = (np.abs(apply(Jpeg(q), picture).astype(int) - picture).mean() for q in (95, 5))
    assert fine < coarse / 3


def test_noise_differs_in_every_picture() -> None:
    picture = np.full((60, 60, 3), 128, np.uint8)
    first, second = (apply(Noise(10.0, False), picture, seed) for seed in (1, 2))
    assert not np.array_equal(first, second)
    assert first.std() == pytest.approx(10, rel=0.1)
    grey = apply(Noise(10.0, True), picture)
    assert (grey[..., 0] == grey[..., 2]).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    strength=st.floats(0, 1),
    height=st.integers(24, 240),
    width=st.integers(24, 320),
    with_backdrop=st.booleans(),
    inside=st.sampled_from([0.0, 1.0]),
)
def test_a_drawn_edit_keeps_the_size_and_can_be_repeated(
    seed: int, strength: float, height: int, width: int, with_backdrop: bool, inside: float
) -> None:
    picture = rough(1, height, width)
    before = picture.copy()
    backdrop = rough(2, 64, 48) if with_backdrop else None
    edit = draw_edit(np.random.default_rng(seed), strength, backdrop, inside)
    out = edit(picture, np.random.default_rng(0))
    assert out.shape == picture.shape
    assert out.dtype == np.uint8
    assert np.array_equal(picture, before)
    assert np.array_equal(out, edit(picture, np.random.default_rng(0)))
    again = draw_edit(np.random.default_rng(seed), strength, backdrop, inside)
    assert np.array_equal(out, again(picture, np.random.default_rng(0)))
    if not any(isinstance(step, Noise) for step in edit.steps):  # nothing else may differ from picture to picture
        assert np.array_equal(out, edit(picture, np.random.default_rng(99)))


def test_strength_decides_how_much_is_changed() -> None:
    picture = rough()
    change = {}
    for strength in (0.0, 0.3, 1.0):
        rng = np.random.default_rng(5)
        edited = [draw_edit(rng, strength, rough(3))(picture, rng) for _ in range(80)]
        change[strength] = float(np.median([np.abs(e.astype(int) - picture).mean() for e in edited]))
    assert change[0.0] < 5
    assert change[0.0] < change[0.3] < change[1.0]
    assert change[1.0] > 25
    with pytest.raises(ValueError, match="strength"):
        draw_edit(np.random.default_rng(0), 1.5)


def test_the_chosen_share_of_edits_shows_the_picture_inside_another() -> None:
    rng, other = np.random.default_rng(1), rough(3)

    def share_inside(inside: float) -> float:
        edits = [draw_edit(rng, 1.0, other, inside) for _ in range(400)]
        layouts = [[s for s in edit.steps if isinstance(s, FilmedScreen | Inset)] for edit in edits]
        return float(np.mean([any(layout.backdrop is other for layout in some) for some in layouts]))

    assert share_inside(0.0) < 0.3
    assert share_inside(0.5) > 0.45
    assert share_inside(1.0) > 0.8  # the others are before a colour, or the picture itself enlarged


def test_the_picture_can_be_seen_inside_the_other() -> None:
    white, black = np.full((200, 200, 3), 255, np.uint8), np.zeros((200, 200, 3), np.uint8)
    rng = np.random.default_rng(2)
    shares = []
    for _ in range(120):
        steps = draw_inside(rng, 1.0, black).steps
        layout = next(s for s in reversed(steps) if isinstance(s, FilmedScreen | Inset))
        shares.append(float((apply(layout, white) > 127).mean()))
    assert min(shares) > 0.07  # a box of 28 % of both sides
    assert np.quantile(shares, 0.05) < 0.25
    assert np.quantile(shares, 0.95) > 0.6


def test_every_kind_of_edit_is_drawn() -> None:
    rng = np.random.default_rng(0)
    drawn = {type(step) for _ in range(600) for step in draw_edit(rng, 1.0, rough(), 0.3).steps}
    assert drawn == {Crop, Inset, Warp, FilmedScreen, Flip, Recolour, Blend, Overlay, Blur, Rescale, Noise, Jpeg}
