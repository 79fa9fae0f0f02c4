"""Pictures in memory: bounded, spread over the alert, JPEG-encoded once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from monitor.evidence.pictures import (
    GREY_WIDTH,
    MAX_PICTURES,
    QUALITY,
    RECENT_S,
    AlertPictures,
    LazyJpeg,
    RecentPictures,
)
from reference_db.media.jpeg import encode_jpeg


def grey(level: int) -> NDArray[np.uint8]:
    return np.full((18, 32, 3), level, np.uint8)


def test_a_held_picture_is_stored_and_encoded_once() -> None:
    recent, still = RecentPictures(), grey(46)
    lazy = recent.push(0, still).jpeg
    assert recent.push(1, still).jpeg is lazy
    assert recent.push(2, grey(46)).jpeg is not lazy
    assert lazy.jpeg() is lazy.jpeg()
    assert lazy.jpeg() == encode_jpeg(still, quality=QUALITY)


def test_pictures_stay_bounded_and_those_of_an_alert_equally_spaced() -> None:
    recent, of_alert = RecentPictures(), AlertPictures()
    for second in range(1000):
        of_alert.push(recent.push(second, grey(46)))
    assert list(recent.pictures) == list(range(1000 - RECENT_S, 1000))
    seconds = sorted(of_alert.pictures)
    assert len(seconds) <= MAX_PICTURES
    assert {later - earlier for earlier, later in pairwise(seconds)} == {64}


def test_a_picture_is_compared_in_grey_of_one_width_as_pixels_and_as_jpeg() -> None:
    for height, width in ((192, 341), (341, 192)):
        ramp = np.broadcast_to(np.linspace(0, 255, width).astype(np.uint8)[None, :, None], (height, width, 3))
        lazy = LazyJpeg(np.ascontiguousarray(ramp))
        raw = lazy.grey()
        assert raw.shape == (round(GREY_WIDTH * height / width), GREY_WIDTH)
        lazy.jpeg()
        assert np.abs(lazy.grey().astype(int) - raw).max() <= 6


def test_a_held_picture_says_when_it_was_on_air() -> None:
    recent = RecentPictures()
    assert [recent.push(second, grey(46), None, age_s).time_s for second, age_s in ((7, 0.0), (8, 1.25))] == [7.5, 7.25]
