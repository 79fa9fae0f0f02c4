"""The dispatcher: sinks that work, fail and hang, and a disk that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from monitor.alerting import dispatcher as dispatcher_module
from monitor.alerting.alerts import Alert
from monitor.alerting.dispatcher import AlertDispatcher
from monitor.alerting.outbox import History, Outbox, OutboxEntry
from monitor.alerting.sinks import CallbackSink, Sink
from monitor.ops.change_signal import watch
from monitor.ops.metrics import Metrics
from tests.support.sample_alert import sample_events
from tests.support.waiting import wait_until


def run_dispatcher(
    data_dir: Path,
    sinks: dict[str, Sink],
    work: Callable[[AlertDispatcher], Awaitable[None]],
    metrics: Metrics | None = None,
) -> None:
    """Runs a dispatcher while `work` does."""

    async def run() -> None:
        with Outbox.open(data_dir, sinks) as outbox:
            dispatcher = AlertDispatcher(outbox, sinks, metrics or Metrics(CollectorRegistry()), timedelta(days=1))
            running = asyncio.create_task(dispatcher.run())
            try:
                await work(dispatcher)
            finally:
                running.cancel()
                await asyncio.wait({running})
                dispatcher.close()

    asyncio.run(run())


class CollectingSink:
    """Fails the first `n_failures` times, then collects id and seq of every event."""

    def __init__(self, n_failures: int = 0) -> None:
        self.events: list[tuple[str, int]] = []
        self._n_failures = n_failures

    def send(self, alerts: list[Alert]) -> None:
        if self._n_failures:
            self._n_failures -= 1
            raise ConnectionError("not now")
        self.events += [(alert.id, alert.seq) for alert in alerts]


ALL = [("a1", 1), ("a1", 2), ("a1", 3), ("a2", 1), ("a2", 2), ("a2", 3)]


def test_every_sink_gets_all_events_in_order_and_a_hanging_one_delays_no_other(tmp_path: Path) -> None:
    good, flaky, released = CollectingSink(), CollectingSink(1), threading.Event()
    hanging = CallbackSink(lambda alert: (released.wait(), None)[1])

    async def work(dispatcher: AlertDispatcher) -> None:
        await dispatcher.put(OutboxEntry("ch5", sample_events("a1")))
        await dispatcher.put(OutboxEntry("ch5", sample_events("a2")))
        await wait_until(lambda: good.events == flaky.events == ALL)
        assert not await dispatcher.flush(0.1)  # one sink still has nothing
        released.set()
        assert await dispatcher.flush(30)

    run_dispatcher(tmp_path, {"good": good, "flaky": flaky, "hanging": hanging}, work)
    assert (good.events, flaky.events) == (ALL, ALL)


def test_events_that_a_sink_did_not_accept_are_sent_to_it_by_the_next_run(tmp_path: Path) -> None:
    broken, working = CollectingSink(10**9), CollectingSink()

    async def first_run(dispatcher: AlertDispatcher) -> None:
        await dispatcher.put(OutboxEntry("ch5", sample_events("a1")))
        assert not await dispatcher.flush(0.1)

    async def second_run(dispatcher: AlertDispatcher) -> None:
        await dispatcher.put(OutboxEntry("ch5", sample_events("a2")))
        assert await dispatcher.flush(30)

    run_dispatcher(tmp_path, {"sink": broken}, first_run)
    run_dispatcher(tmp_path, {"sink": working}, second_run)
    assert working.events == ALL


def test_while_the_disk_fails_alerts_are_sent_and_afterwards_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "REOPEN_S", 0.05)
    sink, metrics = CollectingSink(), Metrics(CollectorRegistry())
    (tmp_path / "alerts.sqlite").mkdir()  # the file cannot be created

    def outbox_up() -> float | None:
        return metrics.registry.get_sample_value("copywatch_outbox_up")

    async def work(dispatcher: AlertDispatcher) -> None:
        await dispatcher.put(OutboxEntry("ch5", sample_events("a1"), b"state"))
        await wait_until(lambda: sink.events == ALL[:3])
        assert outbox_up() == 0
        (tmp_path / "alerts.sqlite").rmdir()
        await dispatcher.put(OutboxEntry("ch5", sample_events("a2")))
        await wait_until(lambda: outbox_up() == 1 and sink.events == ALL)
        assert await dispatcher.flush(30)

    run_dispatcher(tmp_path, {"sink": sink}, work, metrics)
    assert sink.events == ALL
    with Outbox.open(tmp_path, ["sink"]) as outbox:
        assert (outbox.snapshots(), outbox.n_pending()) == ({"ch5": b"state"}, {"sink": 0})


def test_the_signal_comes_when_new_events_can_be_read(tmp_path: Path) -> None:
    async def work(dispatcher: AlertDispatcher) -> None:
        with watch(dispatcher.emitted) as emitted:
            await dispatcher.put(OutboxEntry("ch5", (), b"state"))
            assert not emitted.is_set()  # a snapshot alone is no event
            await dispatcher.put(OutboxEntry("ch5", sample_events("a1")))
            async with asyncio.timeout(60):
                await emitted.wait()
            assert len(History(tmp_path).events()) == 3

    run_dispatcher(tmp_path, {}, work)
