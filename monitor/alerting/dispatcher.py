"""The alert dispatcher: entries of all channels go to disk first, then to every sink at its own pace.

One thread writes the outbox, and entries that arrive together share a transaction. Each sink has a task and a thread of
its own. It gets events in order and at least once, with back-off until it accepts them, so a sink that hangs delays no
other. While the disk fails, alerts wait in memory and are still sent to the sinks; once the disk works again they are
written together with which sinks have them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ParamSpec, TypeVar

from monitor.alerting.alerts import Alert
from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.alerting.sinks import Sink
from monitor.errors import OutboxFailed
from monitor.ops.backoff import Backoff
from monitor.ops.change_signal import ChangeSignal
from monitor.ops.health import Worker
from monitor.ops.metrics import Metrics

logger = logging.getLogger(__name__)

GATHER_S = 0.5  # entries without alerts wait this long, so that those of other channels share their transaction
BATCH = 100  # events sent to a sink at once
MAX_RETRY_S = 60.0  # longest delay between two tries of a sink
REOPEN_S = 5.0  # between two tries of a disk that failed
MAX_UNSAVED = 10_000  # events held in memory while the disk fails
PURGE_S = 3600.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _UnsavedEvent:
    """An event that is not on disk yet."""

    channel: str
    alert: Alert
    delivered: set[str] = field(default_factory=set)  # sinks that have it

    def as_entry(self) -> OutboxEntry:
        delivered = {(self.alert.id, self.alert.seq): frozenset(self.delivered)}
        return OutboxEntry(self.channel, [self.alert], delivered=delivered)


class AlertDispatcher:
    """`run` works until cancelled; channels call `put`, and `flush` before the process stops."""

    stores_snapshots = True

    def __init__(
        self,
        outbox: Outbox,
        sinks: Mapping[str, Sink],
        metrics: Metrics,
        retention: timedelta,
        on_state: Callable[[str | None], None] = lambda problem: None,
    ) -> None:
        self.emitted = ChangeSignal()  # new events are on disk
        self.worker = Worker()  # the thread that writes
        self._outbox = outbox
        self._sinks = sinks
        self._metrics = metrics
        self._retention = retention
        self._on_state = on_state  # gets the problem of the disk, and None once it works again
        self._queue: list[tuple[OutboxEntry, asyncio.Future[None]]] = []  # bounded: a channel waits for its entry
        self._is_urgent, self._has_work = asyncio.Event(), asyncio.Event()
        self._new_events = {sink: asyncio.Event() for sink in sinks}
        self._delivered: dict[str, set[int]] = {sink: set() for sink in sinks}  # numbers not yet recorded on disk
        self._unsaved: deque[_UnsavedEvent] = deque()
        self._unsaved_snapshots: dict[str, OutboxEntry] = {}
        self._failed_at: float | None = None
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outbox")
        self._threads = {sink: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"sink-{sink}") for sink in sinks}

    async def put(self, entry: OutboxEntry) -> None:
        """Returns when the entry is on disk or, while the disk fails, in memory."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((entry, done))
        self._has_work.set()
        if entry.alerts:
            self._is_urgent.set()
        await done

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_writer())
            tasks.create_task(self._run_purge())
            for name in self._sinks:
                tasks.create_task(self._run_sink(name))

    async def flush(self, timeout_s: float) -> bool:
        """Waits until every sink has all events and the disk has that on record; False on a time-out."""
        until = time.monotonic() + timeout_s
        while await self._has_pending():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.05)
        return True

    def close(self) -> None:
        """Stops the threads; one that hangs in a sink is abandoned."""
        for pool in (self._disk, *self._threads.values()):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _has_pending(self) -> bool:
        if self._queue or any(self._delivered.values()):
            return True
        if self._unsaved:
            return any(set(self._sinks) - event.delivered for event in self._unsaved)
        try:
            return any((await self._on_disk(self._outbox.n_pending)).values())
        except OutboxFailed:
            return False

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        done = self._disk.submit(work, *args, **kwargs)
        self.worker.track(done)
        return await asyncio.wrap_future(done)

    # --- to disk -----------------------------------------------------------------------------------------------------

    async def _run_writer(self) -> None:
        while True:
            await self._has_work.wait()
            if not self._is_urgent.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_S):  # wait_for may swallow a cancel that comes with the event
                        await self._is_urgent.wait()
            self._has_work.clear()
            self._is_urgent.clear()
            queue, self._queue = self._queue, []
            await self._write([entry for entry, _ in queue])
            for _, done in queue:
                if not done.done():
                    done.set_result(None)
            self._metrics.outbox_unsaved.set(len(self._unsaved))

    async def _write(self, entries: list[OutboxEntry]) -> None:
        if self._failed_at is not None and time.monotonic() - self._failed_at < REOPEN_S:
            self._hold_in_memory(entries)
            return
        delivered = {sink: set(numbers) for sink, numbers in self._delivered.items() if numbers}
        unsaved = list(self._unsaved)
        late = [event.as_entry() for event in unsaved]
        try:
            pending = await self._on_disk(
                self._write_and_count, [*late, *self._unsaved_snapshots.values(), *entries], delivered
            )
        except OutboxFailed as error:
            self._fail(error)
            self._hold_in_memory(entries)
            return
        self._recover()
        self._unsaved_snapshots.clear()
        for _ in unsaved:
            self._unsaved.popleft()
        for sink, numbers in delivered.items():
            self._delivered[sink] -= numbers
        if pending:
            self._metrics.process.backlog = pending
        if unsaved or any(entry.alerts for entry in entries):
            self._wake_sinks()
            self.emitted.notify()

    def _write_and_count(self, entries: list[OutboxEntry], delivered: Mapping[str, set[int]]) -> dict[str, int]:
        """Writes, and returns how many events each sink does not have yet; empty if only the counting failed."""
        self._outbox.write(entries, delivered)
        try:
            return self._outbox.n_pending()
        except OutboxFailed:
            return {}

    def _hold_in_memory(self, entries: list[OutboxEntry]) -> None:
        """Holds entries that the disk did not take."""
        for entry in entries:
            self._unsaved.extend(_UnsavedEvent(entry.channel, alert) for alert in entry.alerts)
            if entry.snapshot is not None or entry.drop_snapshot:
                self._unsaved_snapshots[entry.channel] = OutboxEntry(
                    entry.channel, (), entry.snapshot, entry.drop_snapshot
                )
        while len(self._unsaved) > MAX_UNSAVED:
            dropped = self._unsaved.popleft()
            logger.error(
                "dropped an alert from memory: %d are waiting for the disk",
                MAX_UNSAVED,
                extra={"channel": dropped.channel},
            )
        self._wake_sinks()

    def _fail(self, error: OutboxFailed) -> None:
        if self._failed_at is None:
            logger.error("%s; alerts are still sent, and held in memory until the disk works again", error)
        self._failed_at = time.monotonic()
        self._metrics.outbox_up.set(0)
        self._on_state(str(error))

    def _recover(self) -> None:
        if self._failed_at is not None:
            logger.warning("the outbox works again; writing %d events late", len(self._unsaved))
        self._failed_at = None
        self._metrics.outbox_up.set(1)
        self._on_state(None)

    def _wake_sinks(self) -> None:
        for event in self._new_events.values():
            event.set()

    async def _run_purge(self) -> None:
        while True:
            try:
                if n := await self._on_disk(self._outbox.purge, self._retention):
                    logger.info("purged %d old alert events", n)
            except OutboxFailed as error:
                self._fail(error)
            await asyncio.sleep(PURGE_S)

    # --- to one sink -------------------------------------------------------------------------------------------------

    async def _run_sink(self, name: str) -> None:
        new_events, backoff = self._new_events[name], Backoff(last_s=MAX_RETRY_S, jitter=0.2)
        while True:
            new_events.clear()
            stored, unsaved = await self._next_batch(name)
            alerts = [alert for _, alert in stored] or [event.alert for event in unsaved]
            if not alerts:
                await self._wait_for(new_events)
                continue
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads[name], self._sinks[name].send, alerts)
            except Exception as error:  # whatever the error, the sink is retried and delays no other
                self._metrics.sink_failures.labels(name).inc()
                if backoff.is_first:
                    logger.error("sink %s failed (%s: %s); retrying until it works", name, type(error).__name__, error)
                await backoff.wait()
                continue
            if not backoff.is_first:
                logger.warning("sink %s works again", name)
            backoff.reset()
            self._delivered[name].update(n for n, _ in stored)
            for event in unsaved:
                event.delivered.add(name)
            self._has_work.set()
            if len(alerts) < BATCH:
                await self._wait_for(new_events)  # the batch held all there were

    async def _next_batch(self, name: str) -> tuple[list[tuple[int, Alert]], list[_UnsavedEvent]]:
        """The next events for this sink: numbered ones from disk, or unsaved ones while the disk fails."""
        if self._failed_at is None:
            try:
                after = max(self._delivered[name], default=0)
                pending = await self._on_disk(self._outbox.pending, name, after, BATCH)
                return [(event.n, event.alert) for event in pending], []
            except OutboxFailed as error:
                self._fail(error)
        return [], [event for event in self._unsaved if name not in event.delivered][:BATCH]

    async def _wait_for(self, new_events: asyncio.Event) -> None:
        """Returns on new events; while the disk fails, also when it is time to try the disk again."""
        try:
            async with asyncio.timeout(REOPEN_S if self._failed_at is not None else None):
                await new_events.wait()
        except TimeoutError:
            self._has_work.set()  # makes the writer try
