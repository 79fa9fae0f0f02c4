"""All channels of one process: start them, keep the index fresh, serve health and metrics, stop cleanly."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from functools import partial
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from monitor import __version__
from monitor.alerting.alerts import Alert
from monitor.alerting.outbox import Outbox
from monitor.alerting.post import Post
from monitor.alerting.sinks import CallbackSink, JsonLinesSink, Sink
from monitor.alerting.webhooks import Webhooks, WebhookSink
from monitor.compute import Compute, load_models
from monitor.desk.following import follow_desk, rules_at_start
from monitor.errors import ConfigError
from monitor.evidence.keeper import keeper_of
from monitor.health import Health, Worker
from monitor.heartbeat import beat
from monitor.ingest.glimpses import Glimpses
from monitor.ingest.live import LiveSource
from monitor.ingest.sources import FileSource, Source
from monitor.kafka.fleet import KafkaSink, follow_alerts
from monitor.logs import channel_logs
from monitor.memory import Memory, memory_limits
from monitor.metrics import Metrics
from monitor.notify import feed_watchdog, notify
from monitor.pipeline import Library, Watch, run_stream
from monitor.process import Server, address_of, listeners_of, note, stop_on_signals, tell_disk, wait_or
from monitor.recovery import Kept
from monitor.refreshing import follow, tell_index
from monitor.settings import ChannelSettings, KafkaSettings, Settings, load_settings
from monitor.web.api import Web
from monitor.web.auth import check_exposure
from monitor.web.probes import create_probes
from monitor.web.station import Station
from monitor.web.tokens import Tokens
from reference_db.index import IndexKeeper

logger = logging.getLogger(__name__)

RELOAD_S = 1.0  # how often the configuration is looked at
FLUSH_S = 5.0  # sinks have so long to take the last alerts when the monitor stops
FIRST_RESTART_S, LAST_RESTART_S = 1.0, 30.0
MEMORY_SHARE = 0.95  # of what may be used; beyond it no channel is begun
CHANNEL_BYTES = 100 << 20  # of memory that a channel takes, decoder and all, by `scripts/bench.py channels`
SETTLING_S = 30.0  # after which it has taken it
ADMIT_S = 2.0  # how often it is asked whether there is room again


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
    ends_on_stop: bool = False,
    real_time: bool = True,
) -> None:
    """Watches every channel until SIGTERM, SIGINT or `stop`; `on_ready` is told the address of health and metrics.

    A stop is a pause: what is open stays open and goes on with the next start, unless `ends_on_stop`.
    Channels that come into or go from the file `config` are started and stopped within seconds. Without `real_time`
    a stream is read as fast as it comes.
    """
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    web = settings.web
    check_exposure(web.host, Tokens(settings.data_dir))
    listeners = listeners_of(web)
    metrics = Metrics(CollectorRegistry())
    tell_disk(metrics, settings.data_dir)
    models = await asyncio.to_thread(load_models, settings)
    metrics.build_info.labels(__version__, models.name).set(1)
    keeper = IndexKeeper(settings.data_dir, models.encoder.encoder_id)
    rules = await asyncio.to_thread(rules_at_start, settings.data_dir)
    library = Library(await asyncio.to_thread(keeper.refresh), rules)
    tell_index(library.index, metrics)
    sinks: dict[str, Sink] = {"log": CallbackSink(_log)}
    if settings.alerting.output:
        sinks["file"] = JsonLinesSink(settings.alerting.output)
    sinks["webhooks"] = WebhookSink(Webhooks(settings.data_dir))
    if on_alert is not None:
        sinks["callback"] = CallbackSink(on_alert)
    fleet = _fleet_sink(settings.kafka)
    if fleet is not None:
        sinks["kafka"] = fleet
    compute, glimpses = Compute(models, metrics), Glimpses()
    evidence = keeper_of(settings, models.net, metrics, lambda: library.rules)
    outbox = await asyncio.to_thread(Outbox.open, settings.data_dir, sinks)
    problems: dict[str, str] = {}
    post = Post(outbox, sinks, metrics, timedelta(days=settings.alerting.keep_days), partial(note, problems, "outbox"))
    workers = {"compute": compute.worker, "outbox writer": post.worker, "refresher": Worker()}
    health = Health(problems, ("index", "outbox"), workers, vital=("compute",))
    kept = await asyncio.to_thread(Kept.load, outbox)
    station = Station(
        settings=settings,
        config=config,
        metrics=metrics,
        health=health,
        library=library,
        model=models.name,
        encoder_id=models.encoder.encoder_id,
        channels=lambda: roster.watched,
        glimpses=glimpses,
    )
    face = Web(station)
    apps = face.app, create_probes(metrics.registry, health)
    servers = [
        Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
        for app in apps[: len(listeners)]
    ]

    def is_paused() -> bool:
        return stop.is_set() and not ends_on_stop

    def watch(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        source = glimpses.of(open_source(channel, metrics, real_time=real_time))
        thinking = Watch(library, models, settings, metrics, evidence)
        work = partial(run_stream, source, thinking, post, compute, metrics, is_paused)
        return source, keep_watching(
            source.channel, partial(_recover, kept, source, thinking, post, metrics), work, stop
        )

    try:
        async with asyncio.TaskGroup() as tasks:
            roster, following = Roster(tasks, watch, metrics), list[asyncio.Task[None]]()
            posting = tasks.create_task(post.run())
            for server, listener in zip(servers, listeners, strict=True):
                tasks.create_task(server.serve([listener]))
            beating = tasks.create_task(beat(metrics))
            refreshing = tasks.create_task(follow(keeper, library, metrics, problems, workers["refresher"]))
            heeding = tasks.create_task(follow_desk(settings.data_dir, library, metrics, problems, post))
            feeding = tasks.create_task(feed_watchdog(lambda: health.hangs))
            facing = tasks.create_task(face.run())
            await roster.update(settings.channels)
            reloading = tasks.create_task(reload(config, settings.data_dir, roster))
            if settings.kafka.follow_alerts:
                complain = partial(note, problems, "kafka")
                following.append(tasks.create_task(follow_alerts(settings.kafka, post, metrics, complain)))
            watched = [channel.name for channel in settings.channels]
            for letter in kept.left_over(watched, in_a_fleet=settings.kafka.follow_alerts):
                await post.put(letter)
            address, *_ = addresses = [address_of(listener) for listener in listeners]
            n_references = len(library.index.references)
            logger.info(
                "watching %d channels for %d references; health at %s",
                len(settings.channels),
                n_references,
                " and ".join(addresses),
            )
            notify("READY=1", f"STATUS=watching {len(settings.channels)} channels for {n_references} references")
            if on_ready is not None:
                on_ready(address)
            await stop.wait()
            notify("STOPPING=1")
            for task in (reloading, *following):
                task.cancel()
            await roster.update([])
            refreshing.cancel()
            heeding.cancel()
            beating.cancel()
            if not await post.flush(FLUSH_S):
                logger.warning("some sink has not taken all alerts; it is given them at the next start")
            posting.cancel()
            facing.cancel()
            feeding.cancel()
            for server in servers:
                server.should_exit = True
        if fleet is not None:
            await fleet.close()
    finally:
        compute.close()
        if evidence is not None:
            evidence.close()
        post.close()
        outbox.close()


class Roster:
    """The channels that are being watched; each has a source and a task, and none touches another.

    While memory is nearly used up no channel is begun, but for the first; those that run go on.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        watch: Callable[[ChannelSettings], tuple[Source, Coroutine[None, None, None]]],
        metrics: Metrics,
        limits: Callable[[], list[Memory]] = memory_limits,
    ) -> None:
        self._tasks = tasks
        self._watch = watch
        self._metrics = metrics
        self._limits = limits
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
            self._watched[channel.name] = channel, source, self._tasks.create_task(watching)
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


