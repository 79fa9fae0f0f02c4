"""How alike pictures of a channel and of a reference are, pixel by pixel, whatever edit lies between them.

An edit moves the film within the picture and draws over it, in the same way for the whole copy: bars around it, a crop,
a mirror image, a logo, a ticker. So one placement of the reference's picture in the channel's is searched for the whole
copy, from some pairs whose times are known to about a second, and pixels that differ in most of these pairs count less.
Then a moving film shows by its pixels which of two reference pictures half a second apart is on air.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from reference_db.features.borders import inner_box

WORK = (54, 96)  # height and width at which pictures are placed
COMPARED = (27, 48)  # at which they are compared: coarser than compression, noise and small text
COARSE = (18, 32)  # at which the first placement is searched
COARSE_SCALES = (1.0, 0.9, 0.8, 0.7)  # shares of the reference's sides that are visible
STEPS = (0.05, 0.025, 0.0125)  # by which the placement is improved
TRIES = 3  # moves at each step
SCALE_COST, SHIFT_COST = 0.05, 0.1  # of likeness that a placement must win by, for each whole side
BOX_WINS = 0.01  # of likeness that another box must win by
BARS_SHARE = 0.2  # of the pictures must have the same bars
MIN_BAR = 0.015  # of a side; a thinner bar is not worth a search

Box = tuple[int, int, int, int]  # top, left, bottom, right


@dataclass(frozen=True, slots=True)
class _Placement:
    """Which part of the reference's picture is visible; scales are shares of its sides, shifts are in half sides."""

    flip: float = 1.0
    scale_x: float = 1.0
    scale_y: float = 1.0
    shift_x: float = 0.0
    shift_y: float = 0.0

    @property
    def cost(self) -> float:
        scales = abs(self.scale_x - 1) + abs(self.scale_y - 1)
        return SCALE_COST * scales + SHIFT_COST * (abs(self.shift_x) + abs(self.shift_y))

    def neighbours(self, step: float) -> list[_Placement]:
        """This placement, and those one step away."""
        near = [self]
        for way in (-step, step):
            near += [
                replace(self, scale_x=self.scale_x + way),
                replace(self, scale_y=self.scale_y + way),
                replace(self, shift_x=self.shift_x + way),
                replace(self, shift_y=self.shift_y + way),
                replace(self, scale_x=self.scale_x + way, scale_y=self.scale_y + way),
            ]
        return near


def likeness(
    airs: Sequence[NDArray[np.uint8]],
    refs: Sequence[NDArray[np.uint8]],
    hints: Sequence[tuple[int, Sequence[int]]],
) -> NDArray[np.float64]:
    """Correlation of every grey picture of the channel with every one of the reference [air, ref], -1 to 1.

    Pictures of one side have one shape. `hints` names some pictures of the channel, each with the pictures of the
    reference among which its partner is; without any, every correlation is 0.
    """
    if not hints or not airs or not refs:
        return np.zeros((len(airs), len(refs)))
    pairs = _Pairs([air for air, _ in hints], [list(near) for _, near in hints])
    best: tuple[float, _Placement, torch.Tensor, torch.Tensor] | None = None
    height, width = refs[0].shape
    for air_box, ref_box in product(_boxes(airs, width / height), _boxes(refs)):
        air, ref = _cut(airs, air_box), _cut(refs, ref_box)
        placements = _coarse_placements()
        scores = pairs.scores(placements, _resize(air, COARSE), ref, COARSE, None)
        top = int(scores.argmax())
        if best is None or scores[top] > best[0] + BOX_WINS:
            best = float(scores[top]), placements[top], air, ref
    assert best is not None
    _, placement, air, ref = best
    small, weights = _resize(air, COMPARED), None
    for step in STEPS:
        placement = _improved(pairs, placement, step, small, ref, weights)
        weights = pairs.weights(placement, small, ref)
    return np.asarray(_unit(small, weights) @ _unit(_placed(ref, placement, COMPARED), weights).T, np.float64)


