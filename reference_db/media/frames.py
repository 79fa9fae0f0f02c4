"""Frames: one small picture per whole second of a video, chosen by presentation time alone.

Input: the time-stamped pictures of a video. Output: `Frame`s in ascending order of their second. Which picture shows a
second depends only on the time stamps of the pictures around it, so the registered file and the broadcast are sampled
alike, wherever reading starts.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:  # the decoding child imports this module and starts faster without numpy
    import numpy as np
    from numpy.typing import NDArray

PICTURE_SHORT_SIDE = 192  # pixels; the encoder needs no more, so nothing larger leaves the decoder
MAX_LONG_SIDE = 8 * PICTURE_SHORT_SIDE  # of a picture that leaves the decoder; wider ones are squeezed
MAX_PIXELS = 8192 * 4352  # 8K; a header that claims more is an attack
JUMP_BACK_S = 10  # a smaller step back is a late picture; a larger one is a reset clock
STILLS_PER_S = 2  # stills of a reference: the partner of a sampled picture is at most a quarter second away
STILL_WIDTH = 320  # pixels, of a picture that people look at; narrower videos are not enlarged
MAX_STILL_HEIGHT = 720  # of a very tall one, which gets narrower then
MAX_HOLD_S = 10  # an older key picture no longer shows what is on air

# Records that the decoding child sends to its parent (decoding.py).
RECORD = struct.Struct("<cI")  # kind, length of the body
PICTURE = struct.Struct("<qddHH")  # second (of a still: its number), pts_s, age_s, height, width; then the pixels
KEY = struct.Struct("<IdQ?")  # pictures decoded with damage so far; pts_s, fingerprint, is_fresh of a KeyPicture

Mode = Literal["exact", "economy", "auto"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The picture that shows one second."""

    second: int
    pts_s: float  # presentation time of the picture itself
    picture: NDArray[np.uint8]  # [height, width, 3] RGB, short side 192, upright, square pixels
    held: bool = False  # the same picture as the previous frame: a key picture used again
    age_s: float = 0.0  # time from a key picture to the middle of its second

    def __post_init__(self) -> None:
        if self.picture.ndim != 3 or self.picture.shape[2] != 3 or self.picture.dtype != "uint8":
            raise ValueError(f"picture must be uint8 [h, w, 3], got {self.picture.dtype} {self.picture.shape}")
        self.picture.flags.writeable = False


@dataclass(frozen=True, slots=True)
class KeyPicture:
    """A key picture of a live stream as it was sent, decoded or not."""

    pts_s: float
    fingerprint: int  # of its time stamp and its bytes: equal only if the same picture is sent again
    is_fresh: bool  # the source has shown in this connection that it produces now, not only serves what it has


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """A video's metadata, known before anything is decoded."""

    duration_s: float | None
    width: int
    height: int
    codec: str
    fps: float | None
    format: str  # FFmpeg's name of the container, such as mpegts or hls
    segment_s: float = 0.0  # the longest segment of HLS
    recording: str = ""  # identifies a resource that is complete and will not grow; empty if live or a file


class OneFps(Generic[T]):
    """Picks one of the pushed pictures per second.

    Second s is shown by the first picture with pts in [s+0.5, s+1), else by the last one in [s, s+0.5); a second
    without pictures is a hole. A pick, (second, pts_s, item), is returned as soon as it is certain.
    """

    def __init__(self) -> None:
        self._second: int | None = None  # the second being decided
        self._waiting: tuple[int, float, T] | None = None  # its last picture before the middle

    def push(self, pts_s: float, item: T) -> list[tuple[int, float, T]]:
        """The picks that this picture makes certain; pictures come in presentation order, late ones are dropped."""
        second = math.floor(pts_s)
        picks: list[tuple[int, float, T]] = []
        if self._second is None or second > self._second or second < self._second - JUMP_BACK_S:
            picks = self.finish()
            self._second, is_open = second, True
        else:
            is_open = second == self._second and self._waiting is not None and pts_s >= self._waiting[1]
        if is_open and pts_s - second >= 0.5:
            self._waiting = None
            picks.append((second, pts_s, item))
        elif is_open:
            self._waiting = (second, pts_s, item)
        return picks

    def finish(self) -> list[tuple[int, float, T]]:
        """The pending pick, if any."""
        picks = [self._waiting] if self._waiting is not None else []
        self._waiting = None
        return picks


class HeldOneFps(Generic[T]):
    """Picks the last key picture with pts <= s+0.5 for each second s, repeatedly until there is a newer one.

    Picks are (second, pts_s, item, held). `reach` advances presentation time, since that, and not the next key
    picture, makes a pick certain.
    """

    def __init__(self) -> None:
        self._key: tuple[float, T] | None = None
        self._second = 0  # the next to be picked
        self._held = False

    def push(self, pts_s: float, item: T) -> list[tuple[int, float, T, bool]]:
        """The picks of all seconds before this key picture."""
        jumped = self._key is not None and pts_s < self._key[0] - JUMP_BACK_S
        picks = [] if jumped else self.reach(pts_s)
        first = math.ceil(pts_s - 0.5)
        self._second = first if jumped or self._key is None else max(self._second, first)
        self._key, self._held = (pts_s, item), False
        return picks

    def settles(self, time_s: float) -> bool:
        """Whether `reach` would return picks."""
        return self._key is not None and self._second + 0.5 < time_s

    def reach(self, time_s: float) -> list[tuple[int, float, T, bool]]:
        """The picks of all seconds whose middle lies before `time_s`."""
        picks: list[tuple[int, float, T, bool]] = []
        while self._key is not None and self.settles(time_s):
            if self._second - self._key[0] > MAX_HOLD_S:
                self._second = math.ceil(time_s - 0.5)
                break
            picks.append((self._second, *self._key, self._held))
            self._second, self._held = self._second + 1, True
        return picks

    def finish(self, end_s: float) -> list[tuple[int, float, T, bool]]:
        """The picks up to the second of the last picture, at `end_s`."""
        return self.reach(math.floor(end_s) + 1)
