"""The post: sinks that work, fail, hang and tear, and a disk that is full."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from monitor.alerting import dispatcher as dispatcher_module
from monitor.alerting.alerts import Alert
from monitor.alerting.dispatcher import AlertDispatcher
from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.alerting.sinks import CallbackSink, JsonLinesSink, Sink
from monitor.ops.metrics import Metrics
from tests.support.sample_alert import sample_events
from tests.support.waiting import wait_until


def posted(
    data_dir: Path,
    sinks: dict[str, Sink],
    work: Callable[[AlertDispatcher], Awaitable[None]],
    metrics: Metrics | None = None,
) -> None:
    """Runs a post office while `work` does."""

    async def run() -> None:
        with Outbox.open(data_dir, sinks) as outbox:
            post = AlertDispatcher(outbox, sinks, metrics or Metrics(CollectorRegistry()), timedelta(days=1))
            running = asyncio.create_task(post.run())
            try:
                await work(post)
            finally:
                running.cancel()
                await asyncio.wait({running})
                post.close()

    asyncio.run(run())


class Collecting:
    """A sink that fails the first few times."""

    def __init__(self, n_failures: int = 0) -> None:
        self.taken: list[tuple[str, int]] = []
        self._n_failures = n_failures

    def send(self, alerts: list[Alert]) -> None:
        if self._n_failures:
            self._n_failures -= 1
            raise ConnectionError("not now")
        self.taken += [(alert.id, alert.seq) for alert in alerts]


ALL = [("a1", 1), ("a1", 2), ("a1", 3), ("a2", 1), ("a2", 2), ("a2", 3)]


def test_every_sink_takes_all_in_order_and_a_hanging_one_delays_no_other(tmp_path: Path) -> None:
    good, flaky, released = Collecting(), Collecting(1), threading.Event()
    hanging = CallbackSink(lambda alert: (released.wait(), None)[1])

    async def work(post: AlertDispatcher) -> None:
        await post.put(OutboxEntry("ch5", sample_events("a1")))
        await post.put(OutboxEntry("ch5", sample_events("a2")))
        await wait_until(lambda: good.taken == flaky.taken == ALL)
        assert not await post.flush(0.1)  # one sink still has nothing
        released.set()
        assert await post.flush(30)

    posted(tmp_path, {"good": good, "flaky": flaky, "hanging": hanging}, work)
    assert (good.taken, flaky.taken) == (ALL, ALL)


def test_what_a_sink_did_not_take_is_given_to_it_in_the_next_life(tmp_path: Path) -> None:
    dead, later = Collecting(10**9), Collecting()

    async def first(post: AlertDispatcher) -> None:
        await post.put(OutboxEntry("ch5", sample_events("a1")))
        assert not await post.flush(0.1)

    async def second(post: AlertDispatcher) -> None:
        await post.put(OutboxEntry("ch5", sample_events("a2")))
        assert await post.flush(30)

    posted(tmp_path, {"sink": dead}, first)
    posted(tmp_path, {"sink": later}, second)
    assert later.taken == ALL


def test_while_the_disk_fails_alerts_are_told_and_afterwards_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "REOPEN_S", 0.05)
    sink, metrics = Collecting(), Metrics(CollectorRegistry())
    (tmp_path / "alerts.sqlite").mkdir()  # a disk that cannot take the file

    def up() -> float | None:
        return metrics.registry.get_sample_value("copywatch_outbox_up")

    async def work(post: AlertDispatcher) -> None:
        await post.put(OutboxEntry("ch5", sample_events("a1"), b"state"))
        await wait_until(lambda: sink.taken == ALL[:3])
        assert up() == 0
        (tmp_path / "alerts.sqlite").rmdir()
        await post.put(OutboxEntry("ch5", sample_events("a2")))
        await wait_until(lambda: up() == 1 and sink.taken == ALL)
        assert await post.flush(30)

    posted(tmp_path, {"sink": sink}, work, metrics)
    assert sink.taken == ALL
    with Outbox.open(tmp_path, ["sink"]) as outbox:
        assert (outbox.snapshots(), outbox.n_pending()) == ({"ch5": b"state"}, {"sink": 0})


def test_a_torn_line_is_cut_and_a_line_already_there_is_not_written_again(tmp_path: Path) -> None:
    path, events = tmp_path / "alerts.jsonl", sample_events("a1") + sample_events("a2")
    JsonLinesSink(path).send(events[:4])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    JsonLinesSink(path).send(events[3:])  # a new life, which was not told that the fourth was written
    lines = path.read_text().splitlines()
    assert [(json.loads(line)["id"], json.loads(line)["seq"]) for line in lines] == ALL
    path.write_bytes(b"torn before the first end of line")
    JsonLinesSink(path).send(events[:1])
    assert json.loads(path.read_text())["id"] == "a1"


def test_a_file_that_was_rotated_away_is_made_anew(tmp_path: Path) -> None:
    path, events = tmp_path / "alerts.jsonl", sample_events("a1")
    sink = JsonLinesSink(path)
    sink.send(events[:1])
    path.rename(tmp_path / "alerts.jsonl.1")
    sink.send(events[1:2])
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [2]