def mean_difference(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Of two grey pictures of one shape, in levels, at the size at which pictures are compared."""
    full = (0, 0, *one.shape)
    pair = _resize(_cut([one, other], (full[0], full[1], full[2], full[3])), COMPARED)
    return float((pair[0] - pair[1]).abs().mean())


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Pictures of the channel, and for each the pictures of the reference among which its partner is."""

    airs: list[int]
    near: list[list[int]]

    def scores(
        self,
        placements: Sequence[_Placement],
        air: torch.Tensor,
        ref: torch.Tensor,
        size: tuple[int, int],
        weights: torch.Tensor | None,
    ) -> NDArray[np.float64]:
        """For each placement, the median of the pairs' likeness, less its cost."""
        needed = sorted({n for near in self.near for n in near})
        place = {n: at for at, n in enumerate(needed)}
        shown, air_rows = _resize(ref[needed], (2 * size[0], 2 * size[1])), _unit(air[self.airs], weights)
        scores = []
        for placement in placements:
            cells = air_rows @ _unit(_placed(shown, placement, size), weights).T
            tops = [cells[at, [place[n] for n in near]].max() for at, near in enumerate(self.near)]
            scores.append(float(torch.stack(tops).median()) - placement.cost)
        return np.array(scores)

    def weights(self, placement: _Placement, air: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
        """A weight for each pixel; low where most pairs differ: something is drawn over the film there."""
        airs, refs = _unit(air[self.airs], None), _unit(_placed(ref, placement, COMPARED), None)
        cells = airs @ refs.T
        partners = [near[int(cells[at, near].argmax())] for at, near in enumerate(self.near)]
        squares = ((airs - refs[partners]) ** 2).median(dim=0).values
        weights = 1 / (1 + squares / (4 * squares.median().clamp_min(1e-8)))
        return weights / weights.mean()


def _improved(
    pairs: _Pairs,
    placement: _Placement,
    step: float,
    air: torch.Tensor,
    ref: torch.Tensor,
    weights: torch.Tensor | None,
) -> _Placement:
    """The placement after some moves by this step, each to the best neighbour."""
    for _ in range(TRIES):
        near = placement.neighbours(step)
        top = int(pairs.scores(near, air, ref, COMPARED, weights).argmax())
        if top == 0:
            break
        placement = near[top]
    return placement


def _coarse_placements() -> list[_Placement]:
    """Each visible share of both sides, in the middle and at the borders, and mirrored."""
    placements = []
    for flip, scale_x, scale_y in product((1.0, -1.0), COARSE_SCALES, COARSE_SCALES):
        for x, y in product(sorted({0.0, 1 - scale_x, scale_x - 1}), sorted({0.0, 1 - scale_y, scale_y - 1})):
            placements.append(_Placement(flip, scale_x, scale_y, x, y))
    return placements


def _boxes(pictures: Sequence[NDArray[np.uint8]], aspect: float | None = None) -> list[Box]:
    """Where the film may lie: in the whole picture, between its bars, or fitted with this aspect ratio."""
    height, width = pictures[0].shape
    whole = (0, 0, height, width)
    boxes = [whole]
    found = Counter(inner_box(np.repeat(picture[:, :, None], 3, axis=2)) for picture in pictures)
    del found[whole]
    if found:
        box, n = found.most_common(1)[0]
        boxes += [box] if n >= BARS_SHARE * len(pictures) else []
    if aspect is not None:
        fit_x, fit_y = min(width, height * aspect), min(height, width / aspect)
        top, left = round((height - fit_y) / 2), round((width - fit_x) / 2)
        if top > MIN_BAR * height or left > MIN_BAR * width:
            boxes.append((top, left, height - top, width - left))
    return boxes


def _cut(pictures: Sequence[NDArray[np.uint8]], box: Box) -> torch.Tensor:
    """This part of the pictures at the size of work [picture, height, width]."""
    top, left, bottom, right = box
    part = np.stack(pictures)[:, top:bottom, left:right].astype(np.float32)
    return _resize(torch.from_numpy(part), WORK)


def _resize(pictures: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    larger = pictures.shape[-2] >= size[0] and pictures.shape[-1] >= size[1]
    return functional.interpolate(pictures[:, None], size, mode="area" if larger else "bilinear")[:, 0]


def _placed(ref: torch.Tensor, placement: _Placement, size: tuple[int, int]) -> torch.Tensor:
    """The pictures of the reference as the channel shows them [picture, height, width]."""
    down = _sampling(size[0], ref.shape[-2], placement.scale_y, placement.shift_y)
    across = _sampling(size[1], ref.shape[-1], placement.flip * placement.scale_x, placement.shift_x)
    return down @ ref @ across.T


@lru_cache(maxsize=4096)
def _sampling(n_shown: int, n: int, scale: float, shift: float) -> torch.Tensor:
    """The matrix [shown, all] that samples lines of a picture, between two lines by interpolation."""
    middles = (2 * torch.arange(n_shown, dtype=torch.float64) + 1) / n_shown - 1  # from -1 to 1
    places = (((scale * middles + shift + 1) * n - 1) / 2).clamp(0, n - 1)
    left = places.floor().clamp(max=n - 2).long()
    share = places - left
    matrix = torch.zeros(n_shown, n, dtype=torch.float64)
    lines = torch.arange(n_shown)
    matrix[lines, left] = 1 - share
    matrix[lines, left + 1] += share
    return matrix.float()


def _unit(pictures: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Each picture as a row of mean 0 and length 1, under these weights of its pixels."""
    rows = pictures.flatten(1)
    if weights is None:
        rows = rows - rows.mean(dim=1, keepdim=True)
    else:
        rows = (rows - (rows * weights).sum(dim=1, keepdim=True) / weights.sum()) * weights.sqrt()
    lengths: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / lengths.clamp_min(1e-3)
