"""Turns: many channels share the encoder and the network, and none of them can tell."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from monitor.alerting.alerts import Alert
from monitor.ingest.sources import BUFFER_S, Position, Sample, SampleBuffer, read_in_thread
from monitor.ops.metrics import Metrics
from monitor.runtime.batcher import Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.check import CallbackDelivery
from monitor.runtime.match_step import MatchStep
from monitor.runtime.runner import run_stream
from tests.support.recorded_channel import RecordedChannel


async def tell(compute: Batcher, watch: ChannelMonitor, samples: list[Sample], pauses: list[bool]) -> list[Alert]:
    """The alerts of these samples; where `pauses` says so, the channel first lets the others go on."""
    slot, alerts = compute.slot(), []
    for sample, pause in zip(samples, pauses, strict=True):
        if pause:
            await compute.run("match", lambda: None)
        alerts += (await slot.submit(sample.frame, partial(watch.match_step, sample))).alerts
    return alerts + await compute.run("match", watch.finish)


def together(recorded: RecordedChannel, channels: list[list[Sample]], seed: int) -> list[list[Alert]]:
    """The alerts of each channel, all of them watched at once."""
    rng = np.random.default_rng(seed)

    async def watch_all() -> list[list[Alert]]:
        compute = Batcher(recorded.models, Metrics(CollectorRegistry()))
        try:
            telling = [
                tell(compute, recorded.new_monitor(), one, (rng.random(len(one)) < 0.3).tolist()) for one in channels
            ]
            return await asyncio.gather(*telling)
        finally:
            compute.close()

    return asyncio.run(watch_all())


@pytest.mark.slow
def test_what_a_channel_tells_does_not_depend_on_the_others(recorded: RecordedChannel) -> None:
    harbour, garden = recorded.samples[8:45], recorded.samples[45:78]
    lossy = [sample for sample in harbour if sample.second % 7 != 3]  # its gaps are thought through beside the others
    channels = [harbour, lossy, harbour[10:], garden]
    alone = [together(recorded, [one], 0)[0] for one in channels]
    assert [len({alert.id for alert in alerts}) for alerts in alone] == [1, 1, 1, 1]
    assert together(recorded, channels, 1) == alone
    assert together(recorded, channels[::-1], 2) == alone[::-1]


def test_a_held_picture_is_encoded_once(recorded: RecordedChannel) -> None:
    metrics = Metrics(CollectorRegistry())
    first, second = recorded.samples[:2]
    held = replace(second, frame=replace(first.frame, second=second.second, held=True))
    compute = Batcher(recorded.models, metrics)
    asyncio.run(tell(compute, recorded.new_monitor(), [first, held, recorded.samples[2]], [False] * 3))
    compute.close()
    assert metrics.registry.get_sample_value("copywatch_stage_duration_seconds_count", {"stage": "encode"}) == 2
    assert metrics.registry.get_sample_value("copywatch_stage_duration_seconds_count", {"stage": "match"}) == 4


def test_a_channel_whose_thoughts_fail_takes_no_other_with_it(recorded: RecordedChannel) -> None:
    def fails(row: NDArray[np.float32], informative: bool) -> MatchStep[None]:
        raise RuntimeError("of this channel only")
        yield []

    harbour = recorded.samples[8:40]

    async def both() -> list[Alert]:
        compute = Batcher(recorded.models, Metrics(CollectorRegistry()))
        try:
            telling = asyncio.create_task(tell(compute, recorded.new_monitor(), harbour, [False] * len(harbour)))
            slot = compute.slot()
            while not telling.done():
                with pytest.raises(RuntimeError, match="of this channel only"):
                    await slot.submit(recorded.samples[0].frame, fails)
            return await telling
        finally:
            compute.close()

    assert asyncio.run(both()) == together(recorded, [harbour], 0)[0]


class Flood:
    """A live source that brings far more than can be matched: real pictures, as fast as a thread can hand them over."""

    def __init__(self, samples: list[Sample], rounds: int, metrics: Metrics) -> None:
        self.channel = samples[0].epoch.channel
        self.n_put = 0
        self._samples, self._rounds = samples, rounds
        self._status = metrics.channels.of(self.channel)

    async def samples(self) -> AsyncGenerator[Sample, None]:
        buffer = SampleBuffer(self._status, wait=False)
        async with aclosing(read_in_thread(buffer, self._pour, lambda: None, "flood")) as samples:
            async for sample in samples:
                yield sample

    async def close(self) -> None:
        pass

    def resume(self, position: Position) -> None:
        pass

    def _pour(self, buffer: SampleBuffer) -> None:
        for number in range(self._rounds * len(self._samples)):
            sample = self._samples[number % len(self._samples)]
            self.n_put += buffer.put(replace(sample, second=number))
        buffer.end()


def counted(registry: CollectorRegistry) -> dict[str, float]:
    """One scrape: the seconds of the channel by what became of them."""
    counts: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name.startswith("copywatch_frames_") and not sample.name.endswith("_created"):
                counts[sample.name.removeprefix("copywatch_frames_").removesuffix("_total")] += sample.value
    return counts


def test_overload_drops_the_oldest_and_every_scrape_accounts_for_every_second(recorded: RecordedChannel) -> None:
    metrics = Metrics(CollectorRegistry())
    scrapes: list[dict[str, float]] = []
    told: list[Alert] = []
    source = Flood(recorded.samples[8:40], 12, metrics)
    ended = threading.Event()

    def scrape() -> None:
        while not ended.is_set():
            scrapes.append(counted(metrics.registry))

    async def watch() -> None:
        compute = Batcher(recorded.models, metrics)
        try:
            await run_stream(source, recorded.new_monitor(), CallbackDelivery(told.append), compute, metrics)
        finally:
            compute.close()

    scraping = threading.Thread(target=scrape)
    scraping.start()
    try:
        asyncio.run(watch())
    finally:
        ended.set()
        scraping.join()
    for counts in scrapes:
        assert counts["received"] == counts["processed"] + counts["dropped"] + counts["waiting"]
        assert 0 <= counts["waiting"] <= BUFFER_S + 2  # one more is in hand, and the oldest goes as the newest comes
    assert len({counts["processed"] for counts in scrapes}) > 10
    last = counted(metrics.registry)
    assert last["received"] == source.n_put == 12 * 32
    assert last["waiting"] == 0
    overload = {"channel": source.channel, "reason": "overload"}
    assert last["dropped"] == metrics.registry.get_sample_value("copywatch_frames_dropped_total", overload)
    assert last["dropped"] > 100
    # What came last is what was matched, and the hole is told where an alert has it.
    assert all(gap.reason == "overload" for alert in told for gap in alert.gaps)
    assert len(told) == metrics.registry.get_sample_value("copywatch_alert_delay_seconds_count")
    assert told


def test_a_turn_goes_round_the_channels_however_many_wait(recorded: RecordedChannel) -> None:
    order: list[int] = []

    def think(channel: int, row: NDArray[np.float32], informative: bool) -> MatchStep[None]:
        order.append(channel)
        return None
        yield []

    async def channel(compute: Batcher, number: int) -> None:
        slot = compute.slot()
        for _ in range(5):
            await slot.submit(recorded.samples[0].frame, partial(think, number))

    async def all_of_them() -> None:
        compute = Batcher(recorded.models, Metrics(CollectorRegistry()))
        try:
            await asyncio.gather(*(channel(compute, number) for number in range(20)))
        finally:
            compute.close()

    asyncio.run(all_of_them())
    for done in range(0, len(order), 20):
        ahead = [order[: done + 20].count(number) for number in range(20)]
        assert max(ahead) - min(ahead) <= 1
