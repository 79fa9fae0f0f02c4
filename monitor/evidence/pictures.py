"""Pictures of the air: the last minute of a channel, and a few of each alert for as long as it lasts.

A channel's ring forgets the oldest; an alert's album keeps every second one once it is full, so neither grows with
age, and what is nearest to a second can always be told. Most are never shown to anybody, so a picture is compressed
when somebody asks for it.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from reference_db.media.jpeg import encode_jpeg

RING_S = 64  # an alert may begin so long before it is told, and be told so long after it ended
ALBUM = 24  # pictures of one alert at most
QUALITY = 70  # 341 x 192: some 7 kB and a third of a millisecond


class PicturePair:
    """A picture as it was sampled; a JPEG from when it is first asked for."""

    def __init__(self, picture: NDArray[np.uint8] | bytes) -> None:
        self._picture = picture

    def jpeg(self) -> bytes:
        if not isinstance(self._picture, bytes):
            self._picture = encode_jpeg(self._picture, quality=QUALITY)
        return self._picture


class Ring:
    """The newest pictures of one stream epoch, by stream second."""

    def __init__(self) -> None:
        self.pictures: OrderedDict[int, PicturePair] = OrderedDict()
        self._last: tuple[NDArray[np.uint8], PicturePair] | None = None

    def push(self, second: int, picture: NDArray[np.uint8]) -> PicturePair:
        """Keeps a picture; one that is shown again is kept once."""
        shown = self._last[1] if self._last is not None and self._last[0] is picture else PicturePair(picture)
        self._last = (picture, shown)
        self.pictures[second] = shown
        while len(self.pictures) > RING_S:
            self.pictures.popitem(last=False)
        return shown


class Album:
    """Some pictures of one alert, spread over its life."""

    def __init__(self) -> None:
        self.pictures: dict[int, PicturePair] = {}
        self.first: dict[int, PicturePair] = {}  # the one at its start, and those that an earlier life had kept
        self._stride = 1

    def push(self, second: int, picture: PicturePair) -> None:
        """Takes one of every so many, by the stream's own seconds; when full, every second one is let go."""
        if second % self._stride:
            return
        self.pictures[second] = picture
        while len(self.pictures) > ALBUM:
            self._stride *= 2
            self.pictures = {s: shown for s, shown in self.pictures.items() if s % self._stride == 0}


def nearest(
    second: float, *kept: dict[int, PicturePair] | OrderedDict[int, PicturePair]
) -> tuple[int, PicturePair] | None:
    """The picture nearest to a second, the earlier of two that are as near."""
    found = [(abs(s - second), s, shown) for pictures in kept for s, shown in pictures.items()]
    if not found:
        return None
    _, s, shown = min(found, key=lambda one: one[:2])
    return s, shown
