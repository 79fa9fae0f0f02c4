"""`copywatch serve` as a real process: one channel that works, one that cannot."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.demo.films import Film
from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support import media

pytestmark = pytest.mark.slow  # a real serve

FPS = 5
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 30.0)
OTHER = Film("other", "Other", 88, ("marble", "wheel", "patchwork", "cells"), 3600.0)


class Serving:
    """A running `copywatch serve`, its log and its address."""

    def __init__(self, config: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "monitor.cli", "serve", "--config", str(config)],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")},
        )
        self.log: list[str] = []
        found = re.search(r"http://127\.0\.0\.1:\d+", self.wait_for("health at"))
        assert found
        self.address = found.group()

    def wait_for(self, words: str) -> str:
        """The next line of the log that has these words."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line)
            if words in line:
                return line
        raise AssertionError(f"no {words!r} in the log:\n{''.join(self.log)}")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.address + path, timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    film = media.write_clip(tmp_path / "film.mp4", media.pieces(FPS, (FILM, 0, 30)), fps=FPS)
    with Catalog.open(tmp_path / "data", write=True) as catalog:
        register(film, catalog, load_encoder())
    air = media.pieces(FPS, (OTHER, 0, 8), (FILM, 6.3, 16), (OTHER, 100, 20))
    media.write_clip(tmp_path / "air.ts", air, fps=FPS)
    config = tmp_path / "copywatch.yaml"
    config.write_text(
        f"""
data_dir: data
alerting: {{output: alerts.jsonl}}
web: {{port: 0}}
channels:
  - {{name: works, url: "{tmp_path / "air.ts"}", mode: exact}}
  - {{name: broken, url: "http://user:s3cret@127.0.0.1:9/nothing.m3u8"}}
"""
    )
    running = Serving(config)
    yield running
    running.process.kill()
    running.process.wait()


def test_a_copy_is_told_while_another_channel_is_broken_and_the_process_stops_when_asked(
    serving: Serving, tmp_path: Path
) -> None:
    assert serving.get("/livez")[0] == 200
    assert serving.get("/readyz")[0] == 200
    serving.wait_for("the stream ended")
    told = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [alert["type"] for alert in told if alert["type"] != "alert.updated"] == ["alert.started", "alert.ended"]
    assert {alert["reference"] for alert in told} == {"film"}
    assert len({alert["id"] for alert in told}) == 1
    assert told[-1]["channel_start"] == pytest.approx(8, abs=2)
    assert told[-1]["reference_start"] == pytest.approx(6.3, abs=2)
    metrics = serving.get("/metrics")[1]
    assert 'copywatch_frames_processed_total{channel="works"} 44.0' in metrics
    assert 'copywatch_channel_up{channel="broken"} 0.0' in metrics
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(timeout=60) == 0
    assert serving.process.stderr
    assert "s3cret" not in "".join(serving.log) + serving.process.stderr.read() + metrics
