"""Which pictures of both sides are shown side by side: those whose partner is certain, near each third of a copy.

Input: the pictures of the channel within the copy that are still in memory, with their feature rows, and the pictures
and rows of the reference around the line that the alert claims. Each pair of a channel's and a reference's moment gets
a log-likelihood from its features and, if the reference has pictures, from its pixels. Then the line through these
moments that explains all of them best is searched near the claimed one: any speed, or normal speed with one jump in it
(a cut, a held picture). So the time of a pair rests on the whole copy and not on one picture; a line through some
twenty moments is exact to a tenth of a second. A pair is shown if moments a second beside its partner explain it
clearly worse, or if they look the same to a viewer; in doubt, a copy has fewer than three pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from monitor.evidence.picture_alignment import likeness, mean_difference
from monitor.evidence.pictures import AirPicture, grey_picture
from reference_db.search.feature_rows import ReferenceRows

PLACES = ("start", "middle", "end")
GRID = 2  # reference moments per second, as there are thumbnails
BESIDE_S = 2.5  # how far from the claimed line others are tried: farther away a film may repeat itself
JUMP_S = 0.5  # and how much farther if there is a jump
OFFSET_S = 0.125  # between two lines
SPEEDS = (0.5, 0.57, 0.67, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.18, 1.25, 1.33, 1.5, 1.75, 2.0)
NEAR_SPEED, ANY_SPEED = 0.12, 0.3  # around the claimed speed: in steps of 0.01, and those of SPEEDS
MAX_AIRS = 64  # pictures of the channel that are compared; more add nothing
N_HINTS = 6  # of them from which the placement of the film in the picture is read
HINT_S = 1.0  # within which features alone identify the partner
# Log-likelihoods: the number of independent values in which two correlated pictures or rows differ, and the highest
# correlation that differs measurably from a perfect one.
PIXELS, MAX_PIXELS_ALIKE = 60.0, 0.997
FEATURES, MAX_FEATURES_ALIKE = 30.0, 0.95
# Of log-likelihood, over the whole copy: what another speed than normal and what a jump must win by.
SPEED_COST, JUMP_COST = 10.0, 25.0
ASIDE_COST = 0.5  # of log-likelihood of one moment, for each second beside the claimed line
MIN_PIECE = 3  # moments before and after a jump
MIN_JUMP_S = 0.75
OTHER_S = (0.75, 1.0)  # beside a partner, where another is clearly worse if the pair is certain
CERTAIN = 4.0  # of log-likelihood
INSIDE = 0.5  # of the usual log-likelihood; a moment with less shows something else: the copy's ends, an advert
SAME_LEVELS = 1.0  # mean difference of grey levels that a viewer does not see
PICTURE_S = 1.0  # a picture of the reference farther from the partner than this is not shown as the partner
EDGE_S = 0.3  # pictures so near to the ends of the copy may be those of its neighbours


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """The spans that an alert claims, as a line; times are those of pictures, not whole seconds."""

    live_start_s: float
    live_end_s: float
    ref_start_s: float
    ref_end_s: float

    @property
    def speed(self) -> float:
        return (self.ref_end_s - self.ref_start_s) / max(1e-3, self.live_end_s - self.live_start_s)

    def at(self, live_s: float) -> float:
        return self.ref_start_s + self.speed * (live_s - self.live_start_s)

    def place(self, live_s: float) -> int:
        """0, 1 or 2: the third of the copy in which this moment lies."""
        share = (live_s - self.live_start_s) / max(1e-3, self.live_end_s - self.live_start_s)
        return min(2, max(0, int(3 * share)))


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A picture of the channel and the moment of the reference that it shows."""

    place: str
    air: AirPicture
    ref_s: float
    reference: bytes | None  # the reference's picture of that moment, if there is one
    is_certain: bool


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceMoments:
    """The reference of a copy: its rows, and a function that returns its pictures of a span, each with its time."""

    rows: ReferenceRows | None
    informative: NDArray[np.bool_] | None
    pictures: Callable[[float, float], Sequence[tuple[float, bytes]]]


