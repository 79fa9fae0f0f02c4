"""kill -9 of a real `serve`, again and again: what is told in the end is what an unbroken life tells."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.alerting.outbox import History, Outbox
from monitor.demo.broadcast import Transmitter
from tests.support.serve_runs import PATIENCE_S, House, Life, build_house, told

pytestmark = pytest.mark.slow  # kills a real serve again and again


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return build_house(tmp_path_factory.mktemp("house"))


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    """Whatever a test leaves running is ended."""
    begun: list[Life] = []
    yield begun
    for life in begun:
        life.process.kill()
        life.process.wait()


@pytest.mark.timeout(1200)
def test_killed_at_named_points_and_stopped_once_a_channel_tells_each_thing_once(
    house: House, tmp_path: Path, lives: list[Life]
) -> None:
    unbroken = house.config(tmp_path / "unbroken", str(house.recording))
    lives.append(Life(unbroken))
    lives[-1].wait_for("the stream ended")
    assert lives[-1].end(signal.SIGTERM) == 0
    expected = told(unbroken)
    assert [alert["type"] for alert in expected if alert["type"] != "alert.updated"] == [
        "alert.started",
        "alert.ended",
    ] * 2

    broken = house.config(tmp_path / "broken", str(house.recording))
    for point in ("snapshot", "mid-line", "after-commit"):
        lives.append(Life(broken, point))
        assert lives[-1].process.wait(PATIENCE_S) == -signal.SIGKILL, (point, lives[-1].log)
    lives.append(Life(broken))
    lives[-1].wait_for("resumed from its snapshot")
    assert lives[-1].end(signal.SIGTERM) == 0  # wherever that falls
    before = told(broken)
    lives.append(Life(broken))
    lives[-1].wait_for("the stream ended")
    assert lives[-1].end(signal.SIGTERM) == 0
    after = told(broken)
    assert after[: len(before)] == before
    assert after == expected
    history = History(broken.parent / "data")
    assert [event.as_dict()["id"] for event in history.events()] == [alert["id"] for alert in expected]


def test_killed_on_air_an_alert_goes_on_with_a_gap_or_ends_and_is_never_left_open(
    house: House, tmp_path: Path, lives: list[Life]
) -> None:
    with Transmitter(house.recording) as air:
        config = house.config(tmp_path / "air", air.url)
        lives.append(Life(config))
        lives[-1].wait_for("alert.started")
        time.sleep(random.Random(5).uniform(0, 1.5))  # dies at a moment of nobody's choosing
        lives[-1].end(signal.SIGKILL)
        first = told(config)
        lives.append(Life(config))
        lives[-1].wait_for("1 alerts open" if len(first) == 1 else "resumed from its snapshot")
        lives[-1].wait_for("alert.ended")
        assert lives[-1].end(signal.SIGTERM) == 0
    events = told(config)
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
