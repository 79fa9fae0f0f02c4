"""Match steps: each is sent the maps of its own tiles, in order, whatever shares its batch."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.matching.tiles import TILE_COLUMNS, TILE_ROWS, SimilarityTile, TileMaps
from monitor.ops.metrics import Metrics
from monitor.runtime.batcher import Batcher, run_step
from monitor.runtime.match_step import MatchStep
from tests.support.planted_channels import quick_models, quick_tile

ROW = (np.zeros(512, np.float32), True)


def tile(seed: int) -> SimilarityTile:
    cells = np.random.default_rng(seed).uniform(0, 1, (TILE_ROWS, TILE_COLUMNS)).astype(np.float32)
    return SimilarityTile(0, 0, cells, np.ones(cells.shape, np.bool_))


def step(seeds: list[list[int]], row: NDArray[np.float32], informative: bool) -> MatchStep[list[TileMaps]]:
    """Yields the tiles of each list of seeds in turn, and returns all maps that it was sent."""
    received: list[TileMaps] = []
    for some in seeds:
        maps = yield [tile(seed) for seed in some]
        assert len(maps) == len(some)
        received += maps
    return received


def assert_maps(received: list[TileMaps], seeds: list[list[int]]) -> None:
    expected = [quick_tile(tile(seed).cells) for some in seeds for seed in some]
    assert len(received) == len(expected)
    for found, wanted in zip(received, expected, strict=True):
        assert np.array_equal(found.mask, wanted.mask)
        assert np.array_equal(found.step, wanted.step)


CHANNELS = [[[1, 2], [3]], [], [[4], [], [5, 6, 7], [8]], [[9]]]


def test_a_step_alone_is_sent_the_maps_of_its_tiles() -> None:
    for seeds in CHANNELS:
        assert_maps(run_step(quick_models(), step(seeds, *ROW)), seeds)


def test_steps_of_one_batch_are_each_sent_their_own_maps() -> None:
    async def run() -> list[list[TileMaps]]:
        batcher = Batcher(quick_models(), Metrics(CollectorRegistry()))
        try:
            return await asyncio.gather(
                *(batcher.slot().submit_encoded(ROW, partial(step, seeds)) for seeds in CHANNELS)
            )
        finally:
            batcher.close()

    for received, seeds in zip(asyncio.run(run()), CHANNELS, strict=True):
        assert_maps(received, seeds)
