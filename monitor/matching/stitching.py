"""Segments: paths of one reference joined over cuts, freezes, breaks and lost seconds.

A path joins a segment when it starts, by what is known at that row: it continues where one of the segment's paths
stopped, within `join_s` on both sides, or it runs close beside one. The segment's name is its first path's start
cell and never changes. Joined this way a segment depends on the rows alone, not on how they arrived.

A `SegmentView` is what a segment claims at one moment: the strongest of its paths that do not overlap each other,
their common span and one score. A segment that merely mirrors a stronger one (the same stream seconds on other seconds
of the reference that look alike, as in a static shot) is marked as its echo.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from monitor.matching.confidence import best_confidence
from monitor.matching.paths import AlignmentPath, joined, soft_weight
from reference_db.search.feature_rows import ReferenceRows
from reference_db.store.catalog import ReferenceId

NEAR_S = 3  # two paths side by side closer than this are one copy
MIN_MEMBERS = 3  # a shorter path adds nothing to a segment that has a longer one
MAX_PATHS = 24  # separate paths of one segment; older ones are joined
BACK_S = 2  # how far a path may step back in the reference and still continue another
EXPLAIN_S = 20  # a segment may start this long after another and still be its echo
AS_WELL = 0.85  # of a segment's own similarity, with which another explains it
MAX_PAIRS = 4096  # of a reference's seconds whose similarity is cached
REMEMBER_S = 60  # closed segments stay this long, to recognise their echoes


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a path's weight becomes a score; each term can be switched off to measure its worth."""

    gamma: float = 100.0
    novelty_floor: float = 0.3  # what a second without anything new still counts; 1 switches evidence off
    join_s: int = 8
    echo_similarity: float = 0.25  # reference seconds more alike than this mirror each other; above 1 switches it off

    def evidence_s(self, paths: Iterable[AlignmentPath]) -> float:
        """Seconds of evidence: the shorter side, with seconds that show nothing new discounted."""
        total = 0.0
        for path in paths:
            novelty = path.sum_novelty / path.n_live
            total += path.shorter_side * (self.novelty_floor + (1 - self.novelty_floor) * novelty)
        return total


@dataclass(frozen=True, slots=True)
class PathState:
    """A path as its tracker has it now. `ahead` is the same walked on through rows that are not final yet."""

    reference: ReferenceId
    path: AlignmentPath
    ahead: AlignmentPath
    is_open: bool


Seconds: TypeAlias = int | float  # whole if read off cells, fractional if refined; snapshots restore each as it was
SegmentName: TypeAlias = tuple[ReferenceId, tuple[int, int]]  # of a segment: its reference and first path's start cell


@dataclass(frozen=True)
class SegmentView:
    """What a segment claims at one moment. Spans are half-open seconds."""

    reference: ReferenceId
    start: tuple[int, int]  # the first path's start cell
    live_start_s: Seconds
    live_end_s: Seconds
    ref_start_s: Seconds
    ref_end_s: Seconds
    score: float
    n_live: int  # stream seconds that were matched
    evidence_s: float
    total_weight: float
    paths: tuple[AlignmentPath, ...]
    is_open: bool
    echo_of: tuple[int, int] | None = None
    change: float | None = None  # how well its changes match, once refined; None if the reference stands still there

    @property
    def points(self) -> list[tuple[int, int]]:
        """Cells (live_s, ref_s) of its paths, thinned, in order, as the paths are: none overlaps another in time."""
        points: list[tuple[int, int]] = []
        for path in self.paths:
            points += path.points if path.points and path.points[0] == path.first else (path.first, *path.points)
            if points[-1] != path.last:
                points.append(path.last)
        return points

    @property
    def name(self) -> SegmentName:
        return self.reference, self.start

    def columns(self, seconds: NDArray[np.int64]) -> NDArray[np.int64]:
        """The reference second that the paths give for each stream second; beyond their ends, at normal speed."""
        first_s, line = self._line
        at = seconds - first_s
        inside = np.minimum(np.maximum(at, 0), len(line) - 1)
        return np.asarray(line[inside] + (at - inside))

    def columns_of(self, seconds: range) -> list[int]:
        """The same for seconds that follow each other, several times as fast."""
        first_s, line = self._line
        start, stop, n = seconds.start - first_s, seconds.stop - first_s, len(line)
        before = range(int(line[0]) + start, int(line[0]) + min(stop, 0))
        inside = line[max(start, 0) : max(stop, 0)].tolist()
        after = range(int(line[-1]) + max(start - n, 0) + 1, int(line[-1]) + stop - n + 1)
        return [*before, *inside, *after]

    @cached_property
    def _line(self) -> tuple[int, NDArray[np.int64]]:
        """The first stream second of the paths, and the reference second that they give for it and each after it."""
        points = self.points
        live, ref = np.fromiter(chain.from_iterable(points), np.int64, 2 * len(points)).reshape(-1, 2).T
        seconds = np.arange(live[0], live[-1] + 1)
        return int(live[0]), np.round(np.interp(seconds, live, ref)).astype(np.int64)


