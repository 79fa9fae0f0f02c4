"""Pictures of the channels in memory: the last minute of each, and a few of each open alert.

`RecentPictures` drops the oldest; `AlertPictures` drops every second one when it is full. Neither grows with time, and
there is always a picture near any second. Most pictures are never used, so one is JPEG-encoded on first use.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reference_db.media.jpeg import encode_jpeg

RECENT_S = 64  # an alert may start this long before it is emitted, and be emitted this long after it ended
MAX_PICTURES = 24  # of one alert
QUALITY = 70  # 341 x 192: some 7 kB and a third of a millisecond
GREY_WIDTH = 160  # pixels of the pictures that are compared


class LazyJpeg:
    """A sampled picture; a JPEG from its first use on."""

    def __init__(self, picture: NDArray[np.uint8] | bytes) -> None:
        self._picture = picture

    def jpeg(self) -> bytes:
        if not isinstance(self._picture, bytes):
            self._picture = encode_jpeg(self._picture, quality=QUALITY)
        return self._picture

    def grey(self) -> NDArray[np.uint8]:
        """The picture in grey, small, for comparisons."""
        return grey_picture(self._picture)


def grey_picture(picture: NDArray[np.uint8] | bytes) -> NDArray[np.uint8]:
    """A picture [height, width, 3] or a JPEG in grey, GREY_WIDTH wide, as tall as its shape requires."""
    image: Image.Image
    if isinstance(picture, bytes):
        image = Image.open(io.BytesIO(picture))
        image.draft("L", (GREY_WIDTH, 1))  # decodes at a fraction of its size
    else:
        image = Image.fromarray(picture)
    height = max(1, round(GREY_WIDTH * image.height / image.width))
    return np.asarray(image.convert("L").resize((GREY_WIDTH, height), Image.Resampling.BOX))


@dataclass(frozen=True, slots=True, eq=False)
class AirPicture:
    """The picture of one second of a channel."""

    second: int
    jpeg: LazyJpeg
    row: NDArray[np.float32] | None = None  # its features; None if they are not known any more
    age_s: float = 0.0  # time from a key picture to the middle of its second

    @property
    def time_s(self) -> float:
        """When it was on air."""
        return self.second + 0.5 - self.age_s


class RecentPictures:
    """The newest pictures of one stream epoch, by stream second."""

    def __init__(self) -> None:
        self.pictures: OrderedDict[int, AirPicture] = OrderedDict()
        self._last: tuple[NDArray[np.uint8], LazyJpeg] | None = None

    def push(
        self, second: int, picture: NDArray[np.uint8], row: NDArray[np.float32] | None = None, age_s: float = 0.0
    ) -> AirPicture:
        """Adds a picture; one that is held for several seconds is stored once."""
        lazy = self._last[1] if self._last is not None and self._last[0] is picture else LazyJpeg(picture)
        self._last = (picture, lazy)
        self.pictures[second] = air = AirPicture(second, lazy, row, age_s)
        while len(self.pictures) > RECENT_S:
            self.pictures.popitem(last=False)
        return air


class AlertPictures:
    """Some pictures of one alert, spread over its duration."""

    def __init__(self) -> None:
        self.pictures: dict[int, AirPicture] = {}
        self._stride = 1

    def push(self, air: AirPicture) -> None:
        """Adds the picture if its second is a multiple of the stride, which doubles when there are too many."""
        if air.second % self._stride:
            return
        self.pictures[air.second] = air
        while len(self.pictures) > MAX_PICTURES:
            self._stride *= 2
            self.pictures = {s: one for s, one in self.pictures.items() if s % self._stride == 0}