def choose_pairs(line: ClaimedLine, airs: Sequence[AirPicture], reference: ReferenceMoments) -> list[Pair]:
    """The pairs to show, at most one for each third of the copy, in order; none without pictures of the channel."""
    airs = _usable(line, airs)
    if not airs:
        return []
    evidence = _Evidence.gather(line, airs, reference)
    fit = evidence.fit(line)
    best: dict[int, tuple[float, Pair]] = {}
    for n, air in enumerate(airs):
        partner = fit.partner(n)
        if partner is None:
            continue
        pair, merit = evidence.pair(n, air, partner, fit, PLACES[line.place(air.time_s)])
        place = line.place(air.time_s)
        if place not in best or merit > best[place][0]:
            best[place] = merit, pair
    chosen = [best[place] for place in sorted(best)]
    certain = [pair for _, pair in chosen if pair.is_certain]
    if certain or not chosen:
        return certain
    return [max(chosen, key=lambda one: one[0])[1]]


def with_stored_pairs(line: ClaimedLine, pairs: Sequence[Pair], stored: Sequence[Pair]) -> list[Pair]:
    """The pairs, and those that the previous run stored of thirds that have none, if they are near the line."""
    chosen = {pair.place: pair for pair in pairs}
    for pair in stored:
        place = PLACES[line.place(pair.air.time_s)]
        if abs(pair.ref_s - line.at(pair.air.time_s)) <= BESIDE_S + JUMP_S and place not in chosen:
            chosen[place] = replace(pair, place=place)
    return [chosen[place] for place in PLACES if place in chosen]


