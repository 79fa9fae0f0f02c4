"""The alert rules: valid for promtool, on exported metrics, and fired by real faults of a real `serve`."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import timeit
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from monitor.demo.films import Film
from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support import media
from tests.support.live_stream import LiveStream, WebServer
from tests.support.onnx_encoders import write_slow
from tests.support.promql_queries import ROOT, faults
from tests.support.serve_process import ServeProcess, wait_until

RULES = ROOT / "deploy/prometheus/rules.yml"
FPS, LENGTH_S = 4, 24
BY_FAULTS = {
    "ChannelDown",
    "IndexStale",
    "MatchingBehind",
    "SecondsDropped",
    "DetectionLatencyHigh",
    "DeliveryBacklog",
}
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 30.0)
OTHER = Film("other", "Other", 88, ("marble", "wheel", "patchwork", "cells"), 3600.0)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.system
def test_promtool_accepts_them() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.system
def test_each_fires_after_its_time_and_not_before() -> None:
    written = Path(__file__).parent / "rules_test.yml"
    tested = {
        case["alertname"] for test in yaml.safe_load(written.read_text())["tests"] for case in test["alert_rule_test"]
    }
    assert tested == {rule["alert"] for rule in rules()}
    done = subprocess.run(["promtool", "test", "rules", str(written)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_use_exported_metrics_and_labels() -> None:
    assert {rule["alert"]: found for rule in rules() if (found := faults(rule["expr"]))} == {}


def test_each_has_a_summary_and_a_runbook() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "runbook"}
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"] + rule["annotations"]["runbook"]))
        assert labels <= {"instance", "channel", "sink", "reason"}
        assert "for" in rule


def test_the_operations_page_has_the_same_runbooks() -> None:
    documented = re.findall(r"^\| `(\w+)` \| (page|ticket) \| (.+) \|$", (ROOT / "deploy/README.md").read_text(), re.M)
    runbooks = [re.sub(r"{{ \$labels\.\w+ }}", "NAME", rule["annotations"]["runbook"]) for rule in rules()]
    assert documented == [(rule["alert"], rule["labels"]["severity"], runbooks[n]) for n, rule in enumerate(rules())]


# --- fired by real faults ---------------------------------------------------------------------------------------------


def write_heavy(path: Path, turn_s: float) -> Path:
    """Writes such an encoder, which takes about `turn_s` for a bright picture on this machine."""
    bright, n_rounds = np.full((90, 160, 3), 255, np.uint8), 20
    write_slow(path, n_rounds)
    encoder = load_encoder(path)
    took_s = min(timeit.repeat(lambda: encoder.encode([bright]), number=1, repeat=4))  # the first compiles
    return write_slow(path, round(n_rounds * turn_s / took_s))


def write_clip(path: Path, film: Film, *, bright: bool = False) -> Path:
    """Writes some seconds of the film, dark or bright."""

    def picture(time_s: float) -> NDArray[np.uint8]:
        dim = film.picture(time_s) // 3
        return dim + np.uint8(170) if bright else dim

    times = [n / FPS for n in range(LENGTH_S * FPS)]
    return media.write_clip(path, ((t, picture(t)) for t in times), fps=FPS, gop=FPS, b_frames=0)


@contextmanager
def on_air(clip: Path, past_s: float = 1.0) -> Iterator[str]:
    """The address of a live server that starts `past_s` in the past, as relays do; it closes connections at the end."""
    stream, is_over = LiveStream(clip, LENGTH_S), threading.Event()
    stream._started_s -= 4 * LENGTH_S  # the stream has run for a while

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for piece in stream.pieces(burst_s=past_s):
            if is_over.is_set():
                return
            request.wfile.write(piece)

    with WebServer(answer) as web:
        yield f"http://127.0.0.1:{web.port}/x.ts"
        is_over.set()


@dataclass
class Prometheus:
    """A Prometheus that scrapes and evaluates every second."""

    address: str
    targets: Path

    def scrape(self, *targets: str) -> None:
        aside = self.targets.with_suffix(".tmp")
        aside.write_text(json.dumps([{"targets": list(targets)}]))
        aside.rename(self.targets)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=20) as reply:
            return json.loads(reply.read())["data"]

    def firing(self) -> set[str]:
        return {one["labels"]["alertname"] for one in self.get("/api/v1/alerts")["alerts"] if one["state"] == "firing"}


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    quick = yaml.safe_load(RULES.read_text())
    for group in quick["groups"]:
        for rule in group["rules"]:
            rule["for"] = "2s"  # the only change
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(quick))
    (tmp_path / "prometheus.yml").write_text(
        f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [rules.yml]
scrape_configs:
  - job_name: copywatch
    file_sd_configs: [{{files: [{tmp_path}/targets.json], refresh_interval: 1s}}]
"""
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/tsdb",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=log,
        )
    yield Prometheus(f"http://127.0.0.1:{port}", tmp_path / "targets.json")
    process.kill()
    process.wait()


