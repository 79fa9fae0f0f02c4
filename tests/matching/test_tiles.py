"""Tiles: the maps read tile by tile are those of the whole matrix."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from monitor.ingest.feature_windows import LiveSecond
from monitor.matching.mask_step import NARROW_COLUMNS, MaskStepNet, TileReader
from monitor.matching.tiles import GRAIN, HALO, INNER_COLUMNS, NO_STEP, Band, MapRow
from reference_db.store.catalog import ReferenceId
from tests.support.mask_step_oracle import predict

torch.set_num_threads(1)


@cache
def random_net(seed: int) -> MaskStepNet:
    torch.manual_seed(seed)
    return MaskStepNet().eval()


@cache
def reader_of(net: MaskStepNet) -> TileReader:
    return TileReader(net)


def unit_rows(rng: np.random.Generator, n: int, size: int = 16) -> NDArray[np.float32]:
    rows = rng.normal(size=(n, size))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def read_all(band: Band, lives: list[LiveSecond], plan: list[range], net: MaskStepNet) -> list[MapRow]:
    """Every row of a band as it becomes final, the last four at the end of the stream."""
    final: list[MapRow] = []
    rows: list[MapRow] = []
    reader = reader_of(net)
    for live, columns in zip(lives, plan, strict=True):
        band.columns = columns
        band.push(live)
        cut = band.cut()
        rows = cut.read(reader.read(cut.tiles))
        if cut.has_final_row:
            final.append(rows.pop(0))
    return final + rows


def whole_matrix(
    lives: list[LiveSecond], ref: NDArray[np.float32], informative: NDArray[np.bool_], plan: list[range]
) -> NDArray[np.float32]:
    """The similarity matrix a cell at a time: zero outside the plan and where either side is uninformative."""
    cells = np.zeros((len(lives), len(ref)), np.float32)
    for i, live in enumerate(lives):
        if live.row is None or not live.counts:
            continue
        products = ref[plan[i].start : plan[i].stop] @ live.row
        for j in plan[i]:
            if informative[j]:
                cells[i, j] = np.round(products[j - plan[i].start] * GRAIN) / GRAIN
    return cells


@settings(max_examples=25, deadline=None)
@example(seed=0, height=12, width=NARROW_COLUMNS + 1, moves=False, holes=False)  # not all in the narrow part of a tile
@example(seed=0, height=12, width=NARROW_COLUMNS + HALO, moves=False, holes=False)
@given(
    seed=st.integers(0, 2**32 - 1),
    height=st.integers(2, 30),
    width=st.integers(2, 2 * INNER_COLUMNS + 40),
    moves=st.booleans(),
    holes=st.booleans(),
)
def test_final_rows_are_those_of_the_whole_matrix(seed: int, height: int, width: int, moves: bool, holes: bool) -> None:
    rng = np.random.default_rng(seed)
    ref, informative = unit_rows(rng, width), rng.uniform(size=width) > (0.1 if holes else 0)
    rows = unit_rows(rng, height)
    lives = [
        LiveSecond(1000 + i, None if holes and rng.uniform() < 0.2 else rows[i], rng.uniform() > 0.1, 1.0)
        for i in range(height)
    ]
    window = width if not moves else max(2, width // 2)
    plan = [range(s, s + window) for i in range(height) if (s := (i * (width - window)) // height) >= 0]
    net = random_net(seed % 3)
    band = Band(ReferenceId("r"), ref, informative, 1000, plan[0])
    found = read_all(band, lives, plan, net)

    cells = whole_matrix(lives, ref, informative, plan)
    mask, step = predict(net, cells[None], np.ones((1, height, width), np.bool_))
    assert [row.live_s for row in found] == [live.second for live in lives]
    for i, row in enumerate(found):
        span = slice(plan[i].start, plan[i].stop)
        assert np.array_equal(row.similarity, cells[i, span])
        np.testing.assert_allclose(row.mask, mask[0, i, span], atol=1e-5)
        inner = slice(plan[i].start, min(plan[i].stop, width - 1))
        if i < height - 1:
            agree = row.step[: inner.stop - inner.start] == step[0, i, inner]
            assert agree.mean() > 0.99  # two directions may tie to the last bit
        else:
            assert (row.step == NO_STEP).all()
        assert (row.counts == (informative[span] & lives[i].counts)).all()


def test_the_first_of_five_rows_is_final_and_the_rest_are_provisional() -> None:
    rng = np.random.default_rng(1)
    ref, net = unit_rows(rng, 50), random_net(1)
    band = Band(ReferenceId("r"), ref, np.ones(50, np.bool_), 0, range(50))
    for i in range(HALO + 3):
        band.push(LiveSecond(i, ref[i], True, 1.0))
        cut = band.cut()
        assert cut.has_final_row == (i >= HALO)
    rows = cut.read(reader_of(net).read(cut.tiles))
    assert [row.live_s for row in rows] == [2, 3, 4, 5, 6]
