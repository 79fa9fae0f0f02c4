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
from reference_db.errors import CatalogError

logger = logging.getLogger(__name__)

RELOAD_S = 1.0  # between two checks of the configuration file
MEMORY_SHARE = 0.95  # of the memory limit; beyond it no channel is started
CHANNEL_BYTES = 100 << 20  # memory of a channel with its decoder, by `scripts/bench.py channels`
SETTLING_S = 30.0  # after which a started channel has allocated it
ADMIT_S = 2.0  # between two checks whether there is memory for held-back channels


def open_source(channel: ChannelSettings, metrics: Metrics, *, real_time: bool = True) -> Source:
    """The source for a channel's address: a network stream, or a file that is played once."""
    if "://" in channel.url and not channel.url.startswith("file://"):
        return LiveSource(channel, metrics, real_time=real_time)
    status = metrics.channels.of(channel.name)
    return FileSource(Path(channel.url.removeprefix("file://")), status, mode=channel.mode)


class ChannelRoster:
    """The channels that are monitored; each has a source and a task, independent of the others.

    While memory is nearly used up no further channel is started, except the first; running ones continue.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        open_channel: Callable[[ChannelSettings], tuple[Source, Coroutine[None, None, None]]],
        metrics: Metrics,
        limits: Callable[[], list[MemoryLimit]] = memory_limits,
        on_removed: Callable[[str], None] = lambda channel: None,
    ) -> None:
        self._tasks = tasks
        self._open_channel = open_channel
        self._metrics = metrics
        self._limits = limits
        self._on_removed = on_removed  # called once nothing is read from the channel any more
        self._running: dict[str, tuple[ChannelSettings, Source, asyncio.Task[None]]] = {}
        self._started: deque[float] = deque()  # when each of the newest channels started
        self._held_back: list[ChannelSettings] = []
        self._admitting: asyncio.Task[None] | None = None

    async def update(self, wanted: list[ChannelSettings]) -> None:
        """Stops channels that are no longer wanted, after their last alerts, then starts new ones; others continue."""
        removed = [name for name, (channel, _, _) in self._running.items() if channel not in wanted]
        await asyncio.gather(*(self._running[name][1].close() for name in removed))
        await asyncio.gather(*(self._running[name][2] for name in removed))
        for name in removed:
            del self._running[name]
            self._metrics.forget(name)
            self._on_removed(name)
        self._held_back = [channel for channel in wanted if channel.name not in self._running]
        self._admit()
        if self._held_back and (self._admitting is None or self._admitting.done()):
            logger.warning("memory is nearly used up: %d channels wait for memory", len(self._held_back))
            self._admitting = self._tasks.create_task(self._keep_admitting())
        elif not self._held_back and self._admitting is not None:
            self._admitting.cancel()

    def _admit(self) -> None:
        """Starts the channels for which there is memory."""
        while self._held_back and (self._room() > 0 or not self._running):
            channel = self._held_back.pop(0)
            source, running = self._open_channel(channel)
            task = self._tasks.create_task(running)
            task.add_done_callback(partial(_end, self._metrics.channels.of(channel.name)))
            self._running[channel.name] = channel, source, task
            self._started.append(time.monotonic())
        self._metrics.channels_held_back.set(len(self._held_back))

    def _room(self) -> int:
        """How many more channels fit into memory; one that has just started has not allocated its share yet."""
        while self._started and time.monotonic() - self._started[0] > SETTLING_S:
            self._started.popleft()
        left_bytes = min((memory.left_bytes(MEMORY_SHARE) for memory in self._limits()), default=math.inf)
        return int(min(left_bytes / CHANNEL_BYTES, 1e6)) - len(self._started)

    async def _keep_admitting(self) -> None:
        while self._held_back:
            await asyncio.sleep(ADMIT_S)
            self._admit()
        logger.info("every channel is started")

    @property
    def channels(self) -> list[ChannelSettings]:
        """The started channels, those that have ended too; any thread may call."""
        return [channel for channel, _, _ in list(self._running.values())]


def _end(status: ChannelStatus, task: object) -> None:
    status.end()


async def watch_config(config: Path | None, data_dir: Path, roster: ChannelRoster) -> None:
    """Applies channel changes of the file; other settings wait for a restart. An invalid file changes nothing."""
    if config is None:
        return
    last = await asyncio.to_thread(_file_stamp, config)
    while True:
        await asyncio.sleep(RELOAD_S)
        stamp = await asyncio.to_thread(_file_stamp, config)
        if stamp == last or stamp is None:
            continue
        last = stamp
        try:
            settings = await asyncio.to_thread(load_settings, config, data_dir=data_dir)
        except ConfigError as error:
            logger.error("channels unchanged, the configuration is invalid: %s", error)
            continue
        before, after = {one.name for one in roster.channels}, {one.name for one in settings.channels}
        await roster.update(settings.channels)
        logger.info(
            "channels changed: %d added, %d removed, %d in total", len(after - before), len(before - after), len(after)
        )


def _file_stamp(config: Path) -> tuple[int, int, int] | None:
    """A value that changes with the file; None while it does not exist (an editor may be replacing it)."""
    try:
        status = config.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def run_channel(
    channel: str, recover: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Runs one channel until its stream ends: an error is logged and the channel restarted; others are not affected."""
    backoff = Backoff()
    with channel_logs(channel):
        try:
            await recover()
        except Exception:
            logger.exception("could not restore the channel from its snapshot; starting fresh")
        while not stop.is_set():
            try:
                await work()
                logger.info("the stream ended")
                return
            except CatalogError as error:  # the file cannot be decoded
                logger.error("%s; trying again in %.0f s", str(error).rstrip("."), backoff.next_s)
                await backoff.wait(stop)
            except Exception:
                logger.exception("the channel failed; restarting it in %.0f s", backoff.next_s)
                await backoff.wait(stop)