@pytest.mark.system
def test_real_faults_fire_them(prometheus: Prometheus, tmp_path: Path) -> None:
    encoder = write_heavy(tmp_path / "heavy.onnx", turn_s=2.5)
    film = write_clip(tmp_path / "film.ts", FILM)
    with Catalog.open(tmp_path / "data", write=True) as catalog:
        register(film, catalog, load_encoder(encoder))
    other = write_clip(tmp_path / "other.ts", OTHER)
    hard = write_clip(tmp_path / "hard.ts", OTHER, bright=True)
    config = tmp_path / "copywatch.yaml"
    common = "data_dir: data\nencoder: heavy.onnx\nalerting: {output: out/alerts.jsonl}\nweb: {port: 0}\nchannels:\n"
    with ExitStack() as stack:
        dying = ExitStack()
        stack.callback(dying.close)
        channels = {"dying": dying.enter_context(on_air(other))}
        channels["steady"] = stack.enter_context(on_air(other))
        (tmp_path / "out").mkdir()

        def configure() -> None:
            lines = [f'  - {{name: {name}, url: "{url}", mode: exact}}\n' for name, url in channels.items()]
            config.write_text(common + "".join(lines))

        configure()
        serve = stack.enter_context(ServeProcess(config))
        prometheus.scrape(serve.addresses[0].removeprefix("http://"))
        for name in channels:
            wait_until(lambda name=name: serve.value("copywatch_channel_up", channel=name) == 1, lambda: serve.log)  # type: ignore[misc]
        wait_until(lambda: serve.value("copywatch_frames_processed_total", channel="steady") >= 8, lambda: serve.log)
        wait_until(lambda: not prometheus.firing() & {"CopywatchAbsent", "CopywatchDown"}, prometheus.firing)
        assert not prometheus.firing() & BY_FAULTS

        dying.close()  # the server of one channel stops
        (tmp_path / "data/catalog.sqlite").write_bytes(b"garbage" * 4096)
        (tmp_path / "out").rename(tmp_path / "gone")  # the folder of the alert file is missing
        # Two channels more than this machine can match: one is expensive, the other carries the film.
        channels["hard"] = stack.enter_context(on_air(hard, past_s=60.0))
        channels["late"] = stack.enter_context(on_air(film, past_s=40.0))
        configure()
        seen: set[str] = set()

        def all_fired() -> bool:
            seen.update(prometheus.firing())
            return seen >= BY_FAULTS

        wait_until(all_fired, lambda: (BY_FAULTS - seen, "".join(serve.log[-30:]), serve.get("/metrics")[1]))
        assert not seen & {"CopywatchDown", "AllChannelsDown", "AlertsNotKept", "DataDiskFull", "ReferencesDamaged"}
        serve.kill()
        wait_until(lambda: "CopywatchDown" in prometheus.firing(), prometheus.firing)
        prometheus.scrape()
        wait_until(lambda: "CopywatchAbsent" in prometheus.firing(), prometheus.firing)
