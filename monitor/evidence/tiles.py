"""Similarity tiles as evidence: recomputed from the features of both sides by the network that matched, and drawn.

A tile has rows of stream seconds and columns of reference seconds around one end of a copy. It is computed with a halo
on each side, so its mask equals the one that the channel's matching read there.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from monitor.ingest.feature_windows import LiveSecond
from monitor.matching.mask_step import MaskStepNet
from monitor.matching.tiles import GRAIN, HALO
from reference_db.search.feature_rows import ReferenceRows
from reference_db.store.catalog import FEATURE_SIZE

TILE_S = 48  # stream seconds of a tile, its margins included
MARGIN_S = 6  # shown before a copy begins and after it ends
MAX_COLUMNS = 2 * TILE_S + 2 * MARGIN_S  # at double speed

HEAT = ((13, 17, 43), (43, 46, 110), (92, 83, 165), (204, 96, 120), (247, 168, 90), (255, 247, 205))  # dark to light
MASK_COLOUR, PATH_COLOUR, INK, PAPER = (90, 235, 255), (40, 255, 120), (40, 40, 40), (255, 255, 255)
TEXT_LEVELS, HEAT_LEVELS = 16, 64  # of the palette
FIRST_HEAT = TEXT_LEVELS
MASK, PATH = FIRST_HEAT + HEAT_LEVELS, FIRST_HEAT + HEAT_LEVELS + 1
SIDE_PX = 560  # of the longer side of the drawn matrix, about
LEFT_PX, TOP_PX, RIGHT_PX, BOTTOM_PX = 58, 22, 12, 38
TICK_S = (1, 2, 5, 10, 20, 30)


@dataclass(frozen=True, slots=True, eq=False)
class EvidenceTile:
    """A part of the similarity matrix, the mask that the network read in it, and the path."""

    live_s: int  # stream second of row 0
    ref_s: int  # reference second of column 0
    similarity: NDArray[np.float32]  # [live, ref]
    mask: NDArray[np.float32]  # [live, ref]
    path: tuple[tuple[int, int], ...]  # (row, column), in order

    def as_dict(self, name: str) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rows, columns = self.similarity.shape
        return {
            "name": name,
            "live_s": self.live_s,
            "ref_s": self.ref_s,
            "rows": rows,
            "columns": columns,
            "similarity": np.round(self.similarity.astype(np.float64), 3).tolist(),
            "mask": np.round(self.mask.astype(np.float64), 3).tolist(),
            "path": [list(cell) for cell in self.path],
        }


def full_path(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every stream second from the first of these (live_s, ref_s) cells to the last, with its reference second."""
    ordered = sorted(set(points))
    if not ordered:
        return []
    live, ref = np.array(ordered).T
    seconds = np.arange(live[0], live[-1] + 1)
    columns = np.round(np.interp(seconds, live, ref)).astype(int)
    return list(zip(seconds.tolist(), columns.tolist(), strict=True))


def cut_tile(
    lives: Sequence[LiveSecond],
    rows: ReferenceRows,
    informative: NDArray[np.bool_],
    points: Sequence[tuple[int, int]],
    start_s: int,
    net: MaskStepNet,
) -> EvidenceTile | None:
    """The tile whose first row is `start_s`, around the path there; None without the path or the seconds in memory.

    `lives` are consecutive; `points` are cells (live_s, ref_s) of the path.
    """
    rows_shown = {live.second for live in lives if start_s <= live.second < start_s + TILE_S}
    along = [(s, ref) for s, ref in full_path(points) if s in rows_shown and 0 <= ref < len(rows)]
    if not along:
        return None
    first_s, n_rows = min(rows_shown), len(rows_shown)
    refs = [ref for _, ref in along]
    left = max(0, min(refs) - MARGIN_S)
    right = min(len(rows), max(refs) + 1 + MARGIN_S, left + MAX_COLUMNS)
    wide = range(first_s - HALO, first_s + n_rows + HALO)
    west, east = max(0, left - HALO), min(len(rows), right + HALO)
    matrix = _similarity({live.second: live for live in lives}, wide, rows[west:east], informative[west:east])
    mask = _mask(matrix, net)
    inner = (slice(HALO, HALO + n_rows), slice(left - west, right - west))
    path = tuple((s - first_s, ref - left) for s, ref in along if left <= ref < right)
    return EvidenceTile(first_s, left, matrix[inner], mask[inner], path)


