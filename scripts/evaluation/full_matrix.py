"""Full matrices: two complete recordings compared at once, as in the paper.

The maps are those of the full matrix. Paths come from the live tracker or, for comparison, start in the paper's order,
by smallest i + j. Cells without information have similarity 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.recordings import Recording
from monitor.ingest.feature_windows import FeatureWindow, LiveSecond
from monitor.matching.mask_step import MaskStepNet
from monitor.matching.matcher import MatchParameters
from monitor.matching.paths import MAX_BLIND, MAX_MISSES, AlignmentPath, PathTracker
from monitor.matching.stitching import PathState, SegmentView, Stitcher
from monitor.matching.tiles import DOWN, GRAIN, HALO, NO_STEP, RIGHT, RIGHT_DOWN, MapRow
from reference_db.store.catalog import ReferenceId

BLOCK_ROWS = 512  # rows per call of the network
MOVES = {RIGHT_DOWN: (1, 1), RIGHT: (0, 1), DOWN: (1, 0)}


@dataclass(frozen=True, slots=True, eq=False)
class FullMatrix:
    """Every second of one recording against every second of another."""

    reference: ReferenceId
    lives: tuple[LiveSecond, ...]
    reference_rows: NDArray[np.float32]
    similarity: NDArray[np.float32]  # [live, ref]
    counts: NDArray[np.bool_]  # [live, ref]: both sides are known and informative


@dataclass(frozen=True, slots=True, eq=False)
class FullMaps:
    """The maps of a full matrix."""

    mask: NDArray[np.float32]  # [live, ref]
    step: NDArray[np.uint8]  # [live, ref]; the last row and column are NO_STEP


def compare(live: Recording, ref: Recording) -> FullMatrix:
    """The matrix of two recordings."""
    window = FeatureWindow(len(live.rows) + 1)
    for second in np.flatnonzero(live.seen).tolist():
        informative = bool(live.informative[second])
        window.push(second, live.rows[second], informative, live.is_held(second), live.age_s(second))
    lives = tuple(window)
    at = [second.second for second in lives]
    counts = np.array([second.counts for second in lives])[:, None] & ref.informative[None]
    similarity = np.round(live.rows[at] @ ref.rows.T * GRAIN) / GRAIN
    return FullMatrix(ReferenceId(ref.name), lives, ref.rows, (similarity * counts).astype(np.float32), counts)


def read_maps(net: MaskStepNet, similarity: NDArray[np.float32]) -> FullMaps:
    """Mask and step of a full matrix, computed in blocks of rows whose halo makes the result independent of them."""
    n_rows, n_columns = similarity.shape
    mask = np.zeros((n_rows, n_columns), np.float32)
    step = np.full((n_rows, n_columns), NO_STEP, np.uint8)
    for first in range(0, n_rows, BLOCK_ROWS):
        last = min(n_rows, first + BLOCK_ROWS)
        top, bottom = max(0, first - HALO), min(n_rows, last + HALO)
        with torch.inference_mode():
            mask_logits, step_logits = net(torch.from_numpy(similarity[top:bottom].copy())[None, None])
            probability = torch.sigmoid(mask_logits[0, 1] - mask_logits[0, 0]).numpy()
            directions = step_logits[0].argmax(0).to(torch.uint8).numpy()
        mask[first:last] = probability[first - top : last - top]
        steps = directions[first - top : last - top]
        step[first : first + len(steps), : n_columns - 1] = steps
    return FullMaps(mask, step)


def crop(matrix: FullMatrix, maps: FullMaps, rows: slice, columns: slice) -> tuple[FullMatrix, FullMaps]:
    """A block of matrix and maps; its columns count from 0."""
    return (
        FullMatrix(
            matrix.reference,
            matrix.lives[rows],
            matrix.reference_rows[columns],
            matrix.similarity[rows, columns],
            matrix.counts[rows, columns],
        ),
        FullMaps(maps.mask[rows, columns], maps.step[rows, columns]),
    )


def walk(matrix: FullMatrix, maps: FullMaps, matching: MatchParameters) -> list[AlignmentPath]:
    """The paths of the live tracker for all rows."""
    tracker = PathTracker(matching.tau, matching.sigma)
    paths = []
    for row in _rows(matrix, maps):
        paths += tracker.push(row)
    return paths + tracker.finish()


def stitch(matrix: FullMatrix, maps: FullMaps, matching: MatchParameters) -> list[SegmentView]:
    """The closed segments of the live tracker and stitcher for all rows."""
    tracker = PathTracker(matching.tau, matching.sigma)
    stitcher = Stitcher(matching.scoring, lambda _: matrix.reference_rows)
    closed: list[SegmentView] = []
    second = 0
    for row in _rows(matrix, maps):
        second = row.live_s
        states = [PathState(matrix.reference, path, path, False) for path in tracker.push(row)]
        states += [PathState(matrix.reference, path, path, True) for path in tracker.open_paths()]
        closed += [view for view in stitcher.push(second, states) if not view.is_open]
    states = [PathState(matrix.reference, path, path, False) for path in tracker.finish()]
    closed += [view for view in stitcher.push(second, states) if not view.is_open]
    return closed + stitcher.finish()


def walk_by_diagonal(matrix: FullMatrix, maps: FullMaps, matching: MatchParameters) -> list[AlignmentPath]:
    """The paths of Algorithm 1 with starts in the order of i + j, as in the paper."""
    if not matrix.lives:
        return []
    weights = matrix.similarity.astype(np.float64) * maps.mask
    free = (maps.mask > matching.tau) & matrix.counts
    starts = np.argwhere(free)
    paths = []
    for i, j in starts[np.lexsort((starts[:, 0], starts.sum(axis=1)))].tolist():
        if free[i, j]:
            members = _walk_from(i, j, weights, maps.step, matrix.counts, free, matching.sigma)
            if members:
                paths.append(_path_of((i, j), members, weights, matrix.lives))
    return paths


def _rows(matrix: FullMatrix, maps: FullMaps) -> list[MapRow]:
    return [
        MapRow(live.second, 0, matrix.similarity[i], maps.mask[i], maps.step[i], matrix.counts[i], live.novelty)
        for i, live in enumerate(matrix.lives)
    ]


def _walk_from(
    i: int,
    j: int,
    weights: NDArray[np.float64],
    step: NDArray[np.uint8],
    counts: NDArray[np.bool_],
    free: NDArray[np.bool_],
    sigma: float,
) -> list[tuple[int, int]]:
    """The members of the path from a start; removes the starts beside it."""
    members, misses, blind = [], 0, 0
    while True:
        free[max(0, i - 1) : i + 2, max(0, j - 1) : j + 2] = False
        direction = int(step[i, j])
        if not counts[i, j]:
            blind += 1
            direction = direction if direction == NO_STEP else RIGHT_DOWN
        elif weights[i, j] >= sigma:
            blind = misses = 0
            members.append((i, j))
        else:
            blind, misses = 0, misses + 1
        if direction == NO_STEP or misses >= MAX_MISSES or blind > MAX_BLIND:
            return members
        i, j = i + MOVES[direction][0], j + MOVES[direction][1]


def _path_of(
    start: tuple[int, int],
    members: list[tuple[int, int]],
    weights: NDArray[np.float64],
    lives: tuple[LiveSecond, ...],
) -> AlignmentPath:
    first_s = lives[0].second
    cells = np.array(members)
    away = (cells - np.array(start)).astype(np.float64)
    rows = np.unique(cells[:, 0]).tolist()
    return AlignmentPath(
        (start[0] + first_s, start[1]),
        (members[0][0] + first_s, members[0][1]),
        (members[-1][0] + first_s, members[-1][1]),
        len(members),
        len(rows),
        float(weights[cells[:, 0], cells[:, 1]].sum()),
        sum(lives[row].novelty for row in rows),
        (
            float(away[:, 0].sum()),
            float(away[:, 1].sum()),
            float((away[:, 0] ** 2).sum()),
            float((away[:, 0] * away[:, 1]).sum()),
        ),
        tuple((i + first_s, j) for i, j in members),
    )
