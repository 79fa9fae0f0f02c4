"""Similarity tiles: the newest seconds of a stream against a band of one reference's seconds.

A band is one matrix: a row per stream second and a window of columns of one reference, zero outside. The network reads
it in tiles of one fixed shape with a halo on each side, so a final row of mask and step equals that of the whole
matrix, and neither batching nor the band's age changes it. The grid is the stream's own time, not the moment reading
began, so a replay from anywhere cuts the same tiles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monitor.ingest.feature_windows import LiveSecond
from reference_db.search.feature_rows import ReferenceRows
from reference_db.store.catalog import ReferenceId

HALO = 4  # the receptive field of the mask is 9 x 9
TILE_ROWS = 2 * HALO + 1  # the middle row is final, the four after it provisional
INNER_COLUMNS = 256
TILE_COLUMNS = INNER_COLUMNS + 2 * HALO
RIGHT_DOWN, RIGHT, DOWN, NO_STEP = 0, 1, 2, 3  # NO_STEP: the last row and the last column of a matrix
GRAIN = 4096.0  # similarities are rounded to 1 / GRAIN, so that the last bits of a product decide nothing


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTile:
    """A block of the similarity matrix, with the halo that the network needs around it."""

    live_s: int  # stream second of row 0
    ref_s: int  # reference second of column 0
    cells: NDArray[np.float32]  # [live, ref]
    inside: NDArray[np.bool_]  # False beyond the borders of the whole matrix

    def __post_init__(self) -> None:
        if self.cells.shape != (TILE_ROWS, TILE_COLUMNS) or self.inside.shape != self.cells.shape:
            raise ValueError(f"a tile is [{TILE_ROWS}, {TILE_COLUMNS}], got {self.cells.shape}, {self.inside.shape}")
        self.cells.flags.writeable = False
        self.inside.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class TileMaps:
    """The maps that the network read in the newest rows of one tile, without the halo."""

    mask: NDArray[np.float32]  # [HALO + 1, INNER_COLUMNS]: chance that a cell lies on a copy
    step: NDArray[np.uint8]  # [HALO, INNER_COLUMNS]: where a copy goes from it; the newest row has none

    def __post_init__(self) -> None:
        if self.mask.shape != (HALO + 1, INNER_COLUMNS) or self.step.shape != (HALO, INNER_COLUMNS):
            raise ValueError(f"maps are [{HALO + 1}, {INNER_COLUMNS}], got {self.mask.shape}, {self.step.shape}")


@dataclass(frozen=True, slots=True, eq=False)
class MapRow:
    """One stream second of a band: similarity, mask and step for the columns first_ref_s and on."""

    live_s: int
    first_ref_s: int
    similarity: NDArray[np.float32]
    mask: NDArray[np.float32]
    step: NDArray[np.uint8]
    counts: NDArray[np.bool_]  # False where either side is missing or uninformative
    novelty: float = 1.0  # how much of this second is new compared with those before it, 0 to 1

    def __post_init__(self) -> None:
        n = len(self.similarity)
        if not len(self.mask) == len(self.step) == len(self.counts) == n:
            raise ValueError(f"a row's arrays must have one length, got {n} similarities, {len(self.mask)} masks")


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    live: LiveSecond
    columns: range
    similarity: NDArray[np.float32]

    def mapped(self, mask: NDArray[np.float32], step: NDArray[np.uint8], informative: NDArray[np.bool_]) -> MapRow:
        """The row with the maps that the network read in it."""
        counts = informative[self.columns.start : self.columns.stop]
        counts = counts if self.live.counts else np.zeros_like(counts)
        return MapRow(self.live.second, self.columns.start, self.similarity, mask, step, counts, self.live.novelty)


@dataclass(frozen=True, slots=True, eq=False)
class RowState:
    """A row of a `Band`, for snapshots: similarities in grains, since they are rounded to them."""

    second: int
    columns: range
    grains: NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class BandState:
    """The state of a `Band`, for snapshots; the reference's rows are not in it."""

    reference: ReferenceId
    first_live_s: int
    columns: range
    rows: list[RowState]


