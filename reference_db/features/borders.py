"""Borders: the plain bars around a picture, which are cropped so that a copy shown smaller looks like its original.

A film of another shape is broadcast between bars (letterbox, pillarbox, a coloured frame, an upright video in a wide
picture). Bars count only in pairs: of one colour and equally wide on both sides, which scenes hardly ever show. A logo
or a ticker may cover part of them.
"""

import numpy as np
from numpy.typing import NDArray

STEP = 3  # every third pixel is read; within bars, each
TOLERANCE = 14  # levels of a colour channel by which compression moves the pixels of a bar
PLAIN_SHARE = 0.72  # of the pixels of a line must have the bar's colour; the rest may be a logo or a ticker
MIN_SHARE = 0.02  # of the side: the narrowest bar
MIN_INNER = 0.25  # of the side must remain between the bars
MAX_UNEVEN = 0.02  # of the side, by which the two bars may differ
ROUNDS = 4  # a coloured frame around an upright picture around a letterbox are three pairs of bars, one in another
BLACK = 40  # levels up to which a bar is black; only the outermost may have another colour: white margins are picture
# Part of the encoder's id.
RULES = f"{STEP} {TOLERANCE} {PLAIN_SHARE} {MIN_SHARE} {MIN_INNER} {MAX_UNEVEN} {ROUNDS} {BLACK}"


def crop_borders(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The part of the picture [h, w, 3] between its bars; a view."""
    top, left, bottom, right = inner_box(picture)
    return picture[top:bottom, left:right]


def inner_box(picture: NDArray[np.uint8]) -> tuple[int, int, int, int]:
    """Top, left, bottom and right of the part of the picture [h, w, 3] between its bars."""
    top, left, bottom, right = 0, 0, *picture.shape[:2]
    for number in range(ROUNDS):
        step, brightest = (STEP, 255) if number == 0 else (1, BLACK)
        small = picture[top:bottom:step, left:right:step].astype(np.int16)
        rows, columns = _between(small, brightest), _between(small.transpose(1, 0, 2), brightest)
        if len(rows) == len(small) and len(columns) == small.shape[1]:
            break
        down, across = _pixels(rows, len(small), step), _pixels(columns, small.shape[1], step)
        top, bottom = _within(top, bottom, down)
        left, right = _within(left, right, across)
    return top, left, bottom, right


def _within(first: int, last: int, part: slice) -> tuple[int, int]:
    """The part of a range."""
    start, stop, _ = part.indices(last - first)
    return first + start, first + stop


def _pixels(inner: range, n: int, step: int) -> slice:
    """The pixels of the inner lines of n; next to a bar, less the one pixel into which it may bleed."""
    return slice(None) if len(inner) == n else slice(inner[0] * step + 1, inner[-1] * step)


def _between(lines: NDArray[np.int16], brightest: int) -> range:
    """The lines between a pair of bars at both ends; all lines where there is no pair."""
    n = len(lines)
    colour = np.median(np.concatenate([lines[0], lines[-1]]), axis=0)
    if colour.max() > brightest or not _plain(lines[[0, -1]], colour).all():
        return range(n)  # as in most pictures
    plain = _plain(lines, colour)
    if plain.all():
        return range(n)
    first, last = int(np.argmin(plain)), int(np.argmin(plain[::-1]))
    uneven = abs(first - last) > max(1, MAX_UNEVEN * n)
    if uneven or min(first, last) < MIN_SHARE * n or n - first - last < MIN_INNER * n:
        return range(n)
    return range(first, n - last)


def _plain(lines: NDArray[np.int16], colour: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which lines show hardly anything but this colour."""
    return np.asarray((np.abs(lines - colour).max(axis=2) <= TOLERANCE).mean(axis=1) >= PLAIN_SHARE)
