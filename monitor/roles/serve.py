"""All channels of one process: start them, keep the index fresh, serve health and metrics, stop cleanly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from monitor import __version__
from monitor.alerting.alerts import Alert
from monitor.alerting.dispatcher import AlertDispatcher
from monitor.alerting.outbox import Outbox
from monitor.alerting.reviews import load_rules, watch_rights
from monitor.alerting.sinks import CallbackSink, JsonLinesSink, Sink
from monitor.alerting.webhooks import WebhookSink, WebhookStore
from monitor.config.settings import ChannelSettings, KafkaSettings, Settings
from monitor.errors import ConfigError
from monitor.evidence.keeper import keeper_of
from monitor.ingest.latest_frames import LatestFrames
from monitor.ingest.sources import Source
from monitor.kafka.alert_topic import KafkaSink, follow_alerts
from monitor.ops.channel_status import ChannelStatuses
from monitor.ops.health import Health, Worker, set_problem
from monitor.ops.heartbeat import measure_loop_lag
from monitor.ops.metrics import Metrics
from monitor.ops.process import report_disk, stop_on_signals
from monitor.ops.systemd import feed_watchdog, notify
from monitor.rights.store import RightsStore
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.batcher import Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.channel_roster import ChannelRoster, open_source, run_channel, watch_config
from monitor.runtime.index_refresh import report_index, watch_catalog
from monitor.runtime.models import load_models
from monitor.runtime.recovery import Recovery
from monitor.runtime.runner import run_stream
from monitor.web.app import WebApp
from monitor.web.auth.gatekeeper import check_exposure
from monitor.web.auth.tokens import Tokens
from monitor.web.context import AppContext
from monitor.web.probes import create_probes
from monitor.web.server import Server, open_listeners, url_of
from reference_db.search.index import IndexKeeper

logger = logging.getLogger(__name__)

FLUSH_S = 5.0  # sinks have so long to take the last alerts when the monitor stops


async def serve(
    settings: Settings,
    *,
    config: Path | None = None,
    on_alert: Callable[[Alert], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    ends_on_stop: bool = False,
    real_time: bool = True,
    statuses: ChannelStatuses | None = None,
) -> None:
    """Watches every channel until SIGTERM, SIGINT or `stop`; `on_ready` is told the address of health and metrics.

    A stop is a pause: what is open stays open and goes on with the next start, unless `ends_on_stop`.
    Channels that come into or go from the file `config` are started and stopped within seconds. Without `real_time`
    a stream is read as fast as it comes. `statuses` are written while it runs, for a caller that reads them.
    """
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    web = settings.web
    check_exposure(web.host, Tokens(settings.data_dir))
    listeners = open_listeners(web)
    metrics = Metrics(CollectorRegistry(), statuses)
    report_disk(metrics, settings.data_dir)
    models = await asyncio.to_thread(load_models, settings)
    metrics.build_info.labels(__version__, models.name).set(1)
    keeper = IndexKeeper(settings.data_dir, models.encoder.encoder_id)
    rights, webhooks = RightsStore(settings.data_dir), WebhookStore(settings.data_dir)
    rules = await asyncio.to_thread(load_rules, rights)
    library = ActiveLibrary(await asyncio.to_thread(keeper.refresh), rules)
    report_index(library.index, metrics)
    sinks: dict[str, Sink] = {"log": CallbackSink(_log)}
    if settings.alerting.output:
        sinks["file"] = JsonLinesSink(settings.alerting.output)
    sinks["webhooks"] = WebhookSink(webhooks)
    if on_alert is not None:
        sinks["callback"] = CallbackSink(on_alert)
    fleet = _fleet_sink(settings.kafka)
    if fleet is not None:
        sinks["kafka"] = fleet
    compute, glimpses = Batcher(models, metrics), LatestFrames()
    evidence = keeper_of(settings, models.net, metrics, lambda: library.rules)
    outbox = await asyncio.to_thread(Outbox.open, settings.data_dir, sinks)
    problems: dict[str, str] = {}
    dispatcher = AlertDispatcher(
        outbox, sinks, metrics, timedelta(days=settings.alerting.keep_days), partial(set_problem, problems, "outbox")
    )
    workers = {"compute": compute.worker, "outbox writer": dispatcher.worker, "refresher": Worker()}
    health = Health(problems, ("index", "outbox"), workers, vital=("compute",))
    kept = await asyncio.to_thread(Recovery.load, outbox)
    station = AppContext(
        settings=settings,
        config=config,
        metrics=metrics,
        health=health,
        library=library,
        model=models.name,
        encoder_id=models.encoder.encoder_id,
        channels=lambda: roster.watched,
        latest_frames=glimpses,
        rights=rights,
        webhooks=webhooks,
        emitted=dispatcher.emitted,
    )
    face = WebApp(station)
    apps = face.app, create_probes(metrics, health)
    servers = [
        Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
        for app in apps[: len(listeners)]
    ]

    def is_paused() -> bool:
        return stop.is_set() and not ends_on_stop

    def watch(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        source = glimpses.wrap(open_source(channel, metrics, real_time=real_time))
        thinking = ChannelMonitor(library, models, settings, metrics, evidence)
        work = partial(run_stream, source, thinking, dispatcher, compute, metrics, is_paused)
        return source, run_channel(
            source.channel, partial(_recover, kept, source, thinking, dispatcher, metrics), work, stop
        )

    try:
        async with asyncio.TaskGroup() as tasks:
            roster, following = (
                ChannelRoster(tasks, watch, metrics, on_removed=glimpses.forget),
                list[asyncio.Task[None]](),
            )
            dispatching = tasks.create_task(dispatcher.run())
            for server, listener in zip(servers, listeners, strict=True):
                tasks.create_task(server.serve([listener]))
            beating = tasks.create_task(measure_loop_lag(metrics))
            refreshing = tasks.create_task(watch_catalog(keeper, library, metrics, problems, workers["refresher"]))
            heeding = tasks.create_task(watch_rights(rights, library, metrics, problems, station.history, dispatcher))
            feeding = tasks.create_task(feed_watchdog(lambda: health.stuck_worker))
            facing = tasks.create_task(face.run())
            await roster.update(settings.channels)
            reloading = tasks.create_task(watch_config(config, settings.data_dir, roster))
            if settings.kafka.follow_alerts:
                complain = partial(set_problem, problems, "kafka")
                following.append(tasks.create_task(follow_alerts(settings.kafka, dispatcher, metrics, complain)))
            watched = [channel.name for channel in settings.channels]
            for entry in kept.end_removed(watched, with_kafka=settings.kafka.follow_alerts):
                await dispatcher.put(entry)
            address, *_ = addresses = [url_of(listener) for listener in listeners]
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
            if not await dispatcher.flush(FLUSH_S):
                logger.warning("some sink has not taken all alerts; it is given them at the next start")
            dispatching.cancel()
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
        dispatcher.close()
        outbox.close()


def _fleet_sink(kafka: KafkaSettings) -> KafkaSink | None:
    if kafka.follow_alerts and kafka.publish_alerts:
        raise ConfigError("kafka.follow_alerts and kafka.publish_alerts would tell every alert twice; set one of them.")
    return KafkaSink(kafka, asyncio.get_running_loop()) if kafka.publish_alerts else None


async def _recover(
    kept: Recovery, source: Source, watch: ChannelMonitor, dispatcher: AlertDispatcher, metrics: Metrics
) -> None:
    """Has the channel go on from what an earlier life kept of it."""
    await dispatcher.put(await asyncio.to_thread(kept.restore, source, watch, metrics))


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