class Band:
    """One reference's matrix as it is read: the newest rows of a window of columns."""

    def __init__(
        self,
        reference: ReferenceId,
        rows: ReferenceRows,
        informative: NDArray[np.bool_],
        first_live_s: int,
        columns: range,
    ) -> None:
        self.reference = reference
        self.first_live_s = first_live_s
        self.columns = columns  # of the next row; may only move to the right
        self._reference_rows = rows
        self._near = (range(0), np.empty((0, 0), np.float32))  # the reference's rows in the window, read once
        self._informative = informative
        self._rows: deque[_Row] = deque(maxlen=TILE_ROWS)

    @property
    def n_columns(self) -> int:
        """The reference's length: the true border of the matrix."""
        return len(self._reference_rows)

    @property
    def newest_s(self) -> int:
        return self._rows[-1].live.second

    def push(self, live: LiveSecond) -> None:
        """Adds the next row."""
        columns = self.columns
        if live.row is None or not live.counts:
            similarity = np.zeros(len(columns), np.float32)
        else:
            if self._near[0] != columns:
                self._near = (columns, self._reference_rows[columns.start : columns.stop])
            similarity = self._near[1] @ live.row
            similarity = np.where(self._informative[columns.start : columns.stop], similarity, np.float32(0))
            similarity = (np.round(similarity * GRAIN) / GRAIN).astype(np.float32)
        self._rows.append(_Row(live, columns, similarity))

    def mapped(self, second: int, mask: NDArray[np.float32], step: NDArray[np.uint8]) -> MapRow:
        """One of the newest rows, with the maps that the network read in it."""
        (row,) = (row for row in self._rows if row.live.second == second)
        return row.mapped(mask, step, self._informative)

    def state(self) -> BandState:
        """All that `restore` needs."""
        rows = [
            RowState(row.live.second, row.columns, np.round(row.similarity * GRAIN).astype(np.int16))
            for row in self._rows
        ]
        return BandState(self.reference, self.first_live_s, self.columns, rows)

    def restore(self, state: BandState, at: Callable[[int], LiveSecond]) -> None:
        """Resumes from there; `at` gives the stream's seconds."""
        for row in state.rows:
            self._rows.append(_Row(at(row.second), row.columns, (row.grains / GRAIN).astype(np.float32)))

    def cut(self) -> Cut:
        """Tiles over the newest rows, left to right."""
        return Cut(tuple(self._rows), self.n_columns, self._informative)


class Cut:
    """The newest rows of a band, tiled for the network; `read` joins the maps of the tiles."""

    def __init__(self, rows: tuple[_Row, ...], n_columns: int, informative: NDArray[np.bool_]) -> None:
        self._rows = rows
        self._n_columns = n_columns
        self._informative = informative
        self.newest_s = rows[-1].live.second
        left = min(row.columns.start for row in rows)
        self._lefts = range(left, max(row.columns.stop for row in rows), INNER_COLUMNS)
        self.tiles = [self._tile(left) for left in self._lefts]

    @property
    def has_final_row(self) -> bool:
        return len(self._rows) > HALO

    def _tile(self, left: int) -> SimilarityTile:
        top, ref_s = self.newest_s - TILE_ROWS + 1, left - HALO
        cells = np.zeros((TILE_ROWS, TILE_COLUMNS), np.float32)
        inside = np.zeros((TILE_ROWS, TILE_COLUMNS), np.bool_)
        begin, end = max(0, -ref_s), min(TILE_COLUMNS, self._n_columns - ref_s)
        for row in self._rows:
            at = row.live.second - top
            inside[at, begin:end] = True
            a, b = max(row.columns.start, ref_s), min(row.columns.stop, ref_s + TILE_COLUMNS)
            if a < b:
                cells[at, a - ref_s : b - ref_s] = row.similarity[a - row.columns.start : b - row.columns.start]
        return SimilarityTile(top, ref_s, cells, inside)

    def read(self, maps: list[TileMaps]) -> list[MapRow]:
        """The newest five rows, oldest first; if the band has five, the first of them is final.

        `maps` belong to `tiles`. The newest row has no step, as the last row of a matrix.
        """
        start = self._lefts[0]
        mask = np.concatenate([m.mask for m in maps], axis=1)
        step = np.full((HALO + 1, mask.shape[1]), NO_STEP, np.uint8)
        step[:-1] = np.concatenate([m.step for m in maps], axis=1)
        if 0 <= self._n_columns - 1 - start < step.shape[1]:
            step[:, self._n_columns - 1 - start] = NO_STEP
        out = []
        for row in self._rows[-HALO - 1 :]:
            at = row.live.second - self.newest_s + HALO
            span = slice(row.columns.start - start, row.columns.stop - start)
            out.append(row.mapped(mask[at, span], step[at, span], self._informative))
        return out