async def reload(config: Path | None, data_dir: Path, roster: Roster) -> None:
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


def _fleet_sink(kafka: KafkaSettings) -> KafkaSink | None:
    if kafka.follow_alerts and kafka.publish_alerts:
        raise ConfigError("kafka.follow_alerts and kafka.publish_alerts would tell every alert twice; set one of them.")
    return KafkaSink(kafka, asyncio.get_running_loop()) if kafka.publish_alerts else None


async def _recover(kept: Kept, source: Source, watch: Watch, post: Post, metrics: Metrics) -> None:
    """Has the channel go on from what an earlier life kept of it."""
    await post.put(await asyncio.to_thread(kept.give_back, source, watch, metrics))


async def keep_watching(
    channel: str, recover: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """One channel for life: whatever ends it is told once and it is started again; no other channel notices."""
    restart_s = FIRST_RESTART_S
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
                logger.exception("the channel failed; starting it again in %.0f s", restart_s)
                await wait_or(stop, restart_s)
                restart_s = min(2 * restart_s, LAST_RESTART_S)


def _log(alert: Alert) -> None:
    logger.info(
        "%s %s: %s at %.0f-%.0f s shows its %.0f-%.0f s, score %.2f%s",
        alert.type,
        alert.id,
        alert.reference,
        alert.channel_start,
        alert.channel_end,
        alert.reference_start,
        alert.reference_end,
        alert.score,
        f", licensed by {alert.licence}" if alert.licence else "",
    )
