"""The last seconds of a stream as feature rows, with holes marked.

Input: seconds in rising order. Skipped seconds are added as unseen, so that every second of the stream is in the window
exactly once. Rows are rounded to half precision, like those of references.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 128  # how far back a new candidate is traced and the start of a segment can be refined
NOVELTY_S = 3  # seconds before a second that it is compared with to find how new its picture is
ALL_NEW = 0.25  # cosine distance from which a picture counts as entirely new

EncodedFrame: TypeAlias = tuple[NDArray[np.float32], bool]  # feature row, and whether the picture carries information


@dataclass(frozen=True, slots=True, eq=False)
class LiveSecond:
    """One second of a channel. `row` is None if it was not received."""

    second: int
    row: NDArray[np.float32] | None
    informative: bool
    novelty: float  # 0 for a picture like those before it, 1 for a new one
    age_s: float = 0.0  # how long before the middle of the second its picture was on air: key frames are held

    @property
    def counts(self) -> bool:
        """Whether this second may start or extend a path."""
        return self.row is not None and self.informative


@dataclass(frozen=True, slots=True, eq=False)
class WindowState:
    """A window as it is stored: consecutive seconds."""

    first_s: int
    rows: NDArray[np.float16]  # of the seconds that were received
    seen: NDArray[np.bool_]
    informative: NDArray[np.bool_]
    novelty: NDArray[np.float64]
    age_s: NDArray[np.float64]


class FeatureWindow:
    """The newest seconds of one stream epoch."""

    def __init__(self, length_s: int = WINDOW_S) -> None:
        self._seconds: deque[LiveSecond] = deque(maxlen=length_s)
        self._halves: deque[NDArray[np.float16] | None] = deque(maxlen=length_s)  # their rows, as they are stored

    def __iter__(self) -> Iterator[LiveSecond]:
        return iter(self._seconds)

    @property
    def newest_s(self) -> int | None:
        return self._seconds[-1].second if self._seconds else None

    def push(
        self,
        second: int,
        row: NDArray[np.float32] | None,
        informative: bool,
        held: bool = False,
        age_s: float = 0.0,
    ) -> list[LiveSecond]:
        """Adds a second; returns the seconds added: those skipped before it, then this one.

        A held second repeats the picture before it because no other was decoded: it is as new as that one.
        """
        newest = self.newest_s
        if newest is not None and second <= newest:
            raise ValueError(f"second {second} does not come after {newest}")
        half = None if row is None else row.astype(np.float16)
        row = None if half is None else half.astype(np.float32)
        added = [] if newest is None else [LiveSecond(s, None, False, 0.0) for s in range(newest + 1, second)]
        novelty = self._seconds[-1].novelty if held and newest == second - 1 else self._novelty(row, second)
        added.append(LiveSecond(second, row, informative, novelty, age_s))
        self._seconds.extend(added)
        self._halves.extend([*(None for _ in added[1:]), half])
        return added

    def row(self, second: int) -> NDArray[np.float32] | None:
        """The features of a second that counts and is still in the window, else None."""
        if not self._seconds:
            return None
        at = second - self._seconds[0].second
        return self._seconds[at].row if 0 <= at < len(self._seconds) and self._seconds[at].counts else None

    def since(self, second: int) -> list[LiveSecond]:
        """Every second from this one on that is still in the window."""
        return [live for live in self._seconds if live.second >= second]

    def at(self, second: int) -> LiveSecond:
        """A second that is still in the window, or IndexError."""
        place = second - self._seconds[0].second
        if place < 0:
            raise IndexError(f"second {second} is no longer in the window")
        return self._seconds[place]

    def state(self) -> WindowState:
        """The state for `restore`."""
        halves = [half for half in self._halves if half is not None]
        return WindowState(
            self._seconds[0].second if self._seconds else 0,
            np.concatenate(halves).reshape(len(halves), -1) if halves else np.empty((0, 0), np.float16),
            np.array([live.row is not None for live in self._seconds], np.bool_),
            np.array([live.informative for live in self._seconds], np.bool_),
            np.array([live.novelty for live in self._seconds], np.float64),
            np.array([live.age_s for live in self._seconds], np.float64),
        )

    def restore(self, state: WindowState) -> None:
        """Replaces the content with a stored state."""
        rows, halves = iter(state.rows.astype(np.float32)), iter(state.rows)
        self._seconds.clear()
        self._halves.clear()
        for n, seen in enumerate(state.seen.tolist()):
            row = next(rows) if seen else None
            self._halves.append(next(halves) if seen else None)
            informative, novelty, age_s = bool(state.informative[n]), float(state.novelty[n]), float(state.age_s[n])
            self._seconds.append(LiveSecond(state.first_s + n, row, informative, novelty, age_s))

    def _novelty(self, row: NDArray[np.float32] | None, second: int) -> float:
        if row is None:
            return 0.0
        before = [
            float(live.row @ row)
            for live in list(self._seconds)[-NOVELTY_S:]
            if live.row is not None and live.second >= second - NOVELTY_S
        ]
        return min(1.0, max(0.0, 1.0 - max(before, default=0.0)) / ALL_NEW)
