"""Pictures of an edited copy against those of the film, pixel by pixel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from monitor.evidence.picture_alignment import likeness, mean_difference
from tests.support.media import picture

Picture = NDArray[np.uint8]
SHAPE = (90, 160)
REF_S = [number / 2 for number in range(8, 28)]
AIR_S = [5.1, 7.2, 8.7, 10.3, 11.6]


def film(time_s: float) -> Picture:
    return np.asarray(Image.fromarray(picture(3, time_s)).convert("L").resize((SHAPE[1], SHAPE[0])))


def cropped(one: Picture) -> Picture:
    return np.asarray(Image.fromarray(one[9:-9, 16:-16]).resize((SHAPE[1], SHAPE[0])))


def letterboxed(one: Picture) -> Picture:
    return np.pad(np.asarray(Image.fromarray(one).resize((160, 66))), ((12, 12), (0, 0)))


def with_ticker(one: Picture) -> Picture:
    shown = one.copy()
    shown[-18:] = 30
    shown[-12:-6, ::7] = 230
    return shown


EDITS: dict[str, Callable[[Picture], Picture]] = {
    "none": lambda one: one,
    "mirrored": lambda one: one[:, ::-1],
    "cropped": cropped,
    "letterboxed": letterboxed,
    "with a ticker": with_ticker,
    "dark": lambda one: (one * 0.6).astype(np.uint8),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_partner_is_the_most_alike_whatever_the_edit(edit: str) -> None:
    refs = [film(time_s) for time_s in REF_S]
    airs = [np.ascontiguousarray(EDITS[edit](film(time_s))) for time_s in AIR_S]
    hints = [(n, [at for at, ref_s in enumerate(REF_S) if abs(ref_s - time_s) <= 1]) for n, time_s in enumerate(AIR_S)]
    cells = likeness(airs, refs, hints)
    assert cells.shape == (len(AIR_S), len(REF_S))
    for n, time_s in enumerate(AIR_S):
        assert abs(REF_S[int(cells[n].argmax())] - time_s) <= 0.5, (edit, time_s)
        assert cells[n].max() > 0.6


def test_without_hints_or_pictures_nothing_is_alike() -> None:
    assert likeness([film(5.0)], [film(5.0), film(6.0)], []).tolist() == [[0.0, 0.0]]
    assert likeness([], [film(5.0)], []).shape == (0, 1)


def test_the_difference_of_two_pictures_is_in_levels() -> None:
    one = np.full(SHAPE, 100, np.uint8)
    assert mean_difference(one, one + np.uint8(7)) == pytest.approx(7)
