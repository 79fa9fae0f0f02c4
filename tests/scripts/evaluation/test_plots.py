"""Plots: the four panels, the path and the true copy are drawn at their places."""

from __future__ import annotations

import numpy as np
import torch

from evaluation.full_matrix import compare, read_maps, walk
from evaluation.plots import MARGIN, PATH, STEP_COLOURS, TRUTH, draw_alignment
from monitor.matching.matcher import MatchParameters
from monitor.matching.tiles import RIGHT_DOWN
from tests.support.planted_features import channel, cut, film, plain_net

torch.set_num_threads(1)


def test_the_sheet_has_four_panels_with_the_path_on_the_last() -> None:
    ref = film("film", 40, 1)
    live = channel("ch0", [film("x", 10, 5), cut(ref, 10, 30), film("y", 10, 6)])
    matrix = compare(live, ref)
    maps = read_maps(plain_net(), matrix.similarity)
    sheet = draw_alignment(matrix, maps, walk(matrix, maps, MatchParameters()), (10, 10, 30, 30), "found")
    pixels = np.asarray(sheet)
    zoom = 8
    width = 40 * zoom + MARGIN
    assert pixels.shape == (40 * zoom + 3 * MARGIN, 4 * width + MARGIN, 3)

    def at(panel: int, live_s: float, ref_s: float) -> tuple[int, ...]:
        pixel = pixels[int(2 * MARGIN + live_s * zoom), int(MARGIN + panel * width + ref_s * zoom)]
        return tuple(int(level) for level in pixel)

    assert at(0, 20.2, 20.2) == (255, 255, 255)  # similarity 1 on the diagonal
    assert sum(at(0, 20.2, 30.2)) < 150
    assert at(2, 20.2, 25.2) == STEP_COLOURS[RIGHT_DOWN]
    assert at(3, 20.5, 20.5) == PATH
    assert at(3, 20.5, 26.5) != PATH
    for panel in range(4):
        assert at(panel, 10, 20) == TRUTH
