"""The channels of one process: started and stopped as the configuration changes, each restarted when it fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path

from monitor.config.settings import ChannelSettings, load_settings
from monitor.errors import ConfigError
from monitor.ingest.live_source import LiveSource
from monitor.ingest.sources import FileSource, Source
from monitor.ops.backoff import Backoff
from monitor.ops.channel_status import ChannelStatus
from monitor.ops.logs import channel_logs
from monitor.ops.memory_limits import MemoryLimit, memory_limits
from monitor.ops.metrics import Metrics

logger = logging.getLogger(__name__)

RELOAD_S = 1.0  # how often the configuration is looked at
MEMORY_SHARE = 0.95  # of what may be used; beyond it no channel is begun
CHANNEL_BYTES = 100 << 20  # of memory that a channel takes, decoder and all, by `scripts/bench.py channels`
SETTLING_S = 30.0  # after which it has taken it
ADMIT_S = 2.0  # how often it is asked whether there is room again


def open_source(channel: ChannelSettings, metrics: Metrics, *, real_time: bool = True) -> Source:
    """The source for a channel's address: a network stream, or a file that is played once."""
    if "://" in channel.url and not channel.url.startswith("file://"):
        return LiveSource(channel, metrics, real_time=real_time)
    status = metrics.channels.of(channel.name)
    return FileSource(Path(channel.url.removeprefix("file://")), status, mode=channel.mode)


class ChannelRoster:
    """The channels that are being watched; each has a source and a task, and none touches another.

    While memory is nearly used up no channel is begun, but for the first; those that run go on.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        watch: Callable[[ChannelSettings], tuple[Source, Coroutine[None, None, None]]],
        metrics: Metrics,
        limits: Callable[[], list[MemoryLimit]] = memory_limits,
        on_removed: Callable[[str], None] = lambda channel: None,
    ) -> None:
        self._tasks = tasks
        self._watch = watch
        self._metrics = metrics
        self._limits = limits
        self._on_removed = on_removed  # called once nothing is read from the channel any more
        self._watched: dict[str, tuple[ChannelSettings, Source, asyncio.Task[None]]] = {}
        self._begun: deque[float] = deque()  # when the youngest channels began
        self._held_back: list[ChannelSettings] = []
        self._admitting: asyncio.Task[None] | None = None

    async def update(self, wanted: list[ChannelSettings]) -> None:
        """Stops what is no longer wanted, to the last word on its alerts, then starts what is new; the rest goes on."""
        gone = [name for name, (channel, _, _) in self._watched.items() if channel not in wanted]
        await asyncio.gather(*(self._watched[name][1].close() for name in gone))
        await asyncio.gather(*(self._watched[name][2] for name in gone))
        for name in gone:
            del self._watched[name]
            self._metrics.forget(name)
            self._on_removed(name)
        self._held_back = [channel for channel in wanted if channel.name not in self._watched]
        self._admit()
        if self._held_back and (self._admitting is None or self._admitting.done()):
            logger.warning("memory is nearly used up: %d channels wait for room", len(self._held_back))
            self._admitting = self._tasks.create_task(self._keep_admitting())
        elif not self._held_back and self._admitting is not None:
            self._admitting.cancel()

    def _admit(self) -> None:
        """Begins those for which there is memory."""
        while self._held_back and (self._room() > 0 or not self._watched):
            channel = self._held_back.pop(0)
            source, watching = self._watch(channel)
            task = self._tasks.create_task(watching)
            task.add_done_callback(partial(_end, self._metrics.channels.of(channel.name)))
            self._watched[channel.name] = channel, source, task
            self._begun.append(time.monotonic())
        self._metrics.channels_held_back.set(len(self._held_back))

    def _room(self) -> int:
        """How many more channels the memory has room for; one that has just begun has not taken its share yet."""
        while self._begun and time.monotonic() - self._begun[0] > SETTLING_S:
            self._begun.popleft()
        left_bytes = min((memory.left_bytes(MEMORY_SHARE) for memory in self._limits()), default=math.inf)
        return int(min(left_bytes / CHANNEL_BYTES, 1e6)) - len(self._begun)

    async def _keep_admitting(self) -> None:
        while self._held_back:
            await asyncio.sleep(ADMIT_S)
            self._admit()
        logger.info("every channel is watched")

    @property
    def channels(self) -> list[ChannelSettings]:
        return [channel for channel, _, _ in self._watched.values()]

    @property
    def watched(self) -> list[tuple[ChannelSettings, bool]]:
        """The channels, and whether each has come to its end, as a file does."""
        return [(channel, task.done()) for channel, _, task in list(self._watched.values())]


def _end(status: ChannelStatus, task: object) -> None:
    status.end()


async def reload(config: Path | None, data_dir: Path, roster: ChannelRoster) -> None:
    """Follows the channels of the file; other settings take effect at the next start. A wrong file changes nothing."""
    if config is None:
        return
    known = await asyncio.to_thread(_mark, config)
    while True:
        await asyncio.sleep(RELOAD_S)
        mark = await asyncio.to_thread(_mark, config)
        if mark == known or mark is None:
            continue
        known = mark
        try:
            settings = await asyncio.to_thread(load_settings, config, data_dir=data_dir)
        except ConfigError as error:
            logger.error("the channels stay as they are: %s", error)
            continue
        before, after = {one.name for one in roster.channels}, {one.name for one in settings.channels}
        await roster.update(settings.channels)
        logger.info(
            "channels changed: %d new, %d gone, %d in all", len(after - before), len(before - after), len(after)
        )


def _mark(config: Path) -> tuple[int, int, int] | None:
    """What changes when the file does; None while it is not there (an editor may be replacing it)."""
    try:
        status = config.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def keep_watching(
    channel: str, recover: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """One channel for life: whatever ends it is told once and it is started again; no other channel notices."""
    backoff = Backoff()
    with channel_logs(channel):
        try:
            await recover()
        except Exception:
            logger.exception("what was kept of the channel could not be gone on from; it begins anew")
        while not stop.is_set():
            try:
                await work()
                logger.info("the stream ended")
                return
            except Exception:
                logger.exception("the channel failed; starting it again in %.0f s", backoff.next_s)
                await backoff.wait(stop)
