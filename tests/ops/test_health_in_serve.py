"""The probes of a real `serve` under real faults: a damaged catalogue, a disk that hangs, an encoder that hangs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support import media
from tests.support.live_stream import LiveStream, serve_stream
from tests.support.onnx_encoders import write_hanging
from tests.support.running_source import FPS, LENGTH_S, write_stream_clip
from tests.support.serve_process import ServeProcess, wait_until

pytestmark = pytest.mark.system  # strace

ALL_OK = dict.fromkeys(("index", "outbox", "compute", "outbox writer", "refresher"), "ok")


@dataclass(frozen=True)
class Setup:
    data: Path
    serve: ServeProcess
    manager: socket.socket  # on which a service manager listens
    stream: LiveStream
    white: Path

    def notifications(self) -> list[str]:
        """What the service manager has received since the last call."""
        lines = []
        while True:
            try:
                lines += self.manager.recv(4096, socket.MSG_DONTWAIT).decode().splitlines()
            except BlockingIOError:
                return lines


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("serve")
    encoder = write_hanging(folder / "hanging.onnx")
    film = write_stream_clip(folder / "film.ts", seed=5)
    with Catalog.open(folder / "data", write=True) as catalog:
        register(film, catalog, load_encoder(encoder))
    bright = np.full((90, 160, 3), 255, np.uint8)
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    white = media.write_clip(folder / "white.ts", ((t, bright) for t in times), fps=FPS, gop=FPS, b_frames=0)
    stream = LiveStream(write_stream_clip(folder / "stream.ts"), LENGTH_S)
    config = folder / "copywatch.yaml"
    with serve_stream(stream) as web, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        config.write_text(
            f"data_dir: data\nencoder: hanging.onnx\nweb: {{port: 0, probes_port: 0}}\nchannels:\n"
            f'  - {{name: works, url: "http://127.0.0.1:{web.port}/x.ts", mode: exact}}\n'
            f'  - {{name: dead, url: "http://127.0.0.1:9/x.ts"}}\n'
        )
        manager.bind(str(folder / "notify"))
        environment = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "400000"}
        with ServeProcess(config, environment, (sys.executable, "-m", "tests.support.short_timeout_serve")) as serve:
            yield Setup(folder / "data", serve, manager, stream, white)


@contextmanager
def hanging(serve: ServeProcess, *files: Path) -> Iterator[None]:
    """Every read and write of these files takes a minute, as on a network disk that went away."""
    calls = "pread64,pwrite64,fdatasync,fsync,openat"
    paths = [word for file in files for word in ("-P", str(file))]
    delay = ["-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=60000000"]
    strace = subprocess.Popen(
        ["strace", "-f", "-o", "/dev/null", *paths, *delay, "-p", str(serve.process.pid)], stderr=subprocess.PIPE
    )
    try:
        yield
    finally:
        strace.send_signal(signal.SIGINT)
        strace.communicate()


def test_ready_although_one_channel_is_down(setup: Setup) -> None:
    serve = setup.serve
    wait_until(lambda: serve.value("copywatch_channel_up", channel="works") == 1, lambda: serve.log)
    wait_until(lambda: serve.value("copywatch_channel_state", channel="dead", state="failed") == 1, lambda: serve.log)
    for address in range(2):  # the main one, and the one with the probes only
        status, body = serve.get("/readyz?verbose", address)
        assert (status, json.loads(body)) == (200, {"status": "ready", "checks": ALL_OK})
        assert serve.get("/livez", address) == (200, "ok\n")
        assert "copywatch_channel_up" in serve.get("/metrics", address)[1]
    assert serve.get("/api/v1/channels", 1)[0] == 404


def test_the_service_manager_is_notified_of_readiness_and_fed_the_watchdog(setup: Setup) -> None:
    lines: list[str] = []

    def is_fed() -> bool:
        lines.extend(setup.notifications())
        return lines.count("WATCHDOG=1") > 2

    wait_until(is_fed, lambda: lines)
    assert lines.count("READY=1") == 1
    assert "STATUS=watching 2 channels for 1 references" in lines


def test_not_ready_while_the_catalogue_cannot_be_read(setup: Setup) -> None:
    catalogue = setup.data / "catalog.sqlite"
    whole = catalogue.read_bytes()
    catalogue.rename(setup.data / "aside")
    wait_until(lambda: "index" in setup.serve.problems(), setup.serve.problems)
    catalogue.write_bytes(b"garbage" * 4096)
    wait_until(lambda: "index" in setup.serve.problems(), setup.serve.problems)
    assert setup.serve.get("/livez")[0] == 200  # a restart would not help
    catalogue.write_bytes(whole)
    wait_until(lambda: not setup.serve.problems(), setup.serve.problems)


def test_not_ready_while_a_disk_hangs(setup: Setup) -> None:
    data = setup.data
    with hanging(setup.serve, data / "catalog.sqlite", data / "alerts.sqlite", data / "alerts.sqlite-wal"):
        wait_until(lambda: setup.serve.problems().keys() >= {"outbox writer", "refresher"}, setup.serve.problems)
        assert "compute" not in setup.serve.problems()
        assert setup.serve.get("/livez")[0] == 200  # a restart would not help
    wait_until(lambda: not setup.serve.problems(), setup.serve.problems)


def test_an_encoder_that_hangs_is_reported_and_stops_the_watchdog(setup: Setup) -> None:
    setup.stream.use(setup.white)
    wait_until(lambda: "compute" in setup.serve.problems(), setup.serve.problems)
    assert setup.serve.get("/livez")[0] == 503
    wait_until(
        lambda: any(one.startswith("STATUS=compute has finished nothing") for one in setup.notifications()),
        lambda: "no status",
    )
    deadline = time.monotonic() + 2.0  # five times the watchdog's period
    while time.monotonic() < deadline:
        assert "WATCHDOG=1" not in setup.notifications()
        time.sleep(0.1)  # it must stay silent for all of this time