@dataclass(slots=True)
class _Segment:
    reference: ReferenceId
    start: tuple[int, int]
    paths: dict[tuple[int, int], PathState] = field(default_factory=dict)  # by start cell
    closed: bool = False
    last_view: SegmentView | None = None  # of a closed one

    @property
    def last_live_s(self) -> int:
        return max(state.path.last[0] for state in self.paths.values())

    def put(self, state: PathState) -> None:
        """Stores a path's newest state; one that ended too short is dropped, unless it is the only one."""
        self.paths[state.path.start] = state
        if not state.is_open and state.path.n_members < MIN_MEMBERS and len(self.paths) > 1:
            del self.paths[state.path.start]
        if len(self.paths) > MAX_PATHS:
            self._fold()

    def _fold(self) -> None:
        """Joins the older closed paths into one, so that a copy that airs for hours stays as small as a short one."""
        ended = sorted((s for s in self.paths.values() if not s.is_open), key=lambda s: s.path.last)
        old = ended[: len(ended) // 2]
        if len(old) < 2:
            return
        for state in old:
            del self.paths[state.path.start]
        whole = joined(_strongest([state.path for state in old]))
        self.paths[whole.start] = PathState(self.reference, whole, whole, False)

    def takes(self, path: AlignmentPath, join_s: int) -> bool:
        return any(_continues(path, state.path, join_s) for state in self.paths.values())


@dataclass(frozen=True, slots=True)
class SegmentState:
    """A segment, for snapshots; each path with whether it is open."""

    reference: ReferenceId
    start: tuple[int, int]
    paths: list[tuple[AlignmentPath, bool]]
    closed: bool


def _continues(path: AlignmentPath, old: AlignmentPath, join_s: int) -> bool:
    """Whether `path` continues where `old` stopped, or runs beside it."""
    live_gap, ref_gap = path.first[0] - old.last[0], path.first[1] - old.last[1]
    if live_gap > 0:
        return live_gap <= join_s and -BACK_S <= ref_gap <= join_s
    beside = old.last[1] + live_gap * old.speed  # where the old path was at the new one's first second
    return abs(path.first[1] - beside) <= NEAR_S


class Stitcher:
    """The segments of one channel and epoch."""

    def __init__(
        self,
        scoring: Scoring,
        reference_rows: Callable[[ReferenceId], ReferenceRows],
        live_row: Callable[[int], NDArray[np.float32] | None] = lambda second: None,
        min_confidence: float = 0.0,
    ) -> None:
        self.scoring = scoring
        self._min_confidence = min_confidence  # below it no alert is emitted, so echoes do not matter
        self._reference_rows = reference_rows
        self._live_row = live_row  # of a stream second that is still in memory
        self._segments: list[_Segment] = []  # open ones, and closed ones for a while
        # Similarity of two seconds of a reference, by reference: the next second needs the same pairs again.
        self._likeness: dict[ReferenceId, dict[tuple[int, int], float]] = {}

    def push(self, final_s: int, states: list[PathState], alerted: Collection[SegmentName] = ()) -> list[SegmentView]:
        """Views of every open segment and of those that closed now; `final_s` is the newest final row.

        Segments in `alerted` are examined for echoes only when they close: until then it changes nothing.
        """
        for state in sorted(states, key=lambda s: (s.path.start, s.reference)):
            self._place(state)
        # By identity: a segment that lost its first path may have a namesake.
        closing = {id(segment) for segment in self._segments if self._closes(segment, final_s)}
        views = self._views(lambda segment, view: id(segment) in closing or view.name not in alerted)
        pushed = [
            replace(view, is_open=False) if id(segment) in closing else view
            for segment, view in views
            if not segment.closed
        ]
        self._close(closing, final_s)
        return pushed

    def _closes(self, segment: _Segment, final_s: int) -> bool:
        """Whether no path continues this segment any more."""
        if segment.closed or final_s - segment.last_live_s <= self.scoring.join_s:
            return False
        return not any(state.is_open for state in segment.paths.values())

    def _close(self, closing: Collection[int], final_s: int) -> None:
        """Closes these segments, by identity, and drops the old ones."""
        for segment in self._segments:
            segment.closed = segment.closed or id(segment) in closing
        self._segments = [s for s in self._segments if not s.closed or final_s - s.last_live_s <= REMEMBER_S]
        if self._likeness:
            self._drop_likeness()

    def finish(self) -> list[SegmentView]:
        """The final view of every segment still open."""
        views = [replace(view, is_open=False) for segment, view in self._views() if not segment.closed]
        self._segments.clear()
        return views

    def references(self) -> set[ReferenceId]:
        """References of the open and the recently closed segments."""
        return {segment.reference for segment in self._segments}

    def spans(self) -> list[range]:
        """Stream seconds of every path of the open and the recently closed segments."""
        paths = (state.path for segment in self._segments for state in segment.paths.values())
        return [range(path.start[0], path.last[0] + 1) for path in paths]

    def drop(self, references: Collection[ReferenceId]) -> None:
        """Drops every segment of these references."""
        self._segments = [segment for segment in self._segments if segment.reference not in references]
        self._drop_likeness()

    def state(self) -> list[SegmentState]:
        """All that `restore` needs: every open path is pushed again before it is viewed, so `ahead` is left out."""
        return [
            SegmentState(
                segment.reference,
                segment.start,
                [(state.path, state.is_open) for state in segment.paths.values()],
                segment.closed,
            )
            for segment in self._segments
        ]

    def restore(self, states: Iterable[SegmentState]) -> None:
        """Resumes from there."""
        self._segments = [
            _Segment(
                state.reference,
                state.start,
                {path.start: PathState(state.reference, path, path, is_open) for path, is_open in state.paths},
                state.closed,
            )
            for state in states
        ]

    def _drop_likeness(self) -> None:
        """Drops the cache of references no longer in use, and caches that grew too large."""
        needed = self.references()
        self._likeness = {
            reference: pairs
            for reference, pairs in self._likeness.items()
            if reference in needed and len(pairs) <= MAX_PAIRS
        }

    def _place(self, state: PathState) -> None:
        # A closed segment is final: a path put into it would never be emitted.
        mine = [segment for segment in self._segments if segment.reference == state.reference and not segment.closed]
        known = [segment for segment in mine if state.path.start in segment.paths]
        taking = (segment for segment in mine if segment.takes(state.path, self.scoring.join_s))
        segment = known[0] if known else next(taking, None)
        if segment is None:
            self._segments.append(_Segment(state.reference, state.path.start, {state.path.start: state}))
        else:
            segment.put(state)

    def _views(
        self, is_examined: Callable[[_Segment, SegmentView], bool] = lambda segment, view: True
    ) -> list[tuple[_Segment, SegmentView]]:
        """The view of each segment; one that closed earlier only explains others."""
        views = [(segment, segment.last_view or self._view(segment)) for segment in self._segments]
        for segment, view in views:
            segment.last_view = view if segment.closed else None
        others = sorted((view for _, view in views), key=lambda view: (-view.total_weight, view.start))
        return [
            (segment, self._mark_echo(view, others))
            if self._may_echo(segment, view) and is_examined(segment, view)
            else (segment, view)
            for segment, view in views
        ]

    def _may_echo(self, segment: _Segment, view: SegmentView) -> bool:
        """Whether it matters if this is an echo: a closed one or one below the threshold emits nothing."""
        return (
            self.scoring.echo_similarity <= 1 and not segment.closed and best_confidence(view) >= self._min_confidence
        )

    def _view(self, segment: _Segment) -> SegmentView:
        chosen = _strongest([state.ahead for state in segment.paths.values()])
        n_members = sum(path.n_members for path in chosen)
        total = sum(path.sum_weight for path in chosen)
        evidence_s = self.scoring.evidence_s(chosen)
        return SegmentView(
            segment.reference,
            segment.start,
            min(path.first[0] for path in chosen),
            max(path.last[0] for path in chosen) + 1,
            min(path.first[1] for path in chosen),
            max(path.last[1] for path in chosen) + 1,
            soft_weight(evidence_s, self.scoring.gamma) * total / n_members,
            sum(path.n_live for path in chosen),
            evidence_s,
            total,
            tuple(chosen),
            not segment.closed,
        )

    def _mark_echo(self, view: SegmentView, others: list[SegmentView]) -> SegmentView:
        """The view, marked if it is an echo of another; those of the same seconds are tried first, as that is fast."""
        half = 0.5 * (view.live_end_s - view.live_start_s)
        shared = [(other, _shared_s(view, other)) for other in others if _is_stronger(other, view)]
        for other in (other for other, seconds in shared if seconds >= half):
            start, end = max(view.live_start_s, other.live_start_s), min(view.live_end_s, other.live_end_s)
            if self._looks_alike(view, other, range(int(start), int(end))):
                return replace(view, echo_of=other.start)
        whole = range(int(view.live_start_s), int(view.live_end_s))
        for other in (other for other, seconds in shared if -EXPLAIN_S <= seconds < half):
            if self._explains(other, view) and self._looks_alike(view, other, whole):
                return replace(view, echo_of=other.start)
        return view

    def _looks_alike(self, view: SegmentView, stronger: SegmentView, seconds: range) -> bool:
        """Whether `stronger`, continued along its own line, shows in these seconds what `view` shows."""
        rows = self._reference_rows(view.reference)
        n, both = len(rows), zip(view.columns_of(seconds), stronger.columns_of(seconds), strict=True)
        pairs = [pair for pair in both if 0 <= pair[1] < n]
        if not pairs:
            return False
        known = self._likeness.setdefault(view.reference, {})
        if new := [pair for pair in pairs if pair not in known]:
            own, other = np.array(new).T
            known.update(zip(new, np.einsum("ij,ij->i", rows[own], rows[other]).tolist(), strict=True))
        return float(np.array([known[pair] for pair in pairs], np.float32).mean()) >= self.scoring.echo_similarity

    def _explains(self, stronger: SegmentView, view: SegmentView) -> bool:
        """Whether the seconds of `view` match about as well where the line of `stronger` leads."""
        rows = self._reference_rows(view.reference)
        seen = {
            s: row
            for s in range(int(view.live_start_s), int(view.live_end_s))
            if (row := self._live_row(s)) is not None
        }
        if not seen:
            return False
        seconds = np.array(list(seen), np.int64)
        lives = np.stack(list(seen.values()))
        own = _along(lives, rows, view.columns(seconds))
        continued = stronger.columns(seconds)
        theirs = _along(lives, rows, continued + np.arange(-NEAR_S, NEAR_S + 1)[:, None]).max()
        return bool(theirs >= AS_WELL * own.item())


def _is_stronger(other: SegmentView, view: SegmentView) -> bool:
    """Whether the other is a stronger segment of the same reference."""
    if other.reference != view.reference or other.start == view.start:
        return False
    return (other.total_weight, other.start) > (view.total_weight, view.start)


def _shared_s(view: SegmentView, other: SegmentView) -> Seconds:
    """Stream seconds that both cover; negative by the gap between them."""
    return min(view.live_end_s, other.live_end_s) - max(view.live_start_s, other.live_start_s)


def _along(lives: NDArray[np.float32], rows: ReferenceRows, columns: NDArray[np.int64]) -> NDArray[np.float32]:
    """Mean similarity of these stream seconds to these reference seconds [..., live]; 0 beyond the reference."""
    inside = (columns >= 0) & (columns < len(rows))
    first, last = (min(max(int(edge), 0), len(rows) - 1) for edge in (columns.min(), columns.max()))
    near = rows[first : last + 1][np.clip(columns, first, last) - first]
    return np.asarray(np.where(inside, np.einsum("ij,...ij->...i", lives, near), np.float32(0)).mean(axis=-1))


def _strongest(paths: list[AlignmentPath]) -> list[AlignmentPath]:
    """Paths by falling weight that do not overlap a stronger one, in order of time."""
    chosen: list[AlignmentPath] = []
    for path in sorted(paths, key=lambda p: (-p.sum_weight, p.start)):
        if chosen and path.n_members < MIN_MEMBERS:
            continue
        if all(path.first[0] > old.last[0] or path.last[0] < old.first[0] for old in chosen):
            chosen.append(path)
    return sorted(chosen, key=lambda p: p.first)
