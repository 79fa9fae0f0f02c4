"""Alignment paths: rows of mask and step map come in, paths walked through them come out.

The paper's Algorithm 1, taken row by row. Rows are stream seconds and come once each, in order, when they are
final. Starts are taken by smallest row, then smallest column; a start in row r is decided only once every older
path has passed row r + 1, since a path that enters r + 1 still removes its neighbours in r. Aligning a finished
matrix is this tracker fed every row, then `finish`, so live and offline cannot differ.

A path in progress has its head, its misses, running sums and a few thinned points: its state does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from monitor.matching.tiles import DOWN, NO_STEP, RIGHT, RIGHT_DOWN, MapRow

MAX_MISSES = 3  # consecutive, as the paper's text has it
MAX_BLIND = 8  # seconds in a row that count for nothing before a path is given up
MAX_POINTS = 64  # thinned points of a path, for its evidence


@dataclass(frozen=True, slots=True)
class AlignmentPath:
    """A path as far as it has been walked. Spans are of its members: cells with similarity x mask >= sigma."""

    start: tuple[int, int]  # (live_s, ref_s) of the cell that began it: with the reference, the path's name
    first: tuple[int, int]
    last: tuple[int, int]
    n_members: int
    n_live: int  # stream seconds that have a member
    sum_weight: float  # of similarity x mask over the members
    sum_novelty: float  # of the members' rows, each row once
    moments: tuple[float, float, float, float]  # sums of i, j, ii, ij over the members, relative to start
    points: tuple[tuple[int, int], ...] = ()

    @property
    def live_seconds(self) -> int:
        return self.last[0] - self.first[0] + 1

    @property
    def ref_seconds(self) -> int:
        return self.last[1] - self.first[1] + 1

    @property
    def shorter_side(self) -> int:
        """||P||: the shorter of the two segments that the path joins, in seconds."""
        return min(self.live_seconds, self.ref_seconds)

    @property
    def mean_weight(self) -> float:
        return self.sum_weight / self.n_members

    @property
    def speed(self) -> float:
        """Reference seconds per stream second, by least squares over the members; 1 if it is too short."""
        n, (si, sj, sii, sij) = self.n_members, self.moments
        spread = n * sii - si * si
        if self.live_seconds < 4 or spread <= 0:
            return 1.0
        return (n * sij - si * sj) / spread


def soft_weight(length: float, gamma: float) -> float:
    """alpha of the paper: near 0 for a path of a second or two, near 1 from ten on."""
    return 1.0 / (1.0 + gamma * math.exp(-length))


def joined(paths: Sequence[AlignmentPath]) -> AlignmentPath:
    """Paths that follow each other as one, in order of time; its name is that of the first."""
    start = paths[0].start
    moments = np.zeros(4)
    for path in paths:
        n, (si, sj, sii, sij) = path.n_members, path.moments
        di, dj = path.start[0] - start[0], path.start[1] - start[1]
        moments += (
            si + n * di,
            sj + n * dj,
            sii + 2 * di * si + n * di * di,
            sij + dj * si + di * sj + n * di * dj,
        )
    points = [point for path in paths for point in path.points]
    while len(points) >= MAX_POINTS:
        points = points[::2]
    return AlignmentPath(
        start,
        paths[0].first,
        paths[-1].last,
        sum(path.n_members for path in paths),
        sum(path.n_live for path in paths),
        sum(path.sum_weight for path in paths),
        sum(path.sum_novelty for path in paths),
        (float(moments[0]), float(moments[1]), float(moments[2]), float(moments[3])),
        tuple(points),
    )


@dataclass(slots=True)
class _Walker:
    """A path in progress: the cell it stands in, and its sums so far."""

    start: tuple[int, int]
    row: int
    column: int
    misses: int = 0
    blind: int = 0
    first: tuple[int, int] | None = None
    last: tuple[int, int] = (0, 0)
    n_members: int = 0
    n_live: int = 0
    sum_weight: float = 0.0
    sum_novelty: float = 0.0
    moments: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    points: list[tuple[int, int]] = field(default_factory=list)
    stride: int = 1
    ended: bool = False

    def through(self, row: MapRow, sigma: float) -> list[int]:
        """The columns visited in this row. Afterwards the walker stands in the next row, or has ended."""
        visited = []
        while not self.ended and self.row == row.live_s:
            at = self.column - row.first_ref_s
            if not 0 <= at < len(row.similarity):
                self.ended = True
                break
            visited.append(self.column)
            step = int(row.step[at])
            if row.counts[at]:
                self._weigh(row, float(row.similarity[at]) * float(row.mask[at]), sigma)
            else:
                self.blind += 1
                self.ended = self.blind > MAX_BLIND
                step = step if step == NO_STEP else RIGHT_DOWN
            if step == NO_STEP:
                self.ended = True
            if step != RIGHT:
                self.row += 1
            if step != DOWN:
                self.column += 1
        return visited

    def _weigh(self, row: MapRow, weight: float, sigma: float) -> None:
        self.blind = 0
        if weight < sigma:
            self.misses += 1
            self.ended = self.misses >= MAX_MISSES
            return
        self.misses = 0
        cell = (self.row, self.column)
        if self.first is None:
            self.first = cell
        if self.n_members == 0 or self.last[0] != self.row:
            self.sum_novelty += row.novelty
            self.n_live += 1
        self.last = cell
        if self.n_members % self.stride == 0:
            self.points.append(cell)
            if len(self.points) >= MAX_POINTS:
                self.points = self.points[::2]
                self.stride *= 2
        self.n_members += 1
        self.sum_weight += weight
        i, j = self.row - self.start[0], self.column - self.start[1]
        si, sj, sii, sij = self.moments
        self.moments = (si + i, sj + j, sii + i * i, sij + i * j)

    def copy(self) -> _Walker:
        """A copy; `dataclasses.replace` takes ten times as long."""
        return _Walker(
            self.start,
            self.row,
            self.column,
            self.misses,
            self.blind,
            self.first,
            self.last,
            self.n_members,
            self.n_live,
            self.sum_weight,
            self.sum_novelty,
            self.moments,
            list(self.points),
            self.stride,
            self.ended,
        )

    def path(self) -> AlignmentPath | None:
        """The path so far; None while it has no member."""
        if self.first is None:
            return None
        return AlignmentPath(
            self.start,
            self.first,
            self.last,
            self.n_members,
            self.n_live,
            self.sum_weight,
            self.sum_novelty,
            self.moments,
            tuple(self.points),
        )


@dataclass(frozen=True, slots=True, eq=False)
class TrackerState:
    """The state of a `PathTracker`, for snapshots."""

    walkers: list[_Walker]
    visited: dict[int, list[int]]  # row -> columns, sorted: equal trackers have equal states


class PathTracker:
    """Walks every path of one band through its rows as they become final."""

    def __init__(self, tau: float, sigma: float) -> None:
        self.tau = tau
        self.sigma = sigma
        self._walkers: list[_Walker] = []
        self._previous: MapRow | None = None  # the row whose starts are not decided yet
        self._visited: dict[int, set[int]] = {}  # row -> columns, for the last three rows

    def push(self, row: MapRow) -> list[AlignmentPath]:
        """The paths that ended in this row, oldest start first."""
        if self._previous is not None and row.live_s != self._previous.live_s + 1:
            raise ValueError(f"rows must be consecutive, got {row.live_s} after {self._previous.live_s}")
        visited = self._visited.setdefault(row.live_s, set())
        for walker in self._walkers:
            visited.update(walker.through(row, self.sigma))
        if self._previous is not None:
            self._start_paths(self._previous, row)
            self._visited.pop(self._previous.live_s - 1, None)
        self._previous = row
        return self._take_ended()

    def finish(self) -> list[AlignmentPath]:
        """The paths still open at the end of the last row pushed, and those that start in it."""
        if self._previous is not None:
            self._start_paths(self._previous, None)
        for walker in self._walkers:
            walker.ended = True
        return self._take_ended()

    def open_paths(self) -> list[AlignmentPath]:
        """Paths still being walked, as they are now."""
        return [path for walker in self._walkers if (path := walker.path())]

    def heads(self) -> list[int]:
        """The columns at which open paths enter the next row."""
        return [walker.column for walker in self._walkers]

    def peek(self, rows: list[MapRow]) -> list[AlignmentPath]:
        """Open paths walked on through rows that are not final yet; the tracker itself does not change."""
        paths = []
        for walker in self._walkers:
            ahead = walker.copy()
            for row in rows:
                ahead.through(row, self.sigma)
            if path := ahead.path():
                paths.append(path)
        return paths

    @property
    def undecided(self) -> MapRow | None:
        """The newest row pushed: the one whose starts are not decided yet."""
        return self._previous

    def state(self) -> TrackerState:
        """All that `restore` needs, except the undecided row."""
        return TrackerState(self._walkers, {row: sorted(columns) for row, columns in self._visited.items()})

    def restore(self, state: TrackerState, undecided: MapRow | None) -> None:
        """Resumes from there."""
        self._walkers, self._previous = state.walkers, undecided
        self._visited = {row: set(columns) for row, columns in state.visited.items()}

    def _start_paths(self, row: MapRow, below: MapRow | None) -> None:
        """Decides the starts of `row`; every older path has passed `below`, the row after it."""
        candidates = np.flatnonzero((row.mask > self.tau) & row.counts) + row.first_ref_s
        for column in candidates.tolist():
            near = range(column - 1, column + 2)
            if any(c in self._visited.get(r, ()) for r in (row.live_s - 1, row.live_s, row.live_s + 1) for c in near):
                continue
            walker = _Walker((row.live_s, column), row.live_s, column)
            self._visited.setdefault(row.live_s, set()).update(walker.through(row, self.sigma))
            if below is not None:
                self._visited.setdefault(below.live_s, set()).update(walker.through(below, self.sigma))
            self._walkers.append(walker)

    def _take_ended(self) -> list[AlignmentPath]:
        ended = [path for walker in self._walkers if walker.ended and (path := walker.path())]
        self._walkers = [walker for walker in self._walkers if not walker.ended]
        return ended
