"""The batcher: many channels share the encoder and the network, and no channel's alerts depend on another's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import Alert
from monitor.ingest.sources import Sample
from monitor.ops.metrics import Metrics
from monitor.runtime.batcher import MAX_BATCH, Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.match_step import MatchStep
from tests.support.recorded_channel import RecordedChannel


async def match(batcher: Batcher, monitor: ChannelMonitor, samples: list[Sample], yields: list[bool]) -> list[Alert]:
    """The alerts of these samples; before a sample with `yields` the channel lets the others go ahead."""
    slot, alerts = batcher.slot(), []
    for sample, lets_others_run in zip(samples, yields, strict=True):
        if lets_others_run:
            await batcher.run("match", lambda: None)
        alerts += (await slot.submit(sample.frame, partial(monitor.match_step, sample))).alerts
    return alerts + await batcher.run("match", monitor.finish)


def match_together(recorded: RecordedChannel, channels: list[list[Sample]], seed: int) -> list[list[Alert]]:
    """The alerts of each channel, all of them matched at once."""
    rng = np.random.default_rng(seed)

    async def match_all() -> list[list[Alert]]:
        batcher = Batcher(recorded.models, Metrics(CollectorRegistry()))
        try:
            return await asyncio.gather(
                *(
                    match(batcher, recorded.new_monitor(), samples, (rng.random(len(samples)) < 0.3).tolist())
                    for samples in channels
                )
            )
        finally:
            batcher.close()

    return asyncio.run(match_all())


@pytest.mark.slow
def test_the_alerts_of_a_channel_do_not_depend_on_the_others(recorded: RecordedChannel) -> None:
    harbour, garden = recorded.samples[8:45], recorded.samples[45:78]
    lossy = [sample for sample in harbour if sample.second % 7 != 3]  # a step after a gap yields tiles several times
    channels = [harbour, lossy, harbour[10:], garden]
    alone = [match_together(recorded, [samples], 0)[0] for samples in channels]
    assert [len({alert.id for alert in alerts}) for alerts in alone] == [1, 1, 1, 1]
    assert match_together(recorded, channels, 1) == alone
    assert match_together(recorded, channels[::-1], 2) == alone[::-1]


def test_a_held_picture_is_encoded_once(recorded: RecordedChannel) -> None:
    metrics = Metrics(CollectorRegistry())
    first, second = recorded.samples[:2]
    held = replace(second, frame=replace(first.frame, second=second.second, held=True))
    batcher = Batcher(recorded.models, metrics)
    asyncio.run(match(batcher, recorded.new_monitor(), [first, held, recorded.samples[2]], [False] * 3))
    batcher.close()
    assert metrics.registry.get_sample_value("copywatch_stage_duration_seconds_count", {"stage": "encode"}) == 2
    assert metrics.registry.get_sample_value("copywatch_stage_duration_seconds_count", {"stage": "match"}) == 4


def test_a_failing_step_affects_no_other_channel(recorded: RecordedChannel) -> None:
    def failing_step(row: NDArray[np.float32], informative: bool) -> MatchStep[None]:
        raise RuntimeError("of this channel only")
        yield []

    harbour = recorded.samples[8:40]

    async def match_beside_failures() -> list[Alert]:
        batcher = Batcher(recorded.models, Metrics(CollectorRegistry()))
        try:
            matching = asyncio.create_task(match(batcher, recorded.new_monitor(), harbour, [False] * len(harbour)))
            slot = batcher.slot()
            while not matching.done():
                with pytest.raises(RuntimeError, match="of this channel only"):
                    await slot.submit(recorded.samples[0].frame, failing_step)
            return await matching
        finally:
            batcher.close()

    assert asyncio.run(match_beside_failures()) == match_together(recorded, [harbour], 0)[0]


def run_on_batcher(recorded: RecordedChannel, work: Callable[[Batcher], object]) -> None:
    async def run() -> None:
        batcher = Batcher(recorded.models, Metrics(CollectorRegistry()))
        try:
            await work(batcher)  # type: ignore[misc]
        finally:
            batcher.close()

    asyncio.run(run())


def test_batches_take_turns_over_all_waiting_channels(recorded: RecordedChannel) -> None:
    order: list[int] = []

    def step(channel: int, row: NDArray[np.float32], informative: bool) -> MatchStep[None]:
        order.append(channel)
        return None
        yield []

    async def submit(batcher: Batcher, channel: int) -> None:
        slot = batcher.slot()
        for _ in range(5):
            await slot.submit(recorded.samples[0].frame, partial(step, channel))

    async def all_channels(batcher: Batcher) -> None:
        await asyncio.gather(*(submit(batcher, channel) for channel in range(20)))

    run_on_batcher(recorded, all_channels)
    for done in range(0, len(order), 20):
        n_done = [order[: done + 20].count(channel) for channel in range(20)]
        assert max(n_done) - min(n_done) <= 1


def test_a_snapshot_is_added_within_the_batch_and_its_failure_is_the_callers(recorded: RecordedChannel) -> None:
    def step(row: NDArray[np.float32], informative: bool) -> MatchStep[str]:
        return "outcome"
        yield []

    def fail(outcome: str) -> str:
        raise OSError("no snapshot")

    async def submit(batcher: Batcher) -> None:
        slot, frame = batcher.slot(), recorded.samples[0].frame
        assert await slot.submit(frame, step) == "outcome"
        assert await slot.submit(frame, step, lambda outcome: f"{outcome} with snapshot") == "outcome with snapshot"
        with pytest.raises(OSError, match="no snapshot"):
            await slot.submit(frame, step, fail)
        assert await slot.submit_encoded(recorded.rows[0], step) == "outcome"

    run_on_batcher(recorded, submit)


def test_a_network_failure_ends_every_job_of_the_batch(
    recorded: RecordedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(row: NDArray[np.float32], informative: bool) -> MatchStep[None]:
        yield []

    def out_of_memory(tiles: object) -> None:
        raise MemoryError("no memory for the tiles")

    async def submit(batcher: Batcher) -> None:
        monkeypatch.setattr(batcher.models, "read", out_of_memory)
        jobs = [batcher.slot().submit_encoded(recorded.rows[0], step) for _ in range(MAX_BATCH + 1)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(result) for result in results] == [MemoryError] * (MAX_BATCH + 1)

    run_on_batcher(recorded, submit)
