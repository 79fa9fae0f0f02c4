"""Ambiguity: the other places of a reference that explain a copy as well as the place that was found.

A refined segment comes in, with the stream's rows and the reference's; spans of the reference come out, none if the
place is certain. It is uncertain if another line matches the stream about as well, or if the reference repeats itself
there: a loop whose length is no whole number of seconds may match best at the wrong repeat, because one picture a
second shows each repeat at another phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monitor.matching.stitching import SegmentView
from reference_db.search.feature_rows import ReferenceRows

MAX_SECONDS = 40  # newest seconds of the segment that are compared
REACH_S = 512  # how far around the segment's place others are looked for
MIN_S = 4  # a shorter segment is not examined
MIN_SHIFT_S = 3  # another place is at least this far away, and a third of the segment's length
INSIDE = 0.8  # of a line that must lie in informative seconds of the reference
UNDECIDED = 0.05  # of similarity plus its change: places closer than this cannot be distinguished (copies of films that
# do not repeat themselves win by 0.07 or more, loops by 0.03 or less)
REPEATS, ALIKE = 0.6, 0.6  # correlation of changes and similarity of two places of a reference that repeat each other
AS_GOOD, AS_REPEATING = 0.1, 0.4  # what a place of an ambiguous segment needs to be listed
MAX_PLACES = 16


def alternatives(
    view: SegmentView,
    lives: Mapping[int, NDArray[np.float32]],
    rows: ReferenceRows,
    informative: NDArray[np.bool_],
) -> tuple[tuple[float, float], ...]:
    """Spans of the reference, besides the claimed one, that the seconds in `lives` fit as well; best first."""
    seconds = range(math.ceil(view.live_start_s), math.ceil(view.live_end_s))
    seen = np.array([second for second in seconds if second in lives][-MAX_SECONDS:], np.int64)
    if len(seen) < MIN_S:
        return ()
    places = _Places.of(view, seen, np.stack([lives[second] for second in seen.tolist()]), rows, informative)
    if places is None or not places.is_ambiguous:
        return ()
    return tuple(
        (round(view.ref_start_s + shift, 1), round(view.ref_end_s + shift, 1))
        for shift in places.shifts_of_others()
        if view.ref_start_s + shift >= 0 and view.ref_end_s + shift <= len(rows)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The claimed line shifted along the reference: how well each shift matches, and repeats the claimed place."""

    shifts: NDArray[np.int64]
    fits: NDArray[np.float32]  # similarity to the stream, plus the part of it that changes
    own_fit: float
    repeats: NDArray[np.bool_]
    may_repeat: NDArray[np.bool_]
    apart_s: float

    @classmethod
    def of(
        cls,
        view: SegmentView,
        seen: NDArray[np.int64],
        lives: NDArray[np.float32],
        rows: ReferenceRows,
        informative: NDArray[np.bool_],
    ) -> _Places | None:
        speed = (view.ref_end_s - view.ref_start_s) / (view.live_end_s - view.live_start_s)
        line = np.floor(view.ref_start_s + speed * (seen - view.live_start_s) + 0.5).astype(np.int64)
        first, last = max(0, int(line.min()) - REACH_S), min(len(rows), int(line.max()) + 1 + REACH_S)
        line = np.clip(line, first, last - 1) - first
        near, counts = rows[first:last], informative[first:last]
        shifts = np.arange(-int(line.max()), last - first - int(line.min()))
        columns = line + shifts[:, None]
        inside = (columns >= 0) & (columns < last - first)
        columns = np.clip(columns, 0, last - first - 1)
        inside &= counts[columns]
        usable = (inside.mean(axis=1) >= INSIDE) | (shifts == 0)
        shifts, columns, inside = shifts[usable], columns[usable], inside[usable]
        live_cells, ref_cells = lives @ near.T, near[line] @ near.T
        fits = _along(2 * live_cells - live_cells.mean(axis=0), columns, inside)
        alike = _along(ref_cells, columns, inside)
        is_alike = alike >= ALIKE
        moving = np.where(is_alike, _along(ref_cells - ref_cells.mean(axis=0), columns, inside), np.float32(0))
        own_energy = _energy(near[line])
        for at in np.flatnonzero(is_alike).tolist():
            moving[at] /= math.sqrt(max(own_energy * _energy(near[columns[at]]), 1e-6))
        apart_s = max(MIN_SHIFT_S, (view.ref_end_s - view.ref_start_s) / 3)
        own_fit = float(fits[int(np.flatnonzero(shifts == 0)[0])])
        far = np.abs(shifts) >= apart_s
        if not far.any():
            return None
        return cls(
            shifts[far],
            fits[far],
            own_fit,
            (is_alike & (moving >= REPEATS))[far],
            (is_alike & (moving >= AS_REPEATING))[far],
            apart_s,
        )

    @property
    def is_ambiguous(self) -> bool:
        return bool(self.repeats.any() or self.fits.max() >= self.own_fit - UNDECIDED)

    def shifts_of_others(self) -> list[int]:
        """The shifts to list, best first; of neighbours the best."""
        listed = (self.fits >= self.own_fit - AS_GOOD) | self.may_repeat
        chosen: list[int] = []
        for at in np.argsort(-self.fits, kind="stable").tolist():
            shift = int(self.shifts[at])
            if listed[at] and all(abs(shift - other) >= self.apart_s for other in chosen):
                chosen.append(shift)
        return chosen[:MAX_PLACES]


def _along(cells: NDArray[np.float32], columns: NDArray[np.int64], inside: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The mean of the cells [live, ref] along each line of columns [shift, live], where it lies inside."""
    values = np.where(inside, cells[np.arange(cells.shape[0]), columns], np.float32(0))
    return np.asarray(values.sum(axis=1) / np.maximum(inside.sum(axis=1), 1))


def _energy(rows: NDArray[np.float32]) -> float:
    """Mean squared distance of unit rows from their mean."""
    mean = rows.mean(axis=0)
    return 1.0 - float(mean @ mean)