def _similarity(
    lives: dict[int, LiveSecond], seconds: range, near: NDArray[np.float32], informative: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """The similarity that matching uses: 0 where either side is missing or uninformative, rounded to its grain."""
    live_rows = np.zeros((len(seconds), FEATURE_SIZE), np.float32)
    for n, second in enumerate(seconds):
        live = lives.get(second)
        if live is not None and live.counts and live.row is not None:
            live_rows[n] = live.row
    cells = np.where(informative, live_rows @ near.T, np.float32(0))
    return np.asarray(np.round(cells * GRAIN) / GRAIN, np.float32)


def _mask(matrix: NDArray[np.float32], net: MaskStepNet) -> NDArray[np.float32]:
    with torch.inference_mode():
        logits, _ = net(torch.from_numpy(matrix)[None, None])
        return np.asarray(torch.sigmoid(logits[0, 1] - logits[0, 0]).numpy(), np.float32)


# --- drawing ---------------------------------------------------------------------------------------------------------


def draw_tile(tile: EvidenceTile, tau: float) -> bytes:
    """The tile as PNG: similarity as heat, the mask above `tau` outlined, the path as a line, seconds on both axes."""
    rows, columns = tile.similarity.shape
    cell = max(4, min(14, SIDE_PX // max(rows, columns)))
    heat = np.round(np.clip(tile.similarity, 0, 1) * (HEAT_LEVELS - 1)).astype(np.uint8) + np.uint8(FIRST_HEAT)
    canvas = np.array(_axes(tile, cell))
    canvas[TOP_PX:, LEFT_PX:][: rows * cell, : columns * cell] = heat.repeat(cell, axis=0).repeat(cell, axis=1)
    _outline(canvas[TOP_PX:, LEFT_PX:], tile.mask > tau, cell)
    picture = Image.fromarray(canvas).convert("P")  # the bytes stay; from here on they are palette indices
    picture.putpalette(_palette())
    if len(tile.path) > 1:
        pen = ImageDraw.Draw(picture)
        pen.line([_px(row + 0.5, column + 0.5, cell) for row, column in tile.path], fill=PATH, width=2, joint="curve")
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _px(row: float, column: float, cell: int) -> tuple[float, float]:
    return LEFT_PX + column * cell, TOP_PX + row * cell


@cache
def _palette() -> bytes:
    """Colours by index: from ink to paper, then heat from dark to light, then mask and path."""
    text = _gradient((INK, PAPER), TEXT_LEVELS)
    return bytes([*text, *_gradient(HEAT, HEAT_LEVELS), *MASK_COLOUR, *PATH_COLOUR])


def _gradient(stops: Sequence[tuple[int, int, int]], n: int) -> list[int]:
    """The red, green and blue levels of n colours from the first stop to the last."""
    places, stop_places = np.linspace(0, 1, n), np.linspace(0, 1, len(stops))
    channels = [np.interp(places, stop_places, [colour[k] for colour in stops]) for k in range(3)]
    return [round(level) for level in np.stack(channels, axis=1).ravel().tolist()]


def _outline(canvas: NDArray[np.uint8], inside: NDArray[np.bool_], cell: int) -> None:
    """Draws the borders between cells inside and outside."""
    rows, columns = inside.shape
    padded = np.pad(inside, 1)
    across = (padded[1:, 1:-1] != padded[:-1, 1:-1]).repeat(cell, axis=1)
    down = (padded[1:-1, 1:] != padded[1:-1, :-1]).repeat(cell, axis=0)
    for to_corner in (0, 1):  # a line includes the pixels of both its corners
        canvas[: rows * cell + 1 : cell, to_corner:][:, : columns * cell][across] = MASK
        canvas[to_corner:, : columns * cell + 1 : cell][: rows * cell][down] = MASK


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(11)


def _axes(tile: EvidenceTile, cell: int) -> Image.Image:
    """An empty drawing with its labels: TEXT_LEVELS of grey, 0 is ink."""
    rows, columns = tile.similarity.shape
    size = LEFT_PX + columns * cell + RIGHT_PX, TOP_PX + rows * cell + BOTTOM_PX
    picture = Image.new("L", size, 255)
    pen, font = ImageDraw.Draw(picture), _font()
    bottom = TOP_PX + rows * cell
    for second in _ticks(tile.live_s, rows, cell, 16):
        x, y = _px(second - tile.live_s + 0.5, 0, cell)
        pen.line([(x - 4, y), (x - 1, y)], fill=0)
        pen.text((x - 6, y), f"{second} s", fill=0, font=font, anchor="rm")
    for second in _ticks(tile.ref_s, columns, cell, 44):
        x, _ = _px(0, second - tile.ref_s + 0.5, cell)
        pen.line([(x, bottom + 1), (x, bottom + 4)], fill=0)
        pen.text((x, bottom + 6), f"{second} s", fill=0, font=font, anchor="mt")
    pen.text((4, 4), "channel, down; similarity 0 (dark) to 1 (light), mask outlined, path", fill=0, font=font)
    pen.text((LEFT_PX, bottom + 22), "reference, to the right", fill=0, font=font)
    return picture.point([level * TEXT_LEVELS // 256 for level in range(256)])


def _ticks(first: int, n: int, cell: int, apart_px: int) -> range:
    """Whole seconds at which an axis is labelled, at least `apart_px` pixels apart."""
    step = next((step for step in TICK_S if step * cell >= apart_px), TICK_S[-1])
    return range(-(-first // step) * step, first + n, step)
