"""The runner: how a stream ends, pauses, falls silent or overloads, and what is delivered then."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from monitor.alerting.alerts import ENDED, STARTED, Alert, Gap
from monitor.alerting.outbox import OutboxEntry
from monitor.errors import MonitorError
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.sources import BUFFER_S, Position, Sample, SampleBuffer, read_in_thread
from monitor.ops.metrics import Metrics
from monitor.runtime import runner
from monitor.runtime.batcher import Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.check import CallbackDelivery
from monitor.runtime.runner import AlertDelivery, run_stream
from reference_db.errors import MediaError
from tests.support.recorded_channel import RecordedChannel


@dataclass
class ListSource:
    """A source of given samples; then it waits for `end`, and fails if it has an error."""

    listed: list[Sample]
    error: MonitorError | MediaError | None = None
    end: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = False
    channel: str = "ch1"

    async def samples(self) -> AsyncGenerator[Sample, None]:
        for sample in self.listed:
            yield sample
        if self.waits:
            await self.end.wait()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.end.set()

    def resume(self, position: Position) -> None: ...


@dataclass
class ListDelivery:
    """Collects the entries."""

    stores_snapshots: bool = True
    entries: list[OutboxEntry] = field(default_factory=list)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # some alert

    async def put(self, entry: OutboxEntry) -> None:
        self.entries.append(entry)
        if ENDED in {alert.type for alert in entry.alerts}:
            self.has_ended.set()

    @property
    def alerts(self) -> list[Alert]:
        return [alert for entry in self.entries for alert in entry.alerts]


async def run(
    recorded: RecordedChannel,
    source: ListSource,
    delivery: AlertDelivery,
    *,
    monitor: ChannelMonitor | None = None,
    is_paused: Callable[[], bool] = lambda: False,
) -> None:
    metrics = Metrics(CollectorRegistry())
    batcher = Batcher(recorded.models, metrics)
    try:
        await run_stream(source, monitor or recorded.new_monitor(), delivery, batcher, metrics, is_paused)
    finally:
        batcher.close()


def test_an_error_of_the_source_is_raised_after_the_alerts_are_delivered(recorded: RecordedChannel) -> None:
    source, delivery = ListSource(recorded.samples[8:30], MediaError("the stream broke")), ListDelivery()
    with pytest.raises(MediaError, match="the stream broke"):
        asyncio.run(run(recorded, source, delivery))
    assert (delivery.alerts[0].type, delivery.alerts[-1].type) == (STARTED, ENDED)
    last = delivery.entries[-1].snapshot
    assert last is not None
    assert recorded.new_monitor().restore(last).position == source.listed[-1].position  # without "ended"


def test_a_paused_stream_ends_no_alert_and_resumes_from_its_last_snapshot(recorded: RecordedChannel) -> None:
    whole, first, second = ListDelivery(), ListDelivery(), ListDelivery()
    samples = recorded.samples[8:45]
    asyncio.run(run(recorded, ListSource(samples), whole))
    asyncio.run(run(recorded, ListSource(samples[:15]), first, is_paused=lambda: True))
    assert ENDED not in {alert.type for alert in first.alerts}
    snapshot = first.entries[-1].snapshot
    assert snapshot is not None
    monitor = recorded.new_monitor()
    assert monitor.restore(snapshot).position == samples[14].position
    asyncio.run(run(recorded, ListSource(samples[15:]), second, monitor=monitor))
    assert first.alerts + second.alerts == whole.alerts


def test_every_alert_is_delivered_with_a_snapshot_that_knows_of_it(recorded: RecordedChannel) -> None:
    delivery = ListDelivery()
    asyncio.run(run(recorded, ListSource(recorded.samples[8:45]), delivery))
    for entry in (entry for entry in delivery.entries if entry.alerts):
        assert entry.snapshot is not None
        monitor = recorded.new_monitor()
        monitor.restore(entry.snapshot)
        assert monitor.open_alerts == {alert.id for alert in entry.alerts if alert.type != ENDED}


def test_without_use_for_snapshots_none_are_made(recorded: RecordedChannel) -> None:
    delivery = ListDelivery(stores_snapshots=False)
    asyncio.run(run(recorded, ListSource(recorded.samples[8:30]), delivery))
    assert delivery.alerts
    assert {entry.snapshot for entry in delivery.entries} == {None}


def test_a_live_stream_that_falls_silent_ends_its_alerts_with_a_gap(
    recorded: RecordedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SILENCE_S", 3.0)
    epoch = ChannelEpoch("ch1", "epoch", datetime.now(UTC))
    samples = [replace(sample, epoch=epoch) for sample in recorded.samples[8:30]]
    delivery = ListDelivery()

    async def wait_for_end() -> None:
        source = ListSource(samples, waits=True)
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            tasks.create_task(run(recorded, source, delivery))
            await delivery.has_ended.wait()
            await source.close()

    asyncio.run(wait_for_end())
    (ended,) = [alert for alert in delivery.alerts if alert.type == ENDED]
    assert ended.gaps == (Gap(samples[-1].second + 1, 3, "reconnect"),)


class FloodingSource:
    """A live source that brings far more than can be matched: real pictures, as fast as a thread can put them."""

    def __init__(self, samples: list[Sample], rounds: int, metrics: Metrics) -> None:
        self.channel = samples[0].epoch.channel
        self.n_put = 0
        self._samples, self._rounds = samples, rounds
        self._status = metrics.channels.of(self.channel)

    async def samples(self) -> AsyncGenerator[Sample, None]:
        buffer = SampleBuffer(self._status, wait=False)
        async with aclosing(read_in_thread(buffer, self._put_all, lambda: None, "flood")) as samples:
            async for sample in samples:
                yield sample

    async def close(self) -> None: ...

    def resume(self, position: Position) -> None: ...

    def _put_all(self, buffer: SampleBuffer) -> None:
        for number in range(self._rounds * len(self._samples)):
            sample = self._samples[number % len(self._samples)]
            self.n_put += buffer.put(replace(sample, second=number))
        buffer.end()


def frame_counts(registry: CollectorRegistry) -> dict[str, float]:
    """One scrape: the channel's frames by what happened to them."""
    counts: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name.startswith("copywatch_frames_") and not sample.name.endswith("_created"):
                counts[sample.name.removeprefix("copywatch_frames_").removesuffix("_total")] += sample.value
    return counts


