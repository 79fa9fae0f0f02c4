"""Picture health: detects a stream that arrives but shows only black or flat pictures, or the same one, for too long.

Seconds are stream time, so a replay gives the same result. A held frame (economy mode repeats a key frame) is ignored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference_db.media.frames import Frame

IMPAIRED_S = 60
GRID = 4  # every fourth pixel of both axes is enough
FLAT_LEVELS = 6.0  # standard deviation below which a picture shows nothing
STILL_LEVELS = 3.0  # within which the cells of a still picture stay, whatever the encoder does to them
CELLS = 8  # per axis; a small moving object changes at least one cell


class PictureHealth:
    """Checks the pictures of one stream."""

    def __init__(self, after_s: int = IMPAIRED_S) -> None:
        self._after_s = after_s
        self._flat_since: int | None = None
        self._still_since: int | None = None
        self._still: NDArray[np.float32] | None = None

    def push(self, second: int, frame: Frame) -> str | None:
        """`black` or `frozen` once that has lasted long enough, else None; time that jumps back restarts the count."""
        if not frame.held:
            small = frame.picture[::GRID, ::GRID]
            flat = _spread(small) < FLAT_LEVELS
            self._flat_since = self._since(self._flat_since, second) if flat else None
            cells = _cells(small)
            same = self._still is not None and float(np.abs(cells - self._still).max()) < STILL_LEVELS
            self._still_since = self._since(self._still_since, second) if same else second
            self._still = self._still if same else cells
        if self._flat_since is not None and second - self._flat_since >= self._after_s:
            return "black"
        if self._still_since is not None and second - self._still_since >= self._after_s:
            return "frozen"
        return None

    @staticmethod
    def _since(since: int | None, second: int) -> int:
        return second if since is None else min(since, second)


def _spread(small: NDArray[np.uint8]) -> float:
    """The largest standard deviation of a colour."""
    levels = np.ascontiguousarray(small.reshape(-1, 3).T, np.float64)  # whole numbers, so their sums are exact
    squares = np.array([level @ level for level in levels]) / levels.shape[1]
    return float(np.sqrt(np.max(squares - levels.mean(axis=1) ** 2)))


def _cells(small: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Mean colour of each cell of a coarse grid."""
    rows, columns = small.shape[0] // CELLS * CELLS, small.shape[1] // CELLS * CELLS
    blocks = small[:rows, :columns].reshape(CELLS, rows // CELLS, CELLS, columns // CELLS, 3)
    cells: NDArray[np.float32] = blocks.mean(axis=(1, 3), dtype=np.float32)
    return cells
