"""The post: entries of all channels go to disk first, then to every sink at its own pace.

One thread writes the outbox, and entries that come together share a transaction. Each sink is served by a task and a
thread of its own: in order, at least once, again and again with back-off until it has taken an event, so one that
hangs delays no other. While the disk fails, alerts wait in memory and go to the sinks all the same; once it works
again they are written with the knowledge of who has them.
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
from monitor.ops.health import Worker
from monitor.ops.metrics import Metrics

logger = logging.getLogger(__name__)

GATHER_S = 0.5  # entries without alerts are in no hurry: those of other channels may join them
BATCH = 100  # events handed to a sink at once
MAX_RETRY_S = 60.0  # between two tries of a sink
REOPEN_S = 5.0  # between two tries to use a disk that failed
MAX_UNSAVED = 10_000  # events kept in memory while the disk fails
PURGE_S = 3600.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _UnsavedEntry:
    """An event that is not on disk yet."""

    channel: str
    alert: Alert
    taken: set[str] = field(default_factory=set)  # sinks that have it


class AlertDispatcher:
    """All of it; `run` works until it is cancelled, `put` and `flush` are for the channels."""

    stores_snapshots = True

    def __init__(
        self,
        outbox: Outbox,
        sinks: Mapping[str, Sink],
        metrics: Metrics,
        keep: timedelta,
        on_state: Callable[[str | None], None] = lambda complaint: None,
    ) -> None:
        self._outbox = outbox
        self._sinks = sinks
        self._metrics = metrics
        self._keep = keep
        self._on_state = on_state  # is told what is wrong with the disk, and None when it is right again
        self._waiting: list[tuple[OutboxEntry, asyncio.Future[None]]] = []  # bounded: each channel waits for its entry
        self._urgent, self._something = asyncio.Event(), asyncio.Event()
        self._news = {sink: asyncio.Event() for sink in sinks}
        self._taken: dict[str, set[int]] = {sink: set() for sink in sinks}  # by sinks, not on disk yet
        self._unsaved: deque[_UnsavedEntry] = deque()
        self._late_snapshots: dict[str, OutboxEntry] = {}
        self._failed_at: float | None = None
        self.worker = Worker()  # the thread that writes
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outbox")
        self._threads = {sink: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"sink-{sink}") for sink in sinks}

    async def put(self, entry: OutboxEntry) -> None:
        """Returns when the entry is on disk; or, while the disk fails, in memory and on its way."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, done))
        self._something.set()
        if entry.alerts:
            self._urgent.set()
        await done

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_for_ever())
            tasks.create_task(self._purge_for_ever())
            for name in self._sinks:
                tasks.create_task(self._serve(name))

    async def flush(self, patience_s: float) -> bool:
        """Waits until every sink has taken all there is and the disk knows it; False if that took too long."""
        until = time.monotonic() + patience_s
        while await self._is_owed():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.05)
        return True

    def close(self) -> None:
        """Lets go of the threads; one that hangs in a sink is left behind."""
        for pool in (self._disk, *self._threads.values()):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _is_owed(self) -> bool:
        if self._waiting or any(self._taken.values()):
            return True
        if self._unsaved:
            return any(set(self._sinks) - unsaved.taken for unsaved in self._unsaved)
        try:
            return any((await self._on_disk(self._outbox.n_pending)).values())
        except OutboxFailed:
            return False

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        done = self._disk.submit(work, *args, **kwargs)
        self.worker.given(done)
        return await asyncio.wrap_future(done)

    # --- to disk -----------------------------------------------------------------------------------------------------

    async def _write_for_ever(self) -> None:
        while True:
            await self._something.wait()
            if not self._urgent.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_S):  # wait_for may swallow a cancel that comes with the event
                        await self._urgent.wait()
            self._something.clear()
            self._urgent.clear()
            entries, self._waiting = self._waiting, []
            await self._write([entry for entry, _ in entries])
            for _, done in entries:
                if not done.done():
                    done.set_result(None)
            self._metrics.outbox_unsaved.set(len(self._unsaved))

    async def _write(self, entries: list[OutboxEntry]) -> None:
        if self._failed_at is not None and time.monotonic() - self._failed_at < REOPEN_S:
            self._hold(entries)
            return
        taken = {sink: set(numbers) for sink, numbers in self._taken.items() if numbers}
        unsaved = list(self._unsaved)
        held = [
            OutboxEntry(u.channel, [u.alert], delivered={(u.alert.id, u.alert.seq): frozenset(u.taken)})
            for u in unsaved
        ]
        try:
            owed = await self._on_disk(self._written, [*held, *self._late_snapshots.values(), *entries], taken)
        except OutboxFailed as error:
            self._fail(error)
            self._hold(entries)
            return
        self._recover()
        self._late_snapshots.clear()
        for _ in unsaved:
            self._unsaved.popleft()
        for sink, numbers in taken.items():
            self._taken[sink] -= numbers
        if owed:
            self._metrics.process.backlog = owed
        if unsaved or any(entry.alerts for entry in entries):
            self._ring()

    def _written(self, entries: list[OutboxEntry], taken: Mapping[str, set[int]]) -> dict[str, int]:
        """How many events each sink is owed once these are on disk."""
        self._outbox.write(entries, taken)
        try:
            return self._outbox.n_pending()
        except OutboxFailed:
            return {}  # what was written is; the next write tells

    def _hold(self, entries: list[OutboxEntry]) -> None:
        """Keeps in memory what the disk did not take."""
        for entry in entries:
            self._unsaved.extend(_UnsavedEntry(entry.channel, alert) for alert in entry.alerts)
            if entry.snapshot is not None or entry.drop_snapshot:
                self._late_snapshots[entry.channel] = OutboxEntry(
                    entry.channel, (), entry.snapshot, entry.drop_snapshot
                )
        while len(self._unsaved) > MAX_UNSAVED:
            self._unsaved.popleft()
            logger.error("an alert was dropped from memory before the disk could take it")
        self._ring()

    def _fail(self, error: OutboxFailed) -> None:
        if self._failed_at is None:
            logger.error("%s; alerts are told all the same, and kept in memory until it works again", error)
        self._failed_at = time.monotonic()
        self._metrics.outbox_up.set(0)
        self._on_state(str(error))

    def _recover(self) -> None:
        if self._failed_at is not None:
            logger.warning("the outbox works again; %d events are written late", len(self._unsaved))
        self._failed_at = None
        self._metrics.outbox_up.set(1)
        self._on_state(None)

    def _ring(self) -> None:
        for event in self._news.values():
            event.set()

    async def _purge_for_ever(self) -> None:
        while True:
            try:
                if n := await self._on_disk(self._outbox.purge, self._keep):
                    logger.info("%d old alert events were forgotten", n)
            except OutboxFailed as error:
                self._fail(error)
            await asyncio.sleep(PURGE_S)

    # --- to one sink -------------------------------------------------------------------------------------------------

    async def _serve(self, name: str) -> None:
        news, backoff = self._news[name], Backoff(last_s=MAX_RETRY_S, jitter=0.2)
        while True:
            news.clear()
            numbers, unsaved = await self._next(name)
            alerts = [alert for _, alert in numbers] or [one.alert for one in unsaved]
            if not alerts:
                await self._wait_for(news)
                continue
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads[name], self._sinks[name].send, alerts)
            except Exception as error:  # whatever a sink fails by, it is tried again and delays no other
                self._metrics.sink_failures.labels(name).inc()
                if backoff.is_first:
                    logger.error("sink %s failed (%s: %s); trying until it works", name, type(error).__name__, error)
                await backoff.wait()
                continue
            if not backoff.is_first:
                logger.warning("sink %s works again", name)
            backoff.reset()
            self._taken[name].update(n for n, _ in numbers)
            for one in unsaved:
                one.taken.add(name)
            self._something.set()
            if len(alerts) < BATCH:
                await self._wait_for(news)  # that was all there was

    async def _next(self, name: str) -> tuple[list[tuple[int, Alert]], list[_UnsavedEntry]]:
        """What this sink takes next: from disk, or from memory while the disk fails."""
        if self._failed_at is None:
            try:
                after = max(self._taken[name], default=0)
                owed = await self._on_disk(self._outbox.pending, name, after, BATCH)
                return [(event.n, event.alert) for event in owed], []
            except OutboxFailed as error:
                self._fail(error)
        return [], [one for one in self._unsaved if name not in one.taken][:BATCH]

    async def _wait_for(self, news: asyncio.Event) -> None:
        """Returns on news; while the disk fails, also when it is time to try it again."""
        try:
            async with asyncio.timeout(REOPEN_S if self._failed_at is not None else None):
                await news.wait()
        except TimeoutError:
            self._something.set()  # has the writer try
