"""Pictures in memory: bounded, spread over the alert, JPEG-encoded once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from monitor.evidence.pictures import MAX_PICTURES, QUALITY, RECENT_S, AlertPictures, LazyJpeg, RecentPictures, nearest
from reference_db.media.jpeg import encode_jpeg


def grey(level: int) -> NDArray[np.uint8]:
    return np.full((18, 32, 3), level, np.uint8)


def test_a_held_picture_is_stored_and_encoded_once() -> None:
    recent, still = RecentPictures(), grey(46)
    lazy = recent.push(0, still)
    assert recent.push(1, still) is lazy
    assert recent.push(2, grey(46)) is not lazy
    assert lazy.jpeg() is lazy.jpeg()
    assert lazy.jpeg() == encode_jpeg(still, quality=QUALITY)


def test_pictures_stay_bounded_and_those_of_an_alert_equally_spaced() -> None:
    recent, of_alert = RecentPictures(), AlertPictures()
    for second in range(1000):
        of_alert.push(second, recent.push(second, grey(46)))
    assert list(recent.pictures) == list(range(1000 - RECENT_S, 1000))
    seconds = sorted(of_alert.pictures)
    assert len(seconds) <= MAX_PICTURES
    assert {later - earlier for earlier, later in pairwise(seconds)} == {64}


def test_the_nearest_picture_is_the_earlier_of_two_equally_near() -> None:
    one, other = {10: LazyJpeg(b"10"), 30: LazyJpeg(b"30")}, {20: LazyJpeg(b"20")}
    assert nearest(24, one, other) == (20, other[20])
    assert nearest(25, one, other) == (20, other[20])
    assert nearest(26, one, other) == (30, one[30])
    assert nearest(26, {}, {}) is None
