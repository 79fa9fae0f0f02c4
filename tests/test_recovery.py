"""kill -9 of a real `serve`, again and again: what is told in the end is what an unbroken life tells."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from monitor.alerting.outbox import History, Outbox
from monitor.demo.air import Transmitter
from monitor.demo.films import Film
from reference_db.catalog import Catalog
from reference_db.encoder import load_encoder
from reference_db.registration import register
from tests import media

FPS = 4
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 40.0)
OTHER = Film("other", "Other", 88, ("marble", "wheel", "patchwork", "cells"), 3600.0)
PATIENCE_S = 300.0


@dataclass(frozen=True)
class House:
    """A library with one film, and a recording in which pieces of it air twice."""

    library: Path
    recording: Path

    def config(self, folder: Path, url: str) -> Path:
        """A configuration of its own for one channel, on the same library."""
        data = folder / "data"
        data.mkdir(parents=True)
        for part in self.library.iterdir():
            (data / part.name).symlink_to(part)
        config = folder / "copywatch.yaml"
        config.write_text(
            f"data_dir: data\nalerting: {{output: alerts.jsonl}}\nweb: {{port: 0}}\n"
            f'channels: [{{name: ch5, url: "{url}", mode: exact}}]\n'
        )
        return config


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    folder = tmp_path_factory.mktemp("house")
    film = media.write_clip(folder / "film.mp4", ((n / FPS, FILM.picture(n / FPS)) for n in range(40 * FPS)), fps=FPS)
    with Catalog.open(folder / "library", write=True) as catalog:
        register(film, catalog, load_encoder())
    # other 10 s, the film from its second 6.3 for 16 s, other 20 s, the film from 20.2 for 14 s, other 20 s
    air = [OTHER.picture(n / FPS) for n in range(10 * FPS)]
    air += [FILM.picture(6.3 + n / FPS) for n in range(16 * FPS)]
    air += [OTHER.picture(100 + n / FPS) for n in range(20 * FPS)]
    air += [FILM.picture(20.2 + n / FPS) for n in range(14 * FPS)]
    air += [OTHER.picture(200 + n / FPS) for n in range(20 * FPS)]
    clip = media.write_clip(folder / "air.ts", ((n / FPS, shown) for n, shown in enumerate(air)), fps=FPS)
    return House(folder / "library", clip)


class Life:
    """One run of `serve`; its log is read as it comes."""

    def __init__(self, config: Path, point: str = "none", count: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.dying_serve", point, str(count), "serve", "--config", str(config)],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")},
        )
        self.log: list[str] = []
        self._came = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._came:
                self.log.append(line)
                self._came.notify_all()

    def wait_for(self, words: str) -> None:
        with self._came:
            said = self._came.wait_for(lambda: any(words in line for line in self.log), PATIENCE_S)
        assert said, f"no {words!r} in the log:\n{''.join(self.log)}"

    def end(self, number: int = signal.SIGKILL) -> int:
        """Sends the signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    """Whatever a test leaves running is ended."""
    begun: list[Life] = []
    yield begun
    for life in begun:
        life.process.kill()
        life.process.wait()


def told(config: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (config.parent / "alerts.jsonl").read_text().splitlines()]


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
    lives[-1].wait_for("goes on from its snapshot")
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
        time.sleep(random.Random(5).uniform(0, 1.5))
        lives[-1].end(signal.SIGKILL)
        first = told(config)
        lives.append(Life(config))
        lives[-1].wait_for("1 alerts open" if len(first) == 1 else "goes on from its snapshot")
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
