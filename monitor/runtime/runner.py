"""The async shell around one channel: source -> batcher and channel monitor -> delivery.

`check` and `serve` run this same code; a file merely never makes it wait. Everything that decides is in
`channel_monitor.py`; only this file awaits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from monitor.alerting.alerts import STARTED
from monitor.alerting.outbox import OutboxEntry
from monitor.errors import MonitorError
from monitor.ingest.clock import MAX_SILENCE_S
from monitor.ingest.sources import Position, Sample, Source
from monitor.ops.metrics import Metrics
from monitor.runtime.batcher import Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.match_step import Outcome
from reference_db.errors import CatalogError

SNAPSHOT_EVERY_S = 2.0  # of a channel that emits no alerts; one that does stores a snapshot with each
SILENCE_S = MAX_SILENCE_S + 1.0  # after which open alerts end: the stream's clock starts a new epoch then
MAX_OUTCOMES = 64  # that wait for delivery; beyond it matching waits


class AlertDelivery(Protocol):
    """Takes the alerts of all channels, with their snapshots. Called in the event loop, once per outcome."""

    stores_snapshots: bool  # if not, none are made

    async def put(self, entry: OutboxEntry) -> None:
        """Returns once the entry is stored."""
        ...


async def run_stream(
    source: Source,
    monitor: ChannelMonitor,
    delivery: AlertDelivery,
    batcher: Batcher,
    metrics: Metrics,
    is_paused: Callable[[], bool] = lambda: False,
) -> None:
    """Returns when the source ends, with every segment closed and every alert delivered; then raises its error, if any.

    While `is_paused` is true, the end of the source is not the end of the stream: nothing is closed, and the last
    snapshot has the open alerts.
    """
    outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue(maxsize=MAX_OUTCOMES)  # when full, matching waits
    async with asyncio.TaskGroup() as stages:
        matching = stages.create_task(
            _SourceRunner(source, monitor, batcher, outcomes, metrics, is_paused, delivery.stores_snapshots).run()
        )
        stages.create_task(_deliver(source.channel, outcomes, delivery, metrics))
    if error := matching.result():
        raise error


class _SourceRunner:
    """Turns the samples of one source into outcomes."""

    def __init__(
        self,
        source: Source,
        monitor: ChannelMonitor,
        batcher: Batcher,
        outcomes: asyncio.Queue[Outcome | None],
        metrics: Metrics,
        is_paused: Callable[[], bool],
        stores_snapshots: bool,
    ) -> None:
        self._source = source
        self._monitor = monitor
        self._batcher = batcher
        self._outcomes = outcomes
        self._slot = batcher.slot()
        self._status = metrics.channels.of(source.channel)
        self._is_paused = is_paused
        self._stores_snapshots = stores_snapshots
        self._position: Position = {}
        self._snapshot_at = time.monotonic()
        self._newest_s = 0
        self._sample_at: float | None = time.monotonic()  # of the newest sample; None if silence ends nothing (more)
        self._busy = asyncio.Lock()  # held while a sample is matched or an epoch ends

    async def run(self) -> MonitorError | CatalogError | None:
        """The error that ended the source, if any; the samples before it are matched and their alerts end."""
        error = None
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._end_when_silent())
            try:
                # aclosing: the source's thread has ended before the source is opened again.
                async with aclosing(self._source.samples()) as samples:
                    async for sample in samples:
                        async with self._busy:
                            await self._match(sample)
            except (MonitorError, CatalogError) as failed:
                error = failed
            async with self._busy:
                watching.cancel()
        if not self._is_paused():
            await self._end_epoch(self._position if error else {**self._position, "ended": True})
        elif self._position:
            await self._put(await self._with_snapshot(Outcome(self._newest_s, [], datetime.now(UTC))))
        await self._outcomes.put(None)
        return error

    async def _match(self, sample: Sample) -> None:
        add_snapshot = partial(self._add_snapshot_if_due, sample.position) if self._stores_snapshots else None
        try:
            outcome = await self._slot.submit(sample.frame, partial(self._monitor.match_step, sample), add_snapshot)
        except BaseException as failed:
            self._status.count_dropped("stopped" if isinstance(failed, asyncio.CancelledError) else "failed")
            raise
        self._status.count_processed()
        self._status.set_lag((datetime.now(UTC) - sample.arrived_at).total_seconds())
        self._newest_s, self._position = outcome.second, sample.position
        await self._put(outcome)
        self._sample_at = None if sample.epoch.began_at is None else time.monotonic()

    async def _end_when_silent(self) -> None:
        """Ends the epoch once a stream with a wall clock was silent for SILENCE_S. Never returns."""
        while True:
            sample_at = time.monotonic() if self._sample_at is None else self._sample_at
            await asyncio.sleep(sample_at + SILENCE_S - time.monotonic())
            async with self._busy:
                if self._sample_at is not None and time.monotonic() - self._sample_at >= SILENCE_S:
                    self._sample_at = None  # once is enough
                    await self._end_epoch(self._position, round(SILENCE_S))

    async def _end_epoch(self, position: Position, silent_s: int = 0) -> None:
        last = await self._batcher.run("match", self._monitor.finish, silent_s)
        self._position = position
        await self._put(await self._with_snapshot(Outcome(self._newest_s, last, datetime.now(UTC))))

    def _add_snapshot_if_due(self, position: Position, outcome: Outcome) -> Outcome:
        """The outcome with a snapshot if it has alerts or the last one is old; in the worker thread."""
        if not outcome.alerts and time.monotonic() - self._snapshot_at < SNAPSHOT_EVERY_S:
            return outcome
        self._snapshot_at = time.monotonic()
        return replace(outcome, snapshot=self._monitor.snapshot(position))

    async def _with_snapshot(self, outcome: Outcome) -> Outcome:
        if not self._stores_snapshots:
            return outcome
        self._snapshot_at = time.monotonic()
        content = await self._batcher.run("snapshot", self._monitor.snapshot, self._position)
        return replace(outcome, snapshot=content)

    async def _put(self, outcome: Outcome) -> None:
        """Queues the outcome for delivery, unless it is empty."""
        if outcome.alerts or outcome.snapshot is not None:
            await self._outcomes.put(outcome)


async def _deliver(
    channel: str, outcomes: asyncio.Queue[Outcome | None], delivery: AlertDelivery, metrics: Metrics
) -> None:
    while (outcome := await outcomes.get()) is not None:
        count_alerts(channel, outcome, metrics)
        await delivery.put(OutboxEntry(channel, outcome.alerts, outcome.snapshot))
        delay_s = (datetime.now(UTC) - outcome.arrived_at).total_seconds()
        for _ in outcome.alerts:
            metrics.alert_delay.observe(delay_s)


def count_alerts(channel: str, outcome: Outcome, metrics: Metrics) -> None:
    """Counts the alerts of an outcome, just before they are emitted."""
    for alert in outcome.alerts:
        metrics.count_alert(channel, alert.type, alert.licence)
        if alert.type == STARTED:
            waited_s = (datetime.now(UTC) - outcome.arrived_at).total_seconds()
            metrics.detection_latency.observe(alert.detected_at - alert.channel_start + waited_s)
