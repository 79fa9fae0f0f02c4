"""Pictures of the channels in memory: the last minute of each, and a few of each open alert.

`RecentPictures` drops the oldest; `AlertPictures` drops every second one when it is full. Neither grows with time, and
there is always a picture near any second. Most pictures are never used, so one is JPEG-encoded on first use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from reference_db.media.jpeg import encode_jpeg

RECENT_S = 64  # an alert may start this long before it is emitted, and be emitted this long after it ended
MAX_PICTURES = 24  # of one alert
QUALITY = 70  # 341 x 192: some 7 kB and a third of a millisecond


class LazyJpeg:
    """A sampled picture; a JPEG from its first use on."""

    def __init__(self, picture: NDArray[np.uint8] | bytes) -> None:
        self._picture = picture

    def jpeg(self) -> bytes:
        if not isinstance(self._picture, bytes):
            self._picture = encode_jpeg(self._picture, quality=QUALITY)
        return self._picture


class RecentPictures:
    """The newest pictures of one stream epoch, by stream second."""

    def __init__(self) -> None:
        self.pictures: OrderedDict[int, LazyJpeg] = OrderedDict()
        self._last: tuple[NDArray[np.uint8], LazyJpeg] | None = None

    def push(self, second: int, picture: NDArray[np.uint8]) -> LazyJpeg:
        """Adds a picture; one that is held for several seconds is stored once."""
        lazy = self._last[1] if self._last is not None and self._last[0] is picture else LazyJpeg(picture)
        self._last = (picture, lazy)
        self.pictures[second] = lazy
        while len(self.pictures) > RECENT_S:
            self.pictures.popitem(last=False)
        return lazy


class AlertPictures:
    """Some pictures of one alert, spread over its duration."""

    def __init__(self) -> None:
        self.pictures: dict[int, LazyJpeg] = {}
        self.first: dict[int, LazyJpeg] = {}  # the one at its start, and those that the previous run stored
        self._stride = 1

    def push(self, second: int, picture: LazyJpeg) -> None:
        """Adds the picture if its second is a multiple of the stride, which doubles when there are too many."""
        if second % self._stride:
            return
        self.pictures[second] = picture
        while len(self.pictures) > MAX_PICTURES:
            self._stride *= 2
            self.pictures = {s: lazy for s, lazy in self.pictures.items() if s % self._stride == 0}


def nearest(second: float, *pictures: Mapping[int, LazyJpeg]) -> tuple[int, LazyJpeg] | None:
    """The picture nearest to a second, with its own second; the earlier of two that are equally near."""
    found = [(abs(s - second), s, lazy) for some in pictures for s, lazy in some.items()]
    if not found:
        return None
    _, s, lazy = min(found, key=lambda one: one[:2])
    return s, lazy
