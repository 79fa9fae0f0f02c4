"""The role `serve`: every channel, the dashboard and the API in one process.

`serve` lists the start-up in its order: listen, load, open the outbox, then run. `_Serve` is the running process: how
it opens a channel, which tasks it has, and in which order they stop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import Alert
from monitor.alerting.dispatcher import AlertDispatcher
from monitor.alerting.outbox import Outbox
from monitor.alerting.reviews import watch_rights
from monitor.alerting.sinks import CallbackSink, JsonLinesSink, Sink
from monitor.alerting.webhooks import WebhookSink, WebhookStore
from monitor.config.settings import ChannelSettings, KafkaSettings, Settings
from monitor.errors import ConfigError
from monitor.ingest.latest_frames import LatestFrames
from monitor.ingest.sources import Source
from monitor.kafka.alert_topic import KafkaSink, follow_alerts
from monitor.ops.channel_status import ChannelStatuses
from monitor.ops.health import set_problem
from monitor.ops.heartbeat import measure_loop_lag
from monitor.ops.logs import UNREDACTED
from monitor.ops.metrics import Metrics
from monitor.ops.process import report_disk, stop_on_signals
from monitor.ops.systemd import feed_watchdog, notify
from monitor.runtime.boot import MatchServices, boot
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.channel_roster import ChannelRoster, open_source, run_channel, watch_config
from monitor.runtime.recovery import Recovery
from monitor.runtime.runner import run_stream
from monitor.web.app import WebApp
from monitor.web.auth.gatekeeper import check_exposure
from monitor.web.auth.tokens import Tokens
from monitor.web.context import AppContext
from monitor.web.probes import create_probes
from monitor.web.server import Server, open_listeners, probes_server, url_of, web_server

logger = logging.getLogger(__name__)

FLUSH_S = 5.0  # for the sinks to accept the last alerts when the monitor stops


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
    """Watches every channel until SIGTERM, SIGINT or `stop`; calls `on_ready` with the link to the dashboard.

    A stop is a pause: open alerts stay open and are resumed by the next start, unless `ends_on_stop`.
    Channels added to or removed from the file `config` are started and stopped within seconds. Without `real_time`
    a stream is read as fast as it arrives. `statuses` is written while it runs, for a caller that reads it.
    """
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    check_exposure(settings.web.host, Tokens(settings.data_dir))
    listeners = open_listeners(settings.web)  # first: a port in use is reported before seconds are spent on loading
    metrics = Metrics(CollectorRegistry(), statuses)
    report_disk(metrics, settings.data_dir)
    webhooks, kafka_sink = WebhookStore(settings.data_dir), _kafka_sink(settings.kafka)
    sinks = _sinks(settings, webhooks, kafka_sink, on_alert)
    services = await boot(settings, metrics)
    outbox = await asyncio.to_thread(Outbox.open, settings.data_dir, sinks)
    dispatcher = AlertDispatcher(
        outbox,
        sinks,
        metrics,
        timedelta(days=settings.alerting.keep_days),
        partial(set_problem, services.problems, "outbox"),
    )
    recovery = await asyncio.to_thread(Recovery.load, outbox)
    process = _Serve(services, dispatcher, recovery, stop, ends_on_stop=ends_on_stop, real_time=real_time)
    try:
        await process.run(listeners, config, webhooks, on_ready)
        if kafka_sink is not None:
            await kafka_sink.close()
    finally:
        services.close()
        dispatcher.close()
        outbox.close()


def _sinks(
    settings: Settings,
    webhooks: WebhookStore,
    kafka_sink: KafkaSink | None,
    on_alert: Callable[[Alert], None] | None,
) -> dict[str, Sink]:
    sinks: dict[str, Sink] = {"log": CallbackSink(_log)}
    if settings.alerting.output:
        sinks["file"] = JsonLinesSink(settings.alerting.output)
    sinks["webhooks"] = WebhookSink(webhooks)
    if on_alert is not None:
        sinks["callback"] = CallbackSink(on_alert)
    if kafka_sink is not None:
        sinks["kafka"] = kafka_sink
    return sinks


def _kafka_sink(kafka: KafkaSettings) -> KafkaSink | None:
    if kafka.follow_alerts and kafka.publish_alerts:
        raise ConfigError("kafka.follow_alerts and kafka.publish_alerts would emit every alert twice; set one of them.")
    return KafkaSink(kafka, asyncio.get_running_loop()) if kafka.publish_alerts else None


def _log(alert: Alert) -> None:
    logger.info(
        "%s %s: %s at %.0f-%.0f s shows its %.0f-%.0f s, confidence %.2f%s",
        alert.type,
        alert.id,
        alert.reference,
        alert.channel_start,
        alert.channel_end,
        alert.reference_start,
        alert.reference_end,
        alert.confidence or 0.0,
        f", licensed by {alert.licence}" if alert.licence else "",
        extra={"channel": alert.channel},
    )


class _Serve:
    """The running process: channels, web server and background tasks."""

    def __init__(
        self,
        services: MatchServices,
        dispatcher: AlertDispatcher,
        recovery: Recovery,
        stop: asyncio.Event,
        *,
        ends_on_stop: bool,
        real_time: bool,
    ) -> None:
        self._services = services
        self._settings = services.settings
        self._metrics = services.metrics
        self._dispatcher = dispatcher
        self._recovery = recovery
        self._stop = stop
        self._ends_on_stop = ends_on_stop
        self._real_time = real_time
        self._latest_frames = LatestFrames()
        self._health = services.health("outbox", {"outbox writer": dispatcher.worker})

    async def run(
        self,
        listeners: Sequence[socket.socket],
        config: Path | None,
        webhooks: WebhookStore,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        """Runs until `stop` is set and everything has ended in order."""
        async with asyncio.TaskGroup() as tasks:
            roster = ChannelRoster(tasks, self._open_channel, self._metrics, on_removed=self._latest_frames.forget)
            context = self._app_context(roster, config, webhooks)
            web = WebApp(context)
            outputs = [tasks.create_task(work) for work in (self._dispatcher.run(), web.run(), self._feed_watchdog())]
            probes = probes_server(create_probes(self._metrics, self._health, context.check_reader))
            servers = _start_servers(tasks, listeners, (web_server(web.app, self._settings.web), probes))
            background = (self._services.refresh_index(), self._watch_rights(context), measure_loop_lag(self._metrics))
            updates = [tasks.create_task(work) for work in background]
            await self._start_channels(roster)
            inputs = [tasks.create_task(work) for work in self._inputs(roster, config)]
            self._announce([url_of(listener) for listener in listeners], context, on_ready)

            await self._stop.wait()
            notify("STOPPING=1")
            _cancel(inputs)
            await roster.update([])
            _cancel(updates)
            if not await self._dispatcher.flush(FLUSH_S):
                logger.warning("some sink has not accepted all alerts; they are sent again after the next start")
            _cancel(outputs)
            for server in servers:
                server.should_exit = True
            context.local_secret.remove()

    def _app_context(self, roster: ChannelRoster, config: Path | None, webhooks: WebhookStore) -> AppContext:
        return AppContext(
            settings=self._settings,
            config=config,
            metrics=self._metrics,
            health=self._health,
            library=self._services.library,
            model=self._services.models.name,
            encoder_id=self._services.models.encoder.encoder_id,
            channels=lambda: roster.channels,
            latest_frames=self._latest_frames,
            rights=self._services.rights,
            webhooks=webhooks,
            emitted=self._dispatcher.emitted,
        )

    async def _feed_watchdog(self) -> None:
        await feed_watchdog(lambda: self._health.stuck_worker)

    async def _watch_rights(self, context: AppContext) -> None:
        services = self._services
        await watch_rights(
            services.rights, services.library, self._metrics, services.problems, context.history, self._dispatcher
        )

    # --- channels ----------------------------------------------------------------------------------------------------

    async def _start_channels(self, roster: ChannelRoster) -> None:
        logger.info("restoring channels: %d snapshots are stored", len(self._recovery.snapshots))
        await roster.update(self._settings.channels)
        names = [channel.name for channel in self._settings.channels]
        for entry in self._recovery.end_removed(names, with_kafka=self._settings.kafka.follow_alerts):
            await self._dispatcher.put(entry)

    def _open_channel(self, channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        """The source of a channel, and the coroutine that watches it."""
        source = self._latest_frames.wrap(open_source(channel, self._metrics, real_time=self._real_time))
        monitor = self._services.channel_monitor()
        run = partial(
            run_stream, source, monitor, self._dispatcher, self._services.batcher, self._metrics, self._is_paused
        )
        return source, run_channel(source.channel, partial(self._restore, source, monitor), run, self._stop)

    async def _restore(self, source: Source, monitor: ChannelMonitor) -> None:
        """Restores the channel from the snapshot of the previous run."""
        entry = await asyncio.to_thread(self._recovery.restore, source, monitor, self._metrics)
        await self._dispatcher.put(entry)

    def _is_paused(self) -> bool:
        return self._stop.is_set() and not self._ends_on_stop

    def _inputs(self, roster: ChannelRoster, config: Path | None) -> list[Coroutine[None, None, None]]:
        """What adds channels or alerts while the process runs; stopped first."""
        inputs = [watch_config(config, self._settings.data_dir, roster)]
        if self._settings.kafka.follow_alerts:
            report = partial(set_problem, self._services.problems, "kafka")
            inputs.append(follow_alerts(self._settings.kafka, self._dispatcher, self._metrics, report))
        return inputs

    # --- ready -------------------------------------------------------------------------------------------------------

    def _announce(self, addresses: Sequence[str], context: AppContext, on_ready: Callable[[str], None] | None) -> None:
        n_channels, n_references = len(self._settings.channels), len(self._services.library.index.references)
        state = f"watching {n_channels} channels for {n_references} references"
        logger.info("%s; health at %s", state, " and ".join(addresses))
        dashboard = f"{_local(addresses[0])}/"
        if not context.tokens.any():
            context.local_secret.store()
            dashboard = context.local_secret.link(_local(addresses[0]))
        logger.info("Dashboard: %s", dashboard, extra={UNREDACTED: True})
        notify("READY=1", f"STATUS={state}")
        if on_ready is not None:
            on_ready(dashboard)


def _local(address: str) -> str:
    """The address to open on this machine: a server on all addresses is reached on loopback."""
    return address.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")


def _start_servers(
    tasks: asyncio.TaskGroup, listeners: Sequence[socket.socket], servers: tuple[Server, Server]
) -> list[Server]:
    """Starts the web server, and the server of probes if it has its own port."""
    for server, listener in zip(servers, listeners, strict=False):
        tasks.create_task(server.serve([listener]))
        logger.info("listening on %s", url_of(listener))
    return list(servers[: len(listeners)])


def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
