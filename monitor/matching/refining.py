"""Refining: where a segment starts and ends, read off the straight lines along which it matches best.

A path is walked cell by cell within the network's nine seconds. In a slow or static scene neighbouring cells look
alike and the path wanders by some seconds, though over the whole copy only one line (an offset and a speed) fits.
So the first and the last seconds of a segment are each compared with their reference along every line near the path;
the best line gives the reference's side, and the similarity along it shows where the copy starts and ends on air:
half-way between the last picture outside it and the first inside. A key picture that is held for some seconds counts
at the time when it was really on air. What changes from second to second counts twice, since what stands still fits at
any offset. The refined segment also says how well its changes match.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from monitor.ingest.feature_windows import LiveSecond
from monitor.matching.changes import AROUND_S, change_correlation, is_steady
from monitor.matching.stitching import SegmentView
from reference_db.search.feature_rows import ReferenceRows

FIT_S = 20  # seconds of either end that a line is fitted to
REACH_S = 20  # how far a segment may grow beyond its path on either end
ASIDE_S = 80  # how far from the path lines are tried, in reference seconds: films repeat themselves
ROUNDS = 2  # the second fits to the seconds that the first found
BESIDE_S = 12  # within which any line is the path's own; farther away is another place of the reference
ECHO = 0.5  # of the similarity elsewhere in the reference: below it, the path is only an echo of that place
REPEATS = 0.35  # similarity of reference seconds from which one may stand for the other
MIN_FIT_S = 4  # a shorter segment is not refined
MIN_SEEN = 0.6  # of those seconds that must have been seen
SPEEDS = (1.0, 0.5, 0.57, 0.67, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.18, 1.25, 1.33, 1.5, 1.75, 2.0)
ONLY_NORMAL = 8  # with fewer pictures other speeds cannot be distinguished from chance
OTHER_SPEED = 0.01  # of similarity, that another speed than normal must win by
HALF = 0.002  # of similarity, half of which an offset between two seconds must win by
PATH_WINS = 0.12  # of similarity, by which the path must beat the line to be used instead: a cut or a freeze is no line
EARLY_S = 0.1  # a key picture that comes sooner than usual marks a change of picture: the border is there
ASIDES_S = (-1.0, -0.5, 0.0, 0.5, 1.0)  # a line may be this far off where changes are compared
BORDER = 0.5  # of the similarity within a copy: seconds below it lie outside


@dataclass(frozen=True, slots=True)
class _Line:
    """Reference second `ref_s` at stream second `live_s`, and on at this speed."""

    live_s: int
    ref_s: float
    speed: float
    similarity: float  # the mean along it
    fit: float  # similarity plus the part of it that changes, less what another speed than normal must win by

    def at(self, live_s: float) -> float:
        return self.ref_s + self.speed * (live_s - self.live_s)


def refine(
    view: SegmentView, lives: Iterable[LiveSecond], rows: ReferenceRows, informative: NDArray[np.bool_]
) -> SegmentView:
    """The segment with its ends read off lines; `lives` are the seconds of the stream still in memory."""
    lives = list(lives)
    counting = {live.second: live.row for live in lives if live.counts and live.row is not None}
    ages_s = {live.second: live.age_s for live in lives if live.age_s}
    sides = _Sides(counting, ages_s, _key_every_s(lives), rows, informative)
    refined, fitted = view, None
    for _ in range(ROUNDS):
        span = _whole_seconds(refined)
        if span != fitted:  # the same seconds have the same lines
            refined, fitted = _refine_ends(refined, sides), span
    is_span = refined.live_end_s > refined.live_start_s and refined.ref_end_s > refined.ref_start_s
    refined = refined if is_span else view
    return replace(refined, change=sides.change(refined)) if counting else refined


def _key_every_s(lives: list[LiveSecond]) -> float:
    """The longest time from one picture to the next; 1 s if every picture is decoded."""
    seen = [(one, after) for one, after in pairwise(lives) if one.row is not None and after.row is not None]
    return max((1.0 + one.age_s - after.age_s for one, after in seen), default=1.0)


def _whole_seconds(view: SegmentView) -> tuple[int, int]:
    """The whole seconds that the segment lies in."""
    return math.floor(view.live_start_s), math.ceil(view.live_end_s)


def _refine_ends(view: SegmentView, sides: _Sides) -> SegmentView:
    """The segment with both ends moved along the lines that fit its first and its last seconds."""
    start, end = _whole_seconds(view)
    head = sides.fit(view, range(start, min(end, start + FIT_S)))
    tail = sides.fit(view, range(max(start, end - FIT_S), end))
    if head is not None:
        live_start = max(sides.edge(head, start, -1), float(min(sides.lives)))  # nothing was seen before it
        view = replace(view, live_start_s=live_start, ref_start_s=max(0.0, head.at(live_start)))
    if tail is not None:
        live_end = sides.edge(tail, end - 1, 1)
        view = replace(view, live_end_s=live_end, ref_end_s=min(float(len(sides.rows)), tail.at(live_end)))
    return view


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """The stream's seconds that count, how old their pictures were, and the reference."""

    lives: dict[int, NDArray[np.float32]]
    ages_s: dict[int, float]  # of key pictures
    key_every_s: float
    rows: ReferenceRows
    informative: NDArray[np.bool_]

    def fit(self, view: SegmentView, seconds: range) -> _Line | None:
        """The line along which these seconds match best; None if too few were seen or the path is better."""
        seen = np.array([second for second in seconds if second in self.lives], np.int64)
        if len(seen) < max(MIN_FIT_S, MIN_SEEN * len(seconds)):
            return None
        path = view.columns(seen)
        line, beats_path = self._best(seen, seconds, path, ASIDE_S)
        if not self._is_same_place(line, seen, path):
            beside, beside_beats_path = self._best(seen, seconds, path, BESIDE_S)
            if beside.fit > ECHO * line.fit:
                line, beats_path = beside, beside_beats_path
        return line if beats_path else None

    def _is_same_place(self, line: _Line, seen: NDArray[np.int64], path: NDArray[np.int64]) -> bool:
        """Whether the line stays beside the path or shows the same pictures.

        A film that airs twice at once, from two of its places, has two valid lines.
        """
        columns = np.floor(line.at(0.0) + line.speed * self._picture_times(seen) + 0.5).astype(np.int64)
        if float(np.abs(columns - path).mean()) <= BESIDE_S:
            return True
        inside = (columns >= 0) & (columns < len(self.rows)) & (path >= 0) & (path < len(self.rows))
        if not inside.any():
            return False
        alike = np.einsum("ij,ij->i", self.rows[path[inside]], self.rows[columns[inside]])
        return float(alike.mean()) >= REPEATS

    def _best(
        self, seen: NDArray[np.int64], seconds: range, path: NDArray[np.int64], aside_s: int
    ) -> tuple[_Line, bool]:
        """The line along which these seconds match best, near the path, and whether the path is no better."""
        first, last = max(0, int(path.min()) - aside_s), min(len(self.rows), int(path.max()) + 1 + aside_s)
        cells = np.stack([self.lives[second] for second in seen.tolist()]) @ self.rows[first:last].T
        cells = np.where(self.informative[first:last], cells, np.float32(0))
        offsets = np.arange(2 * (first - len(seconds)), 2 * last) / 2
        times = self._picture_times(seen)
        speeds = SPEEDS if len(np.unique(times)) >= ONLY_NORMAL else SPEEDS[:1]
        ahead = np.array(speeds)[:, None, None] * (times - seconds.start)  # [speed, offset, live], as below
        columns = np.floor(offsets[:, None] + ahead + 0.5).astype(np.int64) - first
        means = _along(cells, columns).mean(axis=-1)
        still = _along(np.broadcast_to(cells.mean(axis=0), cells.shape), columns).mean(axis=-1)
        fits = 2 * means - still - HALF * (offsets % 1)  # a tie goes to the whole second
        lines = []
        for n, speed in enumerate(speeds):
            top, handicap = int(fits[n].argmax()), 0.0 if speed == 1.0 else OTHER_SPEED
            ref_s = float((first + columns[n, top] - ahead[n, 0]).mean())  # amid the offsets of equal columns
            lines.append(_Line(seconds.start, ref_s, speed, float(means[n, top]), float(fits[n, top]) - handicap))
        best = max(lines, key=lambda line: line.fit)
        return best, bool(_along(cells, path - first).mean() <= best.similarity + PATH_WINS)

    def change(self, view: SegmentView) -> float | None:
        """How well the changes of the stream match along the segment: the mean over its stretches of FIT_S."""
        around = slice(max(0, int(view.ref_start_s) - AROUND_S), math.ceil(view.ref_end_s) + AROUND_S)
        if not is_steady(self.rows[around]):
            return None
        start, end = math.ceil(view.live_start_s), math.ceil(view.live_end_s)
        n_parts = max(1, round((end - start) / FIT_S))
        borders = np.linspace(start, end, n_parts + 1).round().astype(int).tolist()
        found = [self._change(view, range(first, last)) for first, last in pairwise(borders)]
        known = [one for one in found if one is not None]
        return sum(known) / len(known) if known else None

    def _change(self, view: SegmentView, seconds: range) -> float | None:
        """The best correlation of changes along the segment's line through these seconds, within a second aside."""
        seen = np.array([second for second in seconds if second in self.lives], np.int64)
        if not len(seen):
            return None
        line = self.fit(view, seconds)
        times = self._picture_times(seen)
        at = view.columns(seen).astype(np.float64) if line is None else line.at(0.0) + line.speed * times
        lives = np.stack([self.lives[second] for second in seen.tolist()])
        columns = [np.clip(np.floor(at + aside + 0.5).astype(np.int64), 0, len(self.rows) - 1) for aside in ASIDES_S]
        found = [change_correlation(lives, self.rows[column]) for column in columns]
        return max((one for one in found if one is not None), default=None)

    def edge(self, line: _Line, from_s: int, direction: int) -> float:
        """Where the copy ends, going along the line from within it, past `from_s`."""
        level = BORDER * line.similarity
        gains: list[float] = []
        seconds = [from_s + direction * step for step in range(-FIT_S // 2, REACH_S + 1)]
        for second in seconds:
            column = int(np.floor(line.at(second - self.ages_s.get(second, 0.0)) + 0.5))
            if second in self.lives and 0 <= column < len(self.rows) and self.informative[column]:
                gains.append(float(self.lives[second] @ self.rows[column]) - level)
            else:
                gains.append(0.0)  # no evidence either way
        last = seconds[int(np.cumsum(gains).argmax())]
        return self._border(min(last, last + direction))

    def _border(self, second: int) -> float:
        """When the picture of this second was replaced by the next: half-way, unless the next came early."""
        one, next_one = (at - self.ages_s.get(at, 0.0) + 0.5 for at in (second, second + 1))
        return next_one if next_one - one < self.key_every_s - EARLY_S else 0.5 * (one + next_one)

    def _picture_times(self, seen: NDArray[np.int64]) -> NDArray[np.float64]:
        """When the pictures of these seconds were on air, on the grid where a second's own picture is at the second."""
        return np.array([round(second - self.ages_s.get(second, 0.0), 3) for second in seen.tolist()])


def _along(cells: NDArray[np.float32], columns: NDArray[np.int64]) -> NDArray[np.float32]:
    """The cells [live, ref] in these columns [..., live]; 0 beyond the border."""
    bordered = np.pad(cells, ((0, 0), (1, 1)))
    return np.asarray(bordered[np.arange(len(cells)), np.clip(columns + 1, 0, cells.shape[1] + 1)])