def test_overload_drops_the_oldest_and_every_scrape_accounts_for_every_frame(recorded: RecordedChannel) -> None:
    metrics = Metrics(CollectorRegistry())
    scrapes: list[dict[str, float]] = []
    alerts: list[Alert] = []
    source = FloodingSource(recorded.samples[8:40], 12, metrics)
    ended = threading.Event()

    def scrape() -> None:
        while not ended.is_set():
            scrapes.append(frame_counts(metrics.registry))

    async def match() -> None:
        batcher = Batcher(recorded.models, metrics)
        try:
            await run_stream(source, recorded.new_monitor(), CallbackDelivery(alerts.append), batcher, metrics)
        finally:
            batcher.close()

    scraping = threading.Thread(target=scrape)
    scraping.start()
    try:
        asyncio.run(match())
    finally:
        ended.set()
        scraping.join()
    for counts in scrapes:
        assert counts["received"] == counts["processed"] + counts["dropped"] + counts["waiting"]
        assert 0 <= counts["waiting"] <= BUFFER_S + 2  # one more is being matched, and the oldest goes as one comes
    assert len({counts["processed"] for counts in scrapes}) > 10
    last = frame_counts(metrics.registry)
    assert last["received"] == source.n_put == 12 * 32
    assert last["waiting"] == 0
    overload = {"channel": source.channel, "reason": "overload"}
    assert last["dropped"] == metrics.registry.get_sample_value("copywatch_frames_dropped_total", overload)
    assert last["dropped"] > 100
    # The newest frames were matched, and alerts have the gap before them.
    assert all(gap.reason == "overload" for alert in alerts for gap in alert.gaps)
    assert len(alerts) == metrics.registry.get_sample_value("copywatch_alert_delay_seconds_count")
    assert alerts