def _usable(line: ClaimedLine, airs: Sequence[AirPicture]) -> list[AirPicture]:
    """The pictures within the copy, each moment once, spread evenly if there are many."""
    start_s, end_s = line.live_start_s + EDGE_S, line.live_end_s - EDGE_S
    by_time = {round(air.time_s, 2): air for air in sorted(airs, key=lambda air: -air.second)}  # a held one once
    inside = [by_time[time_s] for time_s in sorted(by_time) if start_s <= time_s <= end_s]
    if len(inside) <= MAX_AIRS:
        return inside
    return [inside[at] for at in np.linspace(0, len(inside) - 1, MAX_AIRS).round().astype(int).tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """The reference's time of each moment of the channel, by the best line; None where it jumps."""

    times_s: NDArray[np.float64]
    margin: float  # mean log-likelihood by which it beats lines beside it
    level: float  # median log-likelihood of the moments on it
    jumps_at: int | None = None  # the first moment after the jump

    def partner(self, n: int) -> float | None:
        if self.jumps_at is not None and -2 <= n - self.jumps_at <= 1:
            return None
        return float(self.times_s[n])


@dataclass(frozen=True, slots=True, eq=False)
class _Evidence:
    """Log-likelihood that each moment of the channel shows each moment of the reference's grid."""

    first: int  # number of the grid's first column
    cells: NDArray[np.float64]  # [air, grid]
    alike: NDArray[np.float64]  # correlation of the pixels [air, grid]; 0 where the reference has no picture
    similar: NDArray[np.float64]  # similarity of the features [air, grid]
    live_s: NDArray[np.float64]  # of each moment
    pictures: dict[int, bytes]  # of the reference, by column
    greys: dict[int, NDArray[np.uint8]]

    @classmethod
    def gather(cls, line: ClaimedLine, airs: Sequence[AirPicture], reference: ReferenceMoments) -> _Evidence:
        live_s = np.array([air.time_s for air in airs])
        columns = _needed_columns([line.at(time_s) for time_s in live_s.tolist()])
        first, width = int(columns[0]), int(columns[-1] - columns[0]) + 1
        columns -= first
        similar = np.zeros((len(airs), width))
        similar[:, columns] = _similarities(airs, reference, (first + columns) / GRID)
        pictures = _reference_pictures(reference, first, columns)
        cells, alike = _log_likelihood(similar, FEATURES, MAX_FEATURES_ALIKE), np.zeros_like(similar)
        greys = {column: grey_picture(jpeg) for column, jpeg in pictures.items()}
        if greys:
            shown = sorted(greys)
            hints = _hints(line, live_s, similar, shown, first)
            found = likeness([air.jpeg.grey() for air in airs], [greys[column] for column in shown], hints)
            alike[:, shown] = found
            cells += _between(shown, _log_likelihood(found, PIXELS, MAX_PIXELS_ALIKE), width)
        return cls(first, cells, alike, similar, live_s, pictures, greys)

    def fit(self, line: ClaimedLine) -> _Fit:
        """The best line through all moments, or the best two of normal speed with a jump between them."""
        middle_s = float(self.live_s.mean())
        offsets = np.arange(-BESIDE_S, BESIDE_S + OFFSET_S / 2, OFFSET_S)
        speeds = _speeds(line.speed)
        totals = np.stack([self._along(line.at(middle_s), middle_s, speed, offsets).sum(axis=0) for speed in speeds])
        totals -= np.where(speeds == 1.0, 0.0, SPEED_COST)[:, None]
        tops = totals.max(axis=0)
        top = int(tops.argmax())
        speed, offset = float(speeds[int(totals[:, top].argmax())]), float(offsets[top])
        times_s = line.at(middle_s) + offset + speed * (self.live_s - middle_s)
        others = tops[np.abs(offsets - offset) >= min(OTHER_S)]
        straight = _Fit(times_s, float(tops[top] - others.max()) / len(self.live_s), self._level(times_s))
        return self._with_jump(line, middle_s, float(tops[top])) or straight

    def _with_jump(self, line: ClaimedLine, middle_s: float, to_beat: float) -> _Fit | None:
        """Two lines of normal speed, if they explain the moments better than one line did."""
        n = len(self.live_s)
        if n < 2 * MIN_PIECE + 2:
            return None
        reach_s = BESIDE_S + JUMP_S
        offsets = np.arange(-reach_s, reach_s + OFFSET_S / 2, OFFSET_S)
        sums = np.cumsum(self._along(line.at(middle_s), middle_s, 1.0, offsets), axis=0)
        best: tuple[float, int, int, int] | None = None
        for at in range(MIN_PIECE, n - MIN_PIECE + 1):
            before, after = int(sums[at - 1].argmax()), int((sums[-1] - sums[at - 1]).argmax())
            total = float(sums[at - 1, before] + sums[-1, after] - sums[at - 1, after]) - JUMP_COST
            if total > to_beat and abs(offsets[before] - offsets[after]) >= MIN_JUMP_S:
                best, to_beat = (total, at, before, after), total
        if best is None:
            return None
        _, at, before, after = best
        offset = np.where(np.arange(n) < at, offsets[before], offsets[after])
        times_s = line.at(middle_s) + offset + self.live_s - middle_s
        return _Fit(times_s, CERTAIN, self._level(times_s), at)

    def _level(self, times_s: NDArray[np.float64]) -> float:
        return float(np.median(self._at(np.arange(len(self.live_s)), times_s[:, None])))

    def pair(self, n: int, air: AirPicture, partner_s: float, fit: _Fit, place: str) -> tuple[Pair, float]:
        """The pair of a moment and how well it suits to be shown."""
        column = min(max(0, round(GRID * partner_s) - self.first), self.cells.shape[1] - 1)
        near = [one for one in self.pictures if abs(self.first + one - GRID * partner_s) <= GRID * PICTURE_S]
        if near:
            column = min(near, key=lambda one: (abs(self.first + one - GRID * partner_s), one))
        ref_s = (self.first + column) / GRID
        others = [partner_s + sign * aside for aside in OTHER_S for sign in (-1, 1)]
        values = self._at(np.array([n]), np.array([[partner_s, *others]]))[0]
        own = float(np.clip(values[0] - values[1:].max(), -10, 30))
        certainty = min(fit.margin, 20.0) + 0.3 * own
        is_inside = values[0] >= INSIDE * fit.level
        is_certain = bool(is_inside) and (certainty >= CERTAIN or self._looks_the_same(column))
        alike = max(0.0, float(self.alike[n, column])) + 0.5 * max(0.0, float(self.similar[n, column]))
        merit = min(certainty, 30.0) / 30 + alike - 0.5 * abs(partner_s - ref_s) - (not is_inside)
        return Pair(place, air, ref_s, self.pictures.get(column), is_certain), merit

    def _looks_the_same(self, column: int) -> bool:
        """Whether a viewer sees no difference between this picture of the reference and those a second beside it."""
        grey = self.greys.get(column)
        beside = [self.greys[at] for at in (column - GRID, column + GRID) if at in self.greys]
        if grey is None or not beside:
            return False
        return all(mean_difference(grey, other) < SAME_LEVELS for other in beside)

    def _along(self, ref_s: float, live_s: float, speed: float, offsets: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-likelihood of each moment on the lines at these offsets [air, offset]."""
        times_s = ref_s + offsets[None] + speed * (self.live_s - live_s)[:, None]
        return self._at(np.arange(len(self.live_s)), times_s) - ASIDE_COST * np.abs(offsets)

    def _at(self, airs: NDArray[np.int64], ref_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-likelihood at these times of the reference [air, time], between the grid's moments by interpolation."""
        places = np.clip(GRID * ref_s - self.first, 0, self.cells.shape[1] - 1.001)
        left = places.astype(np.int64)
        share = places - left
        rows = airs[:, None]
        return np.asarray((1 - share) * self.cells[rows, left] + share * self.cells[rows, left + 1])


def _needed_columns(partners_s: Sequence[float]) -> NDArray[np.int64]:
    """Numbers of the grid's moments near the claimed line, in order: a long copy needs only those near its pictures."""
    beside = BESIDE_S + JUMP_S + max(OTHER_S)
    needed: set[int] = set()
    for time_s in partners_s:
        needed.update(range(int(np.floor(GRID * (time_s - beside))), int(np.ceil(GRID * (time_s + beside))) + 1))
    return np.array(sorted(needed), np.int64)


def _reference_pictures(reference: ReferenceMoments, first: int, columns: NDArray[np.int64]) -> dict[int, bytes]:
    """The reference's pictures of these columns, those that exist, by column."""
    pictures = {}
    runs = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    for run in runs:
        for time_s, jpeg in reference.pictures((first + run[0]) / GRID, (first + run[-1] + 1) / GRID):
            pictures[round(GRID * time_s) - first] = jpeg
    return pictures


def _speeds(claimed: float) -> NDArray[np.float64]:
    near = claimed + np.arange(-NEAR_SPEED, NEAR_SPEED + 0.005, 0.01)
    known = [speed for speed in SPEEDS if abs(speed - claimed) < ANY_SPEED]
    speeds = np.unique(np.round(np.concatenate([[1.0], near, known]), 3))
    return np.asarray(speeds[speeds > 0])


def _log_likelihood(alike: NDArray[np.float64], n: float, highest: float) -> NDArray[np.float64]:
    """Of the correlations of n values, up to a constant."""
    return np.asarray(-0.5 * n * np.log(1 - np.clip(alike, 0, highest) ** 2))


def _between(columns: Sequence[int], cells: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Cells of these columns as all columns, those between by interpolation."""
    every = np.arange(width)
    return np.stack([np.interp(every, columns, row) for row in cells])


def _similarities(
    airs: Sequence[AirPicture], reference: ReferenceMoments, ref_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Similarity of the features [air, time]; a time between two seconds has the features between theirs."""
    if reference.rows is None or reference.informative is None or len(reference.rows) < 2:
        return np.zeros((len(airs), len(ref_s)))
    places = ref_s - 0.5  # a second's row is that of its middle
    left = np.clip(np.floor(places).astype(np.int64), 0, len(reference.rows) - 2)
    first, last = int(left.min()), int(left.max()) + 2
    rows = np.asarray(reference.rows[first:last], np.float32)
    rows = rows * np.asarray(reference.informative[first:last], np.float32)[:, None]
    share = np.clip(places - left, 0, 1)[:, None]
    between = (1 - share) * rows[left - first] + share * rows[left - first + 1]
    between /= np.maximum(np.linalg.norm(between, axis=1, keepdims=True), 1e-6)
    live = np.stack([np.zeros(rows.shape[1], np.float32) if air.row is None else air.row for air in airs])
    outside = (places < -0.5) | (places > len(reference.rows) - 0.5)
    return np.where(outside, 0.0, live.astype(np.float64) @ between.T)


def _hints(
    line: ClaimedLine,
    live_s: NDArray[np.float64],
    similar: NDArray[np.float64],
    columns: Sequence[int],
    first: int,
) -> list[tuple[int, list[int]]]:
    """Some moments of the channel, each with the pictures (places in `columns`) that are near its partner."""
    ref_s = (first + np.arange(similar.shape[1])) / GRID
    found = []
    for n, time_s in enumerate(live_s.tolist()):
        near = np.abs(ref_s - line.at(time_s)) <= BESIDE_S
        if not near.any():
            continue
        top = int(np.where(near, similar[n], -1.0).argmax())
        if similar[n].any():
            places = [at for at, column in enumerate(columns) if abs(column - top) <= HINT_S * GRID]
        else:  # without features, all that is near the line
            places = [at for at, column in enumerate(columns) if near[column]]
        if places:
            found.append((float(similar[n, top]), n, places))
    found.sort(key=lambda one: (-one[0], one[1]))
    return [(n, places) for _, n, places in found[:N_HINTS]]
