"""Literal transcriptions of the paper's equations, to compare the fast code with."""

from __future__ import annotations

import math
from collections.abc import Sequence

Cell = tuple[int, int]


def paths(live_ids: Sequence[int], ref_ids: Sequence[int]) -> set[Cell]:
    """R = {(i, j) : i' = j'}; a negative id is a frame without an original."""
    return {(i, j) for i, a in enumerate(live_ids) for j, b in enumerate(ref_ids) if a == b and a >= 0}


def next_cell(i: int, j: int, category: int) -> Cell:
    """C_l(i, j) for l = right-down, right, down."""
    return {0: (i + 1, j + 1), 1: (i, j + 1), 2: (i + 1, j)}[category]


def responsible_targets(r: set[Cell], height: int, width: int) -> set[tuple[int, int, int]]:
    """Q, over the cells of the step map."""
    q = set()
    for i in range(height - 1):
        for j in range(width - 1):
            for category in range(3):
                is_on_path = next_cell(i, j, category) in r
                if category == 0 and is_on_path:
                    q.add((i, j, 0))
                if category != 0 and is_on_path and next_cell(i, j, 0) not in r:
                    q.add((i, j, category))
    return q


def target_probability(q: set[tuple[int, int, int]], i: int, j: int, category: int) -> float:
    """d^l_{i,j}."""
    if (i, j, category) not in q:
        return 0.0
    if category > 0 and (i, j, 1) in q and (i, j, 2) in q:
        return 0.5
    return 1.0


def softmax(logits: Sequence[float]) -> list[float]:
    exps = [math.exp(x) for x in logits]
    return [x / sum(exps) for x in exps]


def mask_loss(y: Sequence[Sequence[Sequence[float]]], r: set[Cell]) -> float:
    """L_m of one pair from probabilities y[class][i][j]."""
    height, width = len(y[0]), len(y[0][0])
    total = 0.0
    for i in range(height):
        for j in range(width):
            total += math.log(y[1][i][j]) if (i, j) in r else math.log(y[0][i][j])
    return -total / (height * width)


def step_loss(z: Sequence[Sequence[Sequence[float]]], q: set[tuple[int, int, int]]) -> float:
    """L_s of one pair from probabilities z[class][i][j]."""
    above = sum(math.log(z[c][i][j]) * target_probability(q, i, j, c) for i, j, c in q)
    below = sum(target_probability(q, i, j, c) for i, j, c in q)
    return -above / below
