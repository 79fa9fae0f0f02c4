"""Recovery: open alerts continue or end after a restart, also after `kill -9` of a real `serve`, again and again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, STARTED
from monitor.alerting.outbox import History, Outbox, OutboxEntry
from monitor.demo.broadcast import BroadcastServer
from monitor.ingest.sources import Position, Sample
from monitor.ops.metrics import Metrics
from monitor.runtime.models import Models
from monitor.runtime.recovery import Recovery
from reference_db.features.encoder import Encoder
from tests.support.planted_channels import Part, alerts_of, new_monitor, plant
from tests.support.planted_features import plain_net
from tests.support.sample_alert import sample_events
from tests.support.serve_runs import TIMEOUT_S, SampleLibrary, ServeRun, alert_lines, build_sample_library

STREAM = plant([Part(10, noise=1.0), Part(30, "swift", 20, noise=0.2), Part(30, noise=1.0)])


class ResumedSource:
    """A source that notes where it resumes."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.position: Position | None = None

    def resume(self, position: Position) -> None:
        self.position = position

    async def samples(self) -> AsyncGenerator[Sample, None]:
        raise NotImplementedError
        yield

    async def close(self) -> None: ...


def outbox_of(folder: Path, *entries: OutboxEntry) -> Recovery:
    with Outbox.open(folder, ()) as outbox:
        outbox.write(list(entries))
        return Recovery.load(outbox)


