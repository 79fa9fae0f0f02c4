"""All channels of one process: start them, keep the index fresh, serve health and metrics, stop cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from monitor import __version__
from monitor.alerting.alerts import Alert
from monitor.alerting.sinks import CallbackSink, JsonLinesSink, Sink
from monitor.compute import Compute, load_models
from monitor.errors import ConfigError
from monitor.ingest.live import LiveSource
from monitor.ingest.sources import FileSource, Source
from monitor.logs import channel_logs
from monitor.metrics import Metrics
from monitor.pipeline import Library, Watch, run_stream
from monitor.settings import ChannelSettings, Settings, load_settings
from monitor.web.api import create_app
from reference_db.catalog import Catalog
from reference_db.errors import CatalogError
from reference_db.index import ReferenceIndex

logger = logging.getLogger(__name__)

RELOAD_S = 1.0  # how often the configuration is looked at
REFRESH_S = 2.0  # how often the catalogue is asked whether it changed
FIRST_RESTART_S, LAST_RESTART_S = 1.0, 30.0


def open_source(channel: ChannelSettings, metrics: Metrics, *, real_time: bool = True) -> Source:
    """The source for a channel's address: a network stream, or a file that is played once."""
    if "://" in channel.url and not channel.url.startswith("file://"):
        return LiveSource(channel, metrics, real_time=real_time)
    return FileSource(channel.name, Path(channel.url.removeprefix("file://")), metrics, mode=channel.mode)


async def serve(
    settings: Settings,
    *,
    config: Path | None = None,
    on_alert: Callable[[Alert], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    real_time: bool = True,
) -> None:
    """Watches every channel until SIGTERM, SIGINT or `stop`; `on_ready` is told the address of health and metrics.

    Channels that come into or go from the file `config` are started and stopped within seconds. Without `real_time`
    a stream is read as fast as it comes.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = _listen(settings)
    metrics = Metrics(CollectorRegistry())
    models = await asyncio.to_thread(load_models, settings)
    metrics.build_info.labels(__version__, models.name).set(1)
    library = Library(await asyncio.to_thread(_build, settings, models.encoder.encoder_id, metrics))
    sinks: list[Sink] = [JsonLinesSink(settings.alerting.output)] if settings.alerting.output else []
    sinks.append(CallbackSink(_log))
    if on_alert is not None:
        sinks.append(CallbackSink(on_alert))
    compute = Compute(models, metrics)
    problems: dict[str, str] = {}
    server = _Server(uvicorn.Config(create_app(metrics.registry, lambda: problems), log_config=None, lifespan="off"))

    def watch(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        source = open_source(channel, metrics, real_time=real_time)
        return source, _watch(source, Watch(library, models, settings, metrics), sinks, compute, metrics)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listener]))
            refreshing = tasks.create_task(_refresh(settings, library, models.encoder.encoder_id, metrics, problems))
            roster = Roster(tasks, watch, metrics)
            await roster.update(settings.channels)
            reloading = tasks.create_task(_reload(config, settings.data_dir, roster))
            host, port = listener.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            n_references = len(library.index.references)
            logger.info(
                "watching %d channels for %d references; health at %s", len(settings.channels), n_references, address
            )
            if on_ready is not None:
                on_ready(address)
            await stop.wait()
            reloading.cancel()
            await roster.update([])
            refreshing.cancel()
            server.should_exit = True
    finally:
        compute.close()


class Roster:
    """The channels that are being watched; each has a source and a task, and none touches another."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        watch: Callable[[ChannelSettings], tuple[Source, Coroutine[None, None, None]]],
        metrics: Metrics,
    ) -> None:
        self._tasks = tasks
        self._watch = watch
        self._metrics = metrics
        self._watched: dict[str, tuple[ChannelSettings, Source, asyncio.Task[None]]] = {}

    async def update(self, wanted: list[ChannelSettings]) -> None:
        """Stops what is no longer wanted, to the last word on its alerts, then starts what is new; the rest goes on."""
        gone = [name for name, (channel, _, _) in self._watched.items() if channel not in wanted]
        await asyncio.gather(*(self._watched[name][1].close() for name in gone))
        await asyncio.gather(*(self._watched[name][2] for name in gone))
        for name in gone:
            del self._watched[name]
            self._metrics.forget(name)
        for channel in wanted:
            if channel.name not in self._watched:
                source, watching = self._watch(channel)
                self._watched[channel.name] = channel, source, self._tasks.create_task(watching)

    @property
    def channels(self) -> list[ChannelSettings]:
        return [channel for channel, _, _ in self._watched.values()]


async def _reload(config: Path | None, data_dir: Path, roster: Roster) -> None:
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


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: stopping is ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(settings: Settings) -> socket.socket:
    web = settings.web
    family = socket.AF_INET6 if ":" in web.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((web.host, web.port))
        listener.listen()  # at once: who is told the address may connect before the server runs
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {web.host}:{web.port} ({error.strerror}); set web.port.") from error
    return listener


def _build(settings: Settings, encoder_id: str, metrics: Metrics) -> ReferenceIndex:
    with Catalog.open(settings.data_dir) as catalog:
        index = ReferenceIndex.build(catalog, encoder_id)
    for id, what in index.damaged.items():
        logger.error("reference %s is not searched: %s; run `copywatch refs verify`", id, what)
    metrics.references.set(len(index.references))
    metrics.reference_seconds.set(sum(reference.n_seconds for reference in index.references))
    metrics.index_generation.set(index.generation)
    return index


def _generation(settings: Settings) -> int:
    with Catalog.open(settings.data_dir) as catalog:
        return catalog.generation()


async def _refresh(
    settings: Settings, library: Library, encoder_id: str, metrics: Metrics, problems: dict[str, str]
) -> None:
    """Swaps in a new index soon after the catalogue changed; matching goes on with the old one meanwhile."""
    while True:
        await asyncio.sleep(REFRESH_S)
        try:
            if await asyncio.to_thread(_generation, settings) != library.index.generation:
                library.replace(await asyncio.to_thread(_build, settings, encoder_id, metrics))
                logger.info("index refreshed: %d references", len(library.index.references))
            problems.pop("index", None)
        except CatalogError as error:
            if problems.get("index") != str(error):
                logger.error("the index is stale: %s", error)
            problems["index"] = str(error)


async def _watch(source: Source, watch: Watch, sinks: list[Sink], compute: Compute, metrics: Metrics) -> None:
    """One channel for life: whatever ends it is told once and it is started again; no other channel notices."""
    restart_s = FIRST_RESTART_S
    with channel_logs(source.channel):
        while True:
            try:
                await run_stream(source, watch, sinks, compute, metrics)
                logger.info("the stream ended")
                return
            except Exception:
                logger.exception("the channel failed; starting it again in %.0f s", restart_s)
                await asyncio.sleep(restart_s)
                restart_s = min(2 * restart_s, LAST_RESTART_S)


def _log(alert: Alert) -> None:
    logger.info(
        "%s %s: %s at %.0f-%.0f s shows its %.0f-%.0f s, score %.2f",
        alert.type,
        alert.id,
        alert.reference,
        alert.channel_start,
        alert.channel_end,
        alert.reference_start,
        alert.reference_end,
        alert.score,
    )
