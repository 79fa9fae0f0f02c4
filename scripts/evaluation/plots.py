"""Plots of an alignment: the similarity matrix, the mask map, the step map and the paths, side by side in one picture.

Channel time runs down, reference time to the right. The rectangle is the true copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from evaluation.full_matrix import FullMaps, FullMatrix
from monitor.matching.paths import AlignmentPath
from monitor.matching.tiles import DOWN, RIGHT, RIGHT_DOWN

PANEL_SIDE = 360  # pixels of the longer side of a matrix, at most
MARGIN = 24
STEP_COLOURS = {RIGHT_DOWN: (240, 220, 60), RIGHT: (60, 20, 80), DOWN: (40, 160, 110)}  # as in the paper's figure
TRUTH, PATH = (80, 160, 255), (255, 60, 60)

Colours = NDArray[np.uint8]  # [live, ref, 3]
Box = tuple[float, float, float, float]  # live start, ref start, live end, ref end in cells


def draw_alignment(
    matrix: FullMatrix, maps: FullMaps, paths: Sequence[AlignmentPath], truth: Box | None, title: str
) -> Image.Image:
    """The picture; paths are in stream seconds, `truth` in cells of the matrix."""
    panels = {
        "similarity": _heat(matrix.similarity),
        "mask": _heat(maps.mask),
        "step": _steps(maps.step),
        "paths": _heat(matrix.similarity * maps.mask),
    }
    n_rows, n_columns = matrix.similarity.shape
    zoom = max(1, min(8, PANEL_SIDE // max(n_rows, n_columns)))
    width, height = n_columns * zoom, n_rows * zoom
    sheet = Image.new("RGB", (4 * (width + MARGIN) + MARGIN, height + 3 * MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(12)
    draw.text((MARGIN, 5), title, "black", font)
    for number, (name, colours) in enumerate(panels.items()):
        left, top = MARGIN + number * (width + MARGIN), 2 * MARGIN
        panel = Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)
        sheet.paste(panel, (left, top))
        draw.text((left, top - 16), name, "black", font)
        if truth is not None:
            live_start, ref_start, live_end, ref_end = (value * zoom for value in truth)
            draw.rectangle((left + ref_start, top + live_start, left + ref_end, top + live_end), outline=TRUTH)
        if name == "paths":
            first_s = matrix.lives[0].second
            for path in paths:
                _draw_path(draw, path, first_s, zoom, left, top)
    return sheet


def _draw_path(draw: ImageDraw.ImageDraw, path: AlignmentPath, first_s: int, zoom: int, left: int, top: int) -> None:
    points = [
        (left + (ref + 0.5) * zoom, top + (live - first_s + 0.5) * zoom)
        for live, ref in sorted({path.first, *path.points, path.last})
    ]
    if len(points) > 1:
        draw.line(points, PATH, 2)
    else:
        draw.point(points, PATH)


def _heat(values: NDArray[np.float32]) -> Colours:
    """0 is black, 1 is white."""
    level = (np.clip(values, 0, 1) * 255).astype(np.uint8)
    return np.repeat(level[..., None], 3, axis=2)


def _steps(step: NDArray[np.uint8]) -> Colours:
    colours = np.full((*step.shape, 3), 255, np.uint8)
    for direction, colour in STEP_COLOURS.items():
        colours[step == direction] = colour
    return colours
