"""Hough voting: the baseline in the first row of the paper's tables. A similarity matrix in, segments out.

Cells that are similar enough vote for the offset between their two sides. The offset with most votes is taken, its
cells are cut into runs, and their neighbourhood no longer votes; then the next. A copy at another speed has no single
offset, so it is split or missed: the step map handles that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monitor.matching.paths import soft_weight

OFFSET_SLACK = 1  # an offset is voted for by cells this far off it, since the two sides are never in phase
MAX_GAP_S = 8  # seconds without a vote within one segment
MAX_SEGMENTS = 32  # of one matrix: a static scene has as many offsets as seconds
MIN_SECONDS = 3  # hard weight: a shorter segment is dropped


@dataclass(frozen=True, slots=True)
class HoughSegment:
    """A run of cells at one offset. Spans are half-open rows (live) and columns (ref) of the matrix."""

    live_start: int
    live_end: int
    ref_start: int
    ref_end: int
    n_cells: int
    mean_similarity: float

    @property
    def shorter_side(self) -> int:
        return min(self.live_end - self.live_start, self.ref_end - self.ref_start)

    def score(self, gamma: float | None) -> float:
        """Mean similarity by soft weight, or with gamma None by hard weight: 0 when too short."""
        if gamma is None:
            return self.mean_similarity if self.shorter_side >= MIN_SECONDS else 0.0
        return self.mean_similarity * soft_weight(self.shorter_side, gamma)


def hough_segments(
    similarity: NDArray[np.float32], counts: NDArray[np.bool_], min_similarity: float
) -> list[HoughSegment]:
    """The segments of a matrix [live, ref], strongest offset first; only cells that count may vote."""
    live, ref = np.nonzero((similarity >= min_similarity) & counts)
    weights = similarity[live, ref].astype(np.float64)
    offset = ref - live + similarity.shape[0] - 1  # from 0 on
    n_offsets = sum(similarity.shape) - 1
    free = np.ones(len(live), bool)
    segments: list[HoughSegment] = []
    while free.any() and len(segments) < MAX_SEGMENTS:
        votes = np.convolve(np.bincount(offset[free], weights[free], n_offsets), np.ones(2 * OFFSET_SLACK + 1), "same")
        near = free & (np.abs(offset - int(np.argmax(votes))) <= OFFSET_SLACK)
        found = _runs(live[near], ref[near], weights[near])
        segments += found
        free &= ~near
        for segment in found:
            free &= ~_beside(live, ref, segment)
    return segments[:MAX_SEGMENTS]


def _runs(live: NDArray[np.int64], ref: NDArray[np.int64], weights: NDArray[np.float64]) -> list[HoughSegment]:
    """The cells of one offset, the best of each row, cut at gaps longer than MAX_GAP_S."""
    order = np.lexsort((-weights, live))
    live, ref, weights = live[order], ref[order], weights[order]
    first_of_row = np.concatenate([[True], live[1:] != live[:-1]])
    live, ref, weights = live[first_of_row], ref[first_of_row], weights[first_of_row]
    cuts = np.flatnonzero(np.diff(live) > MAX_GAP_S) + 1
    return [
        HoughSegment(
            int(rows[0]), int(rows[-1]) + 1, int(columns.min()), int(columns.max()) + 1, len(rows), float(w.mean())
        )
        for rows, columns, w in zip(np.split(live, cuts), np.split(ref, cuts), np.split(weights, cuts), strict=True)
    ]


def _beside(live: NDArray[np.int64], ref: NDArray[np.int64], segment: HoughSegment) -> NDArray[np.bool_]:
    """Which cells lie within a segment's rows and columns: they show the same copy again."""
    in_rows = (live >= segment.live_start) & (live < segment.live_end)
    return in_rows & (ref >= segment.ref_start) & (ref < segment.ref_end)
