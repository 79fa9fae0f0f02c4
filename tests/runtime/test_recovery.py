"""kill -9 of a real `serve`, again and again: what is told in the end is what an unbroken life tells."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.alerting.outbox import History, Outbox
from monitor.demo.broadcast import BroadcastServer
from tests.support.serve_runs import TIMEOUT_S, SampleLibrary, ServeRun, alert_lines, build_sample_library

pytestmark = pytest.mark.slow  # kills a real serve again and again


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> SampleLibrary:
    return build_sample_library(tmp_path_factory.mktemp("house"))


@pytest.fixture
def lives() -> Iterator[list[ServeRun]]:
    """Whatever a test leaves running is ended."""
    begun: list[ServeRun] = []
    yield begun
    for life in begun:
        life.process.kill()
        life.process.wait()


@pytest.mark.timeout(1200)
def test_killed_at_named_points_and_stopped_once_a_channel_tells_each_thing_once(
    house: SampleLibrary, tmp_path: Path, lives: list[ServeRun]
) -> None:
    unbroken = house.config(tmp_path / "unbroken", str(house.recording))
    lives.append(ServeRun(unbroken))
    lives[-1].wait_for("the stream ended")
    assert lives[-1].end(signal.SIGTERM) == 0
    expected = alert_lines(unbroken)
    assert [alert["type"] for alert in expected if alert["type"] != "alert.updated"] == [
        "alert.started",
        "alert.ended",
    ] * 2

    broken = house.config(tmp_path / "broken", str(house.recording))
    for point in ("snapshot", "mid-line", "after-commit"):
        lives.append(ServeRun(broken, point))
        assert lives[-1].process.wait(TIMEOUT_S) == -signal.SIGKILL, (point, lives[-1].log)
    lives.append(ServeRun(broken))
    lives[-1].wait_for("resumed from its snapshot")
    assert lives[-1].end(signal.SIGTERM) == 0  # wherever that falls
    before = alert_lines(broken)
    lives.append(ServeRun(broken))
    lives[-1].wait_for("the stream ended")
    assert lives[-1].end(signal.SIGTERM) == 0
    after = alert_lines(broken)
    assert after[: len(before)] == before
    assert after == expected
    history = History(broken.parent / "data")
    assert [event.as_dict()["id"] for event in history.events()] == [alert["id"] for alert in expected]


def test_killed_on_air_an_alert_goes_on_with_a_gap_or_ends_and_is_never_left_open(
    house: SampleLibrary, tmp_path: Path, lives: list[ServeRun]
) -> None:
    with BroadcastServer(house.recording) as air:
        config = house.config(tmp_path / "air", air.url)
        lives.append(ServeRun(config))
        lives[-1].wait_for("alert.started")
        time.sleep(random.Random(5).uniform(0, 1.5))  # dies at a moment of nobody's choosing
        lives[-1].end(signal.SIGKILL)
        first = alert_lines(config)
        lives.append(ServeRun(config))
        lives[-1].wait_for("1 alerts open" if len(first) == 1 else "resumed from its snapshot")
        lives[-1].wait_for("alert.ended")
        assert lives[-1].end(signal.SIGTERM) == 0
    events = alert_lines(config)
    assert len({(event["id"], event["seq"]) for event in events}) == len(events)
    by_id: dict[object, list[dict[str, object]]] = {}
    for event in events:
        by_id.setdefault(event["id"], []).append(event)
    began = by_id[first[0]["id"]]
    assert [event["seq"] for event in began] == list(range(1, len(began) + 1))
    assert began[-1]["type"] in ("alert.ended", "alert.retracted")
    with Outbox.open(config.parent / "data", ()) as outbox:
        still_open = {alert.id for alert in outbox.open_alerts()}
    assert first[0]["id"] not in still_open
    for gap in (gap for event in events for gap in event["gaps"] if gap["reason"] == "restart"):  # type: ignore[attr-defined]
        assert gap["seconds"] >= 1
