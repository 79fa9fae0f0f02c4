"""Memory of a real `serve` under load: a read token on every route, unread exports, imports of the greatest length.

The library has a reference of 249,000 s, the longest that is allowed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest

from monitor.web.auth.gatekeeper import SCOPES
from monitor.web.auth.tokens import Scope, Tokens
from reference_db.features.encoder import load_encoder
from reference_db.library import ReferenceLibrary
from reference_db.store.catalog import Catalog
from tests.support.long_reference import (
    LONG_S,
    add_long_reference,
    forget_peak,
    memory_bytes,
    peak_bytes,
)
from tests.support.onnx_encoders import write_grid
from tests.support.serve_process import wait_until
from tests.support.web_server import TIMEOUT_S, Client, MonitorServer

MB = 1 << 20
ROUNDS, AT_ONCE = 2, 12
PARAMETERS = {"{second}": "1", "{name}": "none", "{file}": "air-start.jpg", "{n}": "1", "{d}": "1"}
SCOPE_NAMES: tuple[Scope, ...] = ("read", "write", "admin")
ENDLESS = "/api/v1/events"  # test_events.py limits its listeners

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Monitor:
    """A running `serve` with a token of each scope."""

    server: MonitorServer
    data_dir: Path
    tokens: dict[Scope, str]

    def client(self, scope: Scope) -> Client:
        return self.server.client(self.tokens[scope])

    @property
    def pid(self) -> int:
        return self.server.process.pid


@pytest.fixture(scope="module")
def monitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    folder = tmp_path_factory.mktemp("memory")
    encoder = write_grid(folder / "grid.onnx", around_mean=True)
    encoder_id = load_encoder(encoder).encoder_id
    add_long_reference(folder / "data", encoder_id)
    add_long_reference(folder / "data", encoder_id, "short", 600, seed=1)
    tokens = {scope: Tokens(folder / "data").add(scope, scope) for scope in SCOPE_NAMES}
    config = folder / "copywatch.yaml"
    config.write_text(f"data_dir: data\nencoder: {encoder}\nweb: {{port: 0}}\n")
    server = MonitorServer(config)
    try:
        yield Monitor(server, folder / "data", tokens)
    finally:
        server.kill()


def paths() -> list[str]:
    """Every route that a read token may read, those of references with both references."""
    found = []
    for (method, path), scope in SCOPES.items():
        if method != "GET" or scope != "read" or path == ENDLESS:
            continue
        for name, value in PARAMETERS.items():
            path = path.replace(name, value)
        ids = ("long", "short") if "/references/" in path else ("0" * 24,)
        found += [path.replace("{id}", id) for id in ids] if "{id}" in path else [path]
    return found


def test_the_longest_reference_costs_little_at_the_start(monitor: Monitor) -> None:
    """Its features are 255 MB, and were in memory several times; now they are read in pieces."""
    assert peak_bytes(monitor.pid) - memory_bytes(monitor.pid) < 100 * MB


def test_a_read_token_cannot_fill_the_memory(monitor: Monitor) -> None:
    idle = memory_bytes(monitor.pid)
    forget_peak(monitor.pid)
    client = monitor.client("read")
    statuses: dict[str, set[int]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for path in paths():
            replies = pool.map(lambda path: client("GET", path).status, [path] * ROUNDS * AT_ONCE)
            statuses[path] = set(replies)
    unexpected = {path: found for path, found in statuses.items() if not found <= {200, 404, 429}}
    assert not unexpected
    assert 200 in statuses["/api/v1/references/long"]
    assert 200 in statuses["/api/v1/references/long/export"]
    grown = peak_bytes(monitor.pid) - idle
    assert grown < 200 * MB, f"{grown / MB:.0f} MB, from {idle / MB:.0f}"


def test_exports_that_nobody_reads_hold_little_memory(monitor: Monitor) -> None:
    client = monitor.client("read")
    idle = memory_bytes(monitor.pid)
    forget_peak(monitor.pid)
    head = "GET /api/v1/references/long/export HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
    head += f"{monitor.tokens['read']}\r\n\r\n"
    with ExitStack() as connections:
        heads = []
        for _ in range(12):
            connection = connections.enter_context(socket.create_connection((client.host, client.port), timeout=60))
            connection.sendall(head.encode())
            heads.append(connection.recv(12))  # the status, and nothing more
        assert sorted(heads) == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 429"] * 10
        assert client("GET", "/api/v1/references/long/export").status == 429
        assert client("GET", "/api/v1/references").status == 200
        grown = peak_bytes(monitor.pid) - idle
    assert grown < 50 * MB, f"{grown / MB:.0f} MB, from {idle / MB:.0f}"


def test_an_export_is_what_the_library_exports(monitor: Monitor) -> None:
    content = b"".join(ReferenceLibrary(monitor.data_dir).open_export("long").pieces)
    for _ in range(2):  # the second time its header is known
        reply = monitor.client("write")("GET", "/api/v1/references/long/export")
        assert int(reply.headers["content-length"]) == len(content)
        assert reply.body == content


def test_four_imports_at_once_cost_the_server_little(monitor: Monitor, tmp_path: Path) -> None:
    """The server receives them and reads their headers; a child checks the rest, and here it finds no writer's lock.

    What is searched afterwards costs more, as every reference does: its part of the index.
    """
    add_long_reference(tmp_path, monitor_encoder(monitor), "imported", LONG_S, seed=2)
    content = ReferenceLibrary(tmp_path).export("imported", tmp_path / "imported.copywatch").read_bytes()
    idle = memory_bytes(monitor.pid)
    forget_peak(monitor.pid)
    client = monitor.client("write")

    def send(scope: Scope) -> HTTPConnection:
        connection = HTTPConnection(client.host, client.port, timeout=TIMEOUT_S)
        headers = {**MULTIPART, "Authorization": f"Bearer {monitor.tokens[scope]}"}
        connection.request("POST", "/api/v1/references/import", multipart(content), headers)
        return connection

    with Catalog.open(monitor.data_dir, write=True), ExitStack() as connections, ThreadPoolExecutor(4) as pool:
        for connection in pool.map(send, SCOPE_NAMES[1:] * 2):
            connections.callback(connection.close)
        wait_until(lambda: len(client.get("/jobs")["items"]) == 4, lambda: client.get("/jobs"))
        assert {job["state"] for job in client.get("/jobs")["items"]} <= {"waiting", "running"}
        grown = peak_bytes(monitor.pid) - idle
    assert grown < 100 * MB, f"{grown / MB:.0f} MB, from {idle / MB:.0f}"


BOUNDARY = "----copywatch"
MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def multipart(content: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="x.copywatch"\r\n\r\n'.encode()
    return head + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def monitor_encoder(monitor: Monitor) -> str:
    return ReferenceLibrary(monitor.data_dir).list().references[0].encoder_id
