"""`copywatch serve` as a real process: how it reports its start, and one channel that works beside one that cannot."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.demo.films import Film
from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support import media
from tests.support.serve_process import ServeProcess

pytestmark = pytest.mark.slow  # a real serve

FPS = 5
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 30.0)
OTHER = Film("other", "Other", 88, ("marble", "wheel", "patchwork", "cells"), 3600.0)
START_UP = [
    "loading models",
    "opening the library in ",
    "opened the library: 0 references",
    "listening on http://127.0.0.1:",
    "restoring channels: 0 snapshots are stored",
    "watching 0 channels for 0 references; health at http://127.0.0.1:",
    "Dashboard: http://127.0.0.1:",
]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_serve_logs_its_start_and_the_address_of_the_dashboard(log_format: str, tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text(f"data_dir: data\nlogging: {{format: {log_format}}}\nweb: {{port: 0}}\n")
    with ServeProcess(config) as running:
        running.wait_for("Dashboard: ")
        log = running.log
        lines = [next(n for n, line in enumerate(log) if text in line) for text in START_UP]
        assert lines == sorted(lines), log
        ((link, address),) = re.findall(r"Dashboard: ((http://[\d.]+:\d+/)#secret=[\w-]{22})", "".join(log))
        assert "Copywatch" in urllib.request.urlopen(address, timeout=20).read().decode()
        if log_format == "json":
            assert json.loads(log[lines[-1]])["event"] == f"Dashboard: {link}"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ServeProcess]:
    film = media.write_clip(tmp_path / "film.mp4", media.pieces(FPS, (FILM, 0, 30)), fps=FPS)
    with Catalog.open(tmp_path / "data", write=True) as catalog:
        register(film, catalog, load_encoder())
    pieces = media.pieces(FPS, (OTHER, 0, 8), (FILM, 6.3, 16), (OTHER, 100, 20))
    media.write_clip(tmp_path / "broadcast.ts", pieces, fps=FPS)
    config = tmp_path / "copywatch.yaml"
    config.write_text(
        f"""
data_dir: data
alerting: {{output: alerts.jsonl}}
web: {{port: 0}}
channels:
  - {{name: works, url: "{tmp_path / "broadcast.ts"}", mode: exact}}
  - {{name: broken, url: "http://user:s3cret@127.0.0.1:9/nothing.m3u8"}}
"""
    )
    with ServeProcess(config) as serve:
        yield serve


def test_a_copy_is_found_beside_a_broken_channel_and_sigterm_stops_the_process(
    running: ServeProcess, tmp_path: Path
) -> None:
    assert running.get("/livez")[0] == 200
    assert running.get("/readyz")[0] == 200
    running.wait_for("the stream ended")
    alerts = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [alert["type"] for alert in alerts if alert["type"] != "alert.updated"] == ["alert.started", "alert.ended"]
    assert {alert["reference"] for alert in alerts} == {"film"}
    assert len({alert["id"] for alert in alerts}) == 1
    assert alerts[-1]["channel_start"] == pytest.approx(8, abs=2)
    assert alerts[-1]["reference_start"] == pytest.approx(6.3, abs=2)
    metrics = running.get("/metrics")[1]
    assert 'copywatch_frames_processed_total{channel="works"} 44.0' in metrics
    assert 'copywatch_channel_up{channel="broken"} 0.0' in metrics
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=60) == 0
    running.kill()  # reads the rest of the log
    assert "s3cret" not in "".join(running.log) + metrics
    logged = [json.loads(line) for line in running.log if '"event": "alert.' in line]
    assert [line["event"].split()[0] for line in logged] == [alert["type"] for alert in alerts]
    assert {line["channel"] for line in logged} == {"works"}
