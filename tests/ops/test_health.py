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
from tests.support.live_stream import Air, on_air
from tests.support.onnx_encoders import write_hanging
from tests.support.running_source import FPS, LENGTH_S, write_air
from tests.support.serve_process import Serve, until

pytestmark = pytest.mark.system  # strace

ALL_WELL = dict.fromkeys(("index", "outbox", "compute", "outbox writer", "refresher"), "ok")


@dataclass(frozen=True)
class House:
    data: Path
    serve: Serve
    manager: socket.socket  # where a service manager listens
    air: Air
    white: Path

    def told(self) -> list[str]:
        """What the service manager has been told since it last looked."""
        words = []
        while True:
            try:
                words += self.manager.recv(4096, socket.MSG_DONTWAIT).decode().splitlines()
            except BlockingIOError:
                return words


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    encoder = write_hanging(folder / "hanging.onnx")
    film = write_air(folder / "film.ts", seed=5)
    with Catalog.open(folder / "data", write=True) as catalog:
        register(film, catalog, load_encoder(encoder))
    bright = np.full((90, 160, 3), 255, np.uint8)
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    white = media.write_clip(folder / "white.ts", ((t, bright) for t in times), fps=FPS, gop=FPS, b_frames=0)
    air = Air(write_air(folder / "air.ts"), LENGTH_S)
    config = folder / "copywatch.yaml"
    with on_air(air) as web, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        config.write_text(
            f"data_dir: data\nencoder: hanging.onnx\nweb: {{port: 0, probes_port: 0}}\nchannels:\n"
            f'  - {{name: works, url: "http://127.0.0.1:{web.port}/x.ts", mode: exact}}\n'
            f'  - {{name: dead, url: "http://127.0.0.1:9/x.ts"}}\n'
        )
        manager.bind(str(folder / "notify"))
        asked = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "400000"}
        with Serve(config, asked, (sys.executable, "-m", "tests.support.impatient_serve")) as serve:
            yield House(folder / "data", serve, manager, air, white)


@contextmanager
def hanging(serve: Serve, *files: Path) -> Iterator[None]:
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


def test_ready_though_one_channel_is_dead(house: House) -> None:
    serve = house.serve
    until(lambda: serve.value("copywatch_channel_up", channel="works") == 1, lambda: serve.log)
    until(lambda: serve.value("copywatch_channel_state", channel="dead", state="failed") == 1, lambda: serve.log)
    for address in range(2):  # the main one, and that of the probes alone
        status, body = serve.get("/readyz?verbose", address)
        assert (status, json.loads(body)) == (200, {"status": "ready", "checks": ALL_WELL})
        assert serve.get("/livez", address) == (200, "ok\n")
        assert "copywatch_channel_up" in serve.get("/metrics", address)[1]
    assert serve.get("/api/v1/channels", 1)[0] == 404


def test_a_service_manager_hears_that_it_is_ready_and_lives(house: House) -> None:
    told = house.told()
    until(lambda: told.extend(house.told()) or told.count("WATCHDOG=1") > 2, lambda: told)  # type: ignore[func-returns-value]
    assert told.count("READY=1") == 1
    assert "STATUS=watching 2 channels for 1 references" in told


def test_not_ready_while_the_catalogue_cannot_be_read(house: House) -> None:
    catalogue = house.data / "catalog.sqlite"
    whole = catalogue.read_bytes()
    catalogue.rename(house.data / "aside")
    until(lambda: "index" in house.serve.problems(), house.serve.problems)
    catalogue.write_bytes(b"garbage" * 4096)
    until(lambda: "index" in house.serve.problems(), house.serve.problems)
    assert house.serve.get("/livez")[0] == 200  # a restart would not mend it
    catalogue.write_bytes(whole)
    until(lambda: not house.serve.problems(), house.serve.problems)


def test_not_ready_while_a_disk_hangs(house: House) -> None:
    data = house.data
    with hanging(house.serve, data / "catalog.sqlite", data / "alerts.sqlite", data / "alerts.sqlite-wal"):
        until(lambda: house.serve.problems().keys() >= {"outbox writer", "refresher"}, house.serve.problems)
        assert "compute" not in house.serve.problems()
        assert house.serve.get("/livez")[0] == 200  # a restart would not mend it
    until(lambda: not house.serve.problems(), house.serve.problems)


def test_an_encoder_that_hangs_is_told_and_starves_the_watchdog(house: House) -> None:
    house.air.use(house.white)
    until(lambda: "compute" in house.serve.problems(), house.serve.problems)
    assert house.serve.get("/livez")[0] == 503
    until(lambda: any(word.startswith("STATUS=compute has finished nothing") for word in house.told()), house.told)
    deadline = time.monotonic() + 2.0  # five times as long as the watchdog waits
    while time.monotonic() < deadline:
        assert "WATCHDOG=1" not in house.told()
        time.sleep(0.1)  # it must stay silent for all of this time