def result(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value("copywatch_restores_total", {"channel": "ch5", "result": name})


def test_a_channel_resumes_with_its_alerts_open(tmp_path: Path) -> None:
    first, metrics = new_monitor(), Metrics(CollectorRegistry())
    alerts = alerts_of(first, STREAM, 0, 25)
    recovery = outbox_of(tmp_path, OutboxEntry("ch5", alerts, first.snapshot({"second": 24})))
    source, second = ResumedSource("ch5"), new_monitor()
    entry = recovery.restore(source, second, metrics)
    assert (entry.channel, entry.alerts, entry.snapshot) == ("ch5", [], None)
    assert source.position == {"second": 24}
    assert second.open_alerts == first.open_alerts != set()
    assert result(metrics, "continued") == 1


def test_alerts_that_a_snapshot_does_not_know_end(tmp_path: Path) -> None:
    monitor, metrics = new_monitor(), Metrics(CollectorRegistry())
    (started, *_) = alerts_of(monitor, STREAM, 0, 25)
    unknown = replace(sample_events("e" * 24)[0], channel="ch5")
    recovery = outbox_of(tmp_path, OutboxEntry("ch5", [started, unknown], monitor.snapshot({})))
    (ended,) = recovery.restore(ResumedSource("ch5"), new_monitor(), metrics).alerts
    assert (ended.id, ended.type, ended.reason) == (unknown.id, ENDED, "state lost")


def test_a_refused_snapshot_ends_the_open_alerts_and_the_source_resumes_if_the_notes_are_readable(
    tmp_path: Path,
) -> None:
    monitor = new_monitor()
    alerts = [alert for alert in alerts_of(monitor, STREAM, 0, 25) if alert.type == STARTED]
    content = monitor.snapshot({"second": 24})
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    for snapshot, other, position in (
        (content, new_monitor(by=Models(Encoder(list, "another"), plain_net())), {"second": 24}),
        (damaged, new_monitor(), None),
    ):
        source, metrics = ResumedSource("ch5"), Metrics(CollectorRegistry())
        entry = outbox_of(tmp_path, OutboxEntry("ch5", alerts, snapshot)).restore(source, other, metrics)
        assert [(alert.id, alert.reason) for alert in entry.alerts] == [(alerts[0].id, "state lost")]
        assert (source.position, result(metrics, "refused")) == (position, 1)


def test_open_alerts_of_removed_channels_end_and_their_snapshots_are_dropped(tmp_path: Path) -> None:
    gone, other = sample_events("a" * 24)[0], sample_events("b" * 24)[0]
    entries = [
        OutboxEntry("gone", [replace(gone, channel="gone")], b"snapshot"),
        OutboxEntry("other", [replace(other, channel="other")]),
        OutboxEntry("ch5", [], b"snapshot"),
    ]
    recovery = outbox_of(tmp_path, *entries)
    (entry,) = recovery.end_removed(["ch5"], with_kafka=True)  # `other` belongs to another process then
    assert (entry.channel, entry.drop_snapshot) == ("gone", True)
    assert [(alert.id, alert.reason) for alert in entry.alerts] == [(gone.id, "channel removed")]
    with Outbox.open(tmp_path, ()) as outbox:
        recovery = Recovery.load(outbox)
    assert [entry.channel for entry in recovery.end_removed(["ch5"])] == ["gone", "other"]


# --- a real serve ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample_library(tmp_path_factory: pytest.TempPathFactory) -> SampleLibrary:
    return build_sample_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def runs() -> Iterator[list[ServeRun]]:
    """The runs of a test; those still running are killed after it."""
    started: list[ServeRun] = []
    yield started
    for run in started:
        run.process.kill()
        run.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_named_points_and_stopped_once_a_channel_emits_each_alert_once(
    sample_library: SampleLibrary, tmp_path: Path, runs: list[ServeRun]
) -> None:
    unbroken = sample_library.config(tmp_path / "unbroken", str(sample_library.recording))
    runs.append(ServeRun(unbroken))
    runs[-1].wait_for("the stream ended")
    assert runs[-1].end(signal.SIGTERM) == 0
    expected = alert_lines(unbroken)
    assert [alert["type"] for alert in expected if alert["type"] != "alert.updated"] == [
        "alert.started",
        "alert.ended",
    ] * 2

    killed = sample_library.config(tmp_path / "killed", str(sample_library.recording))
    for point in ("snapshot", "mid-line", "after-commit"):
        runs.append(ServeRun(killed, point))
        assert runs[-1].process.wait(TIMEOUT_S) == -signal.SIGKILL, (point, runs[-1].log)
    runs.append(ServeRun(killed))
    runs[-1].wait_for("resumed from its snapshot")
    assert runs[-1].end(signal.SIGTERM) == 0  # at whatever second it is
    before = alert_lines(killed)
    runs.append(ServeRun(killed))
    runs[-1].wait_for("the stream ended")
    assert runs[-1].end(signal.SIGTERM) == 0
    after = alert_lines(killed)
    assert after[: len(before)] == before
    assert after == expected
    history = History(killed.parent / "data")
    assert [event.as_dict()["id"] for event in history.events()] == [alert["id"] for alert in expected]


@pytest.mark.slow
def test_killed_on_air_an_alert_continues_with_a_gap_or_ends_and_never_stays_open(
    sample_library: SampleLibrary, tmp_path: Path, runs: list[ServeRun]
) -> None:
    with BroadcastServer(sample_library.recording) as broadcast:
        config = sample_library.config(tmp_path / "on-air", broadcast.url)
        runs.append(ServeRun(config))
        runs[-1].wait_for("alert.started")
        time.sleep(random.Random(5).uniform(0, 1.5))  # killed at an arbitrary moment
        runs[-1].end(signal.SIGKILL)
        first = alert_lines(config)
        runs.append(ServeRun(config))
        runs[-1].wait_for("1 alerts open" if len(first) == 1 else "resumed from its snapshot")
        runs[-1].wait_for("alert.ended")
        assert runs[-1].end(signal.SIGTERM) == 0
    events = alert_lines(config)
    assert len({(event["id"], event["seq"]) for event in events}) == len(events)
    by_id: dict[object, list[dict[str, object]]] = {}
    for event in events:
        by_id.setdefault(event["id"], []).append(event)
    of_first = by_id[first[0]["id"]]
    assert [event["seq"] for event in of_first] == list(range(1, len(of_first) + 1))
    assert of_first[-1]["type"] in ("alert.ended", "alert.retracted")
    with Outbox.open(config.parent / "data", ()) as outbox:
        still_open = {alert.id for alert in outbox.open_alerts()}
    assert first[0]["id"] not in still_open
    for gap in (gap for event in events for gap in event["gaps"] if gap["reason"] == "restart"):  # type: ignore[attr-defined]
        assert gap["seconds"] >= 1
