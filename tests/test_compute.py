"""Turns: many channels share the encoder and the network, and none of them can tell."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import Alert
from monitor.compute import Compute, Thought
from monitor.ingest.sources import Sample
from monitor.metrics import Metrics
from monitor.pipeline import Watch
from tests.studio import Studio


async def tell(compute: Compute, watch: Watch, samples: list[Sample], pauses: list[bool]) -> list[Alert]:
    """The alerts of these samples; where `pauses` says so, the channel first lets the others go on."""
    lane, alerts = compute.lane(), []
    for sample, pause in zip(samples, pauses, strict=True):
        if pause:
            await compute.run("match", lambda: None)
        alerts += (await lane.second(sample.frame, partial(watch.second, sample))).alerts
    return alerts + await compute.run("match", watch.finish)


def together(studio: Studio, channels: list[list[Sample]], seed: int) -> list[list[Alert]]:
    """The alerts of each channel, all of them watched at once."""
    rng = np.random.default_rng(seed)

    async def watch_all() -> list[list[Alert]]:
        compute = Compute(studio.models, Metrics(CollectorRegistry()))
        try:
            telling = [tell(compute, studio.watch(), one, (rng.random(len(one)) < 0.3).tolist()) for one in channels]
            return await asyncio.gather(*telling)
        finally:
            compute.close()

    return asyncio.run(watch_all())


def test_what_a_channel_tells_does_not_depend_on_the_others(studio: Studio) -> None:
    harbour, garden = studio.samples[8:45], studio.samples[45:78]
    lossy = [sample for sample in harbour if sample.second % 7 != 3]  # its gaps are thought through beside the others
    channels = [harbour, lossy, harbour[10:], garden]
    alone = [together(studio, [one], 0)[0] for one in channels]
    assert [len({alert.id for alert in alerts}) for alerts in alone] == [1, 1, 1, 1]
    assert together(studio, channels, 1) == alone
    assert together(studio, channels[::-1], 2) == alone[::-1]


def test_a_held_picture_is_encoded_once(studio: Studio) -> None:
    metrics = Metrics(CollectorRegistry())
    first, second = studio.samples[:2]
    held = replace(second, frame=replace(first.frame, second=second.second, held=True))
    compute = Compute(studio.models, metrics)
    asyncio.run(tell(compute, studio.watch(), [first, held, studio.samples[2]], [False] * 3))
    compute.close()
    assert metrics.registry.get_sample_value("copywatch_stage_duration_seconds_count", {"stage": "encode"}) == 2
    assert metrics.registry.get_sample_value("copywatch_stage_duration_seconds_count", {"stage": "match"}) == 4


def test_a_channel_whose_thoughts_fail_takes_no_other_with_it(studio: Studio) -> None:
    def fails(row: NDArray[np.float32], informative: bool) -> Thought[None]:
        raise RuntimeError("of this channel only")
        yield []

    harbour = studio.samples[8:40]

    async def both() -> list[Alert]:
        compute = Compute(studio.models, Metrics(CollectorRegistry()))
        try:
            telling = asyncio.create_task(tell(compute, studio.watch(), harbour, [False] * len(harbour)))
            lane = compute.lane()
            while not telling.done():
                with pytest.raises(RuntimeError, match="of this channel only"):
                    await lane.second(studio.samples[0].frame, fails)
            return await telling
        finally:
            compute.close()

    assert asyncio.run(both()) == together(studio, [harbour], 0)[0]


def test_a_turn_goes_round_the_channels_however_many_wait(studio: Studio) -> None:
    order: list[int] = []

    def think(channel: int, row: NDArray[np.float32], informative: bool) -> Thought[None]:
        order.append(channel)
        return None
        yield []

    async def channel(compute: Compute, number: int) -> None:
        lane = compute.lane()
        for _ in range(5):
            await lane.second(studio.samples[0].frame, partial(think, number))

    async def all_of_them() -> None:
        compute = Compute(studio.models, Metrics(CollectorRegistry()))
        try:
            await asyncio.gather(*(channel(compute, number) for number in range(20)))
        finally:
            compute.close()

    asyncio.run(all_of_them())
    for done in range(0, len(order), 20):
        ahead = [order[: done + 20].count(number) for number in range(20)]
        assert max(ahead) - min(ahead) <= 1
