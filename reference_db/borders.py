"""Borders: the plain bars around a picture, found and cut off, so that a copy shown smaller looks like its original.

A film of another shape is aired between bars (letterbox, pillarbox, a coloured frame, an upright video in a wide
picture). Bars count only in pairs: of one colour, equally wide on both sides, which a scene hardly ever shows by
itself. A logo or a ticker may cover part of them.
"""

import numpy as np
from numpy.typing import NDArray

STEP = 3  # every third pixel is looked at
LIKE = 14  # a channel's levels by which a bar's pixels may differ from its colour: what compression does to it
PLAIN_SHARE = 0.72  # of a line's pixels that have the bar's colour; the rest may be a logo or a ticker
MIN_SHARE = 0.02  # of the side, for a bar on each end
MIN_LEFT = 0.25  # of the side that must be left between the bars
UNEVEN = 0.02  # of the side, by which the two bars may differ
ROUNDS = 2  # a frame around a letterbox is two pairs of bars
RULES = f"{STEP} {LIKE} {PLAIN_SHARE} {MIN_SHARE} {MIN_LEFT} {UNEVEN} {ROUNDS}"  # part of the encoder's id


def without_borders(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The part of the picture [h, w, 3] between its bars; a view."""
    for _ in range(ROUNDS):
        small = picture[::STEP, ::STEP].astype(np.int16)
        top, bottom = _bars(small)
        left, right = _bars(small.transpose(1, 0, 2))
        if not (top or left):
            break
        height, width = picture.shape[:2]
        picture = picture[top * STEP : height - bottom * STEP, left * STEP : width - right * STEP]
    return picture


def _bars(lines: NDArray[np.int16]) -> tuple[int, int]:
    """How many lines at the beginning and at the end are a pair of bars; (0, 0) where there is none."""
    n = len(lines)
    colour = np.median(np.concatenate([lines[0], lines[-1]]), axis=0)
    plain = (np.abs(lines - colour).max(axis=2) <= LIKE).mean(axis=1) >= PLAIN_SHARE
    if plain.all() or not (plain[0] and plain[-1]):
        return 0, 0
    first, last = int(np.argmin(plain)), int(np.argmin(plain[::-1]))
    uneven = abs(first - last) > max(1, UNEVEN * n)
    if uneven or min(first, last) < MIN_SHARE * n or n - first - last < MIN_LEFT * n:
        return 0, 0
    return first, last
