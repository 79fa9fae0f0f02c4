"""Slow, obviously correct versions: loops over whole matrices, one line of the paper at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_BLIND = 8
STEPS = {0: (1, 1), 1: (0, 1), 2: (1, 0)}


@dataclass
class WholePath:
    """A path of the whole matrix: its start cell, its members and their similarity x mask."""

    start: tuple[int, int]
    members: list[tuple[int, int]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def align_whole(
    similarity: NDArray[np.float32],
    mask: NDArray[np.float32],
    step: NDArray[np.uint8],
    counts: NDArray[np.bool_],
    tau: float,
    sigma: float,
    *,
    by_diagonal: bool = False,
) -> list[WholePath]:
    """Algorithm 1 on a whole matrix [M, N] with steps [M-1, N-1]; starts by row, or by i+j as the paper has it."""
    height, width = similarity.shape
    starts = {(i, j) for i in range(height) for j in range(width) if mask[i, j] > tau and counts[i, j]}
    paths = []
    while starts:
        i, j = min(starts, key=lambda cell: (sum(cell), cell) if by_diagonal else (0, cell))
        path, misses, blind = WholePath((i, j)), 0, 0
        while i < height and j < width and misses < 3 and blind <= MAX_BLIND:
            here = float(similarity[i, j]) * float(mask[i, j])
            direction = 0
            if not counts[i, j]:
                blind += 1
            else:
                blind = 0
                if here < sigma:
                    misses += 1
                else:
                    misses = 0
                    path.members.append((i, j))
                    path.weights.append(here)
                direction = int(step[i, j]) if i < height - 1 and j < width - 1 else 0
            starts -= {(i + di, j + dj) for di in (-1, 0, 1) for dj in (-1, 0, 1)}
            if i == height - 1 or j == width - 1:
                break
            i, j = i + STEPS[direction][0], j + STEPS[direction][1]
        if path.members:
            paths.append(path)
    return paths


@dataclass
class Walk(WholePath):
    """A path of a planned matrix. It ended in `end_row`; a path at the border of the stream has none."""

    end_row: int | None = None


def align_planned(
    similarity: NDArray[np.float32],
    mask: NDArray[np.float32],
    step: NDArray[np.uint8],
    counts: NDArray[np.bool_],
    planned: NDArray[np.bool_],
    tau: float,
    sigma: float,
) -> list[Walk]:
    """`align_whole` where a path also ends as soon as it leaves the plan: the cells that were read."""
    height, width = similarity.shape
    free = {(i, j) for i in range(height) for j in range(width) if mask[i, j] > tau and counts[i, j] and planned[i, j]}
    walks = []
    while free:
        i, j = min(free)
        walk, misses, blind = Walk((i, j)), 0, 0
        while walk.end_row is None and i < height:
            if not planned[i, j]:
                walk.end_row = i
                break
            free -= {(i + di, j + dj) for di in (-1, 0, 1) for dj in (-1, 0, 1)}
            direction = int(step[i, j]) if i < height - 1 and j < width - 1 else None
            if not counts[i, j]:
                blind += 1
                direction = None if direction is None else 0
            else:
                here = float(similarity[i, j]) * float(mask[i, j])
                blind, misses = 0, misses + 1 if here < sigma else 0
                if here >= sigma:
                    walk.members.append((i, j))
                    walk.weights.append(here)
            if misses == 3 or blind > MAX_BLIND or j == width - 1:
                walk.end_row = i
            if direction is None:
                break  # the border of the stream
            i, j = i + STEPS[direction][0], j + STEPS[direction][1]
        if walk.members:
            walks.append(walk)
    return walks
