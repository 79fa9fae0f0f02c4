"""The roster: which channels run, that memory limits hold channels back, and that nothing is left of removed ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from monitor.config.settings import ChannelSettings
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.latest_frames import LatestFrames
from monitor.ingest.sources import Position, Sample, Source
from monitor.ops.memory_limits import MemoryLimit
from monitor.ops.metrics import Metrics
from monitor.runtime import channel_roster
from monitor.runtime.channel_roster import CHANNEL_BYTES, ChannelRoster
from reference_db.media.frames import Frame
from tests.support.media import write_film


class QueuedSource:
    """A source whose frames a test puts; after `close` it hands over what is still queued, as sources do."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._queue: asyncio.Queue[Sample | None] = asyncio.Queue()

    def put(self, level: int) -> None:
        """Queues a grey picture."""
        frame = Frame(0, 0.0, np.full((16, 16, 3), level, np.uint8))
        epoch = ChannelEpoch(self.channel, "epoch", None)
        self._queue.put_nowait(Sample(epoch, 0, frame, datetime.now(UTC), "unseen", {}))

    def resume(self, position: Position) -> None: ...

    async def samples(self) -> AsyncGenerator[Sample, None]:
        while (sample := await self._queue.get()) is not None:
            yield sample
            self._queue.task_done()

    async def until_taken(self) -> None:
        """Returns when all that was put is processed."""
        await self._queue.join()

    async def close(self) -> None:
        self._queue.put_nowait(None)


async def read_all(source: Source) -> None:
    async for _ in source.samples():
        pass


def channel(name: str) -> ChannelSettings:
    return ChannelSettings(name=name, url=f"http://h/{name}")


def test_channels_wait_until_there_is_memory_but_the_first_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_roster, "ADMIT_S", 0.01)
    metrics, free_bytes, started = Metrics(CollectorRegistry()), [0.0], asyncio.Queue[str]()

    def start(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        source = QueuedSource(channel.name)
        started.put_nowait(channel.name)
        return source, read_all(source)

    def names(roster: ChannelRoster) -> list[str]:
        return [one.name for one in roster.channels]

    async def run() -> None:
        wanted = [channel(name) for name in ("one", "two", "three", "four")]
        async with asyncio.TaskGroup() as tasks:
            limit = 100 * CHANNEL_BYTES
            roster = ChannelRoster(tasks, start, metrics, lambda: [MemoryLimit(limit, 0.95 * limit - free_bytes[0])])
            await roster.update(wanted)
            assert [await started.get(), *names(roster)] == ["one", "one"]
            assert metrics.registry.get_sample_value("copywatch_channels_held_back") == 3
            free_bytes[0] = 2.5 * CHANNEL_BYTES  # room for two, of which one started just now
            assert await started.get() == "two"  # the roster checks again by itself
            await asyncio.sleep(0.1)  # what must not happen in this time cannot be waited for
            assert names(roster) == ["one", "two"]
            await roster.update(wanted[:3])
            assert names(roster) == ["one", "two"]
            free_bytes[0] = 50.0 * CHANNEL_BYTES
            assert await started.get() == "three"
            assert names(roster) == ["one", "two", "three"]
            assert metrics.registry.get_sample_value("copywatch_channels_held_back") == 0
            free_bytes[0] = 0.0
            await roster.update([])

    asyncio.run(asyncio.wait_for(run(), 60))


def test_nothing_is_left_of_a_removed_channel_when_it_is_added_again() -> None:
    metrics, frames, sources = Metrics(CollectorRegistry()), LatestFrames(), dict[str, QueuedSource]()

    def start(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        metrics.channels.of(channel.name).enter("up")
        sources[channel.name] = QueuedSource(channel.name)
        source = frames.wrap(sources[channel.name])
        return source, read_all(source)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            roster = ChannelRoster(tasks, start, metrics, list, on_removed=frames.forget)
            await roster.update([channel("one"), channel("two")])
            sources["one"].put(10)
            sources["two"].put(20)
            await asyncio.gather(sources["one"].until_taken(), sources["two"].until_taken())
            first, other = frames.jpeg("one"), frames.jpeg("two")
            assert None not in (first, other)
            sources["one"].put(30)  # still queued when the channel is removed
            await roster.update([channel("two")])
            assert (frames.jpeg("one"), frames.jpeg("two")) == (None, other)
            assert [report.channel for report in metrics.channels.reports()] == ["two"]
            await roster.update([channel("one"), channel("two")])
            assert frames.jpeg("one") is None
            sources["one"].put(10)
            await sources["one"].until_taken()
            assert frames.jpeg("one") == first
            await roster.update([])

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_status_of_a_channel_whose_task_is_done_is_ended() -> None:
    metrics = Metrics(CollectorRegistry())

    async def play() -> None:
        metrics.channels.of("file").count_processed()

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            roster = ChannelRoster(tasks, lambda one: (QueuedSource(one.name), play()), metrics, list)
            await roster.update([channel("file")])
            assert roster.channels == [channel("file")]

    asyncio.run(asyncio.wait_for(run(), 60))
    report = metrics.channels.of("file").report()
    assert (report.state, report.n_processed) == ("ended", 1)


def test_a_file_that_cannot_be_read_is_failed_with_the_reason_and_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, missing = Metrics(CollectorRegistry()), ChannelSettings(name="file", url=str(tmp_path / "later.ts"))

    async def fail() -> None:
        stop = asyncio.Event()

        async def work() -> None:
            try:
                await read_all(channel_roster.open_source(missing, metrics))
            finally:
                stop.set()

        await channel_roster.run_channel("file", lambda: asyncio.sleep(0), work, stop)

    asyncio.run(fail())
    failed, sentence = metrics.channels.of("file").report(), "later.ts does not exist; check the path"
    assert (failed.state, failed.cause, failed.reason) == ("failed", "missing", sentence)
    (line,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert line.getMessage().startswith(f"{sentence}; trying again in")
    assert line.exc_info is None
    write_film(tmp_path / "later.ts", 1, 2)
    asyncio.run(read_all(channel_roster.open_source(missing, metrics)))
    read = metrics.channels.of("file").report()
    assert (read.source_state, read.reason) == (None, None)
