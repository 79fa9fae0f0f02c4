"""Connections that send nothing, half a request, or read nothing: they are closed, limited, and keep nobody out."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from monitor.ops.health import Health
from monitor.ops.metrics import Metrics
from monitor.web import connections, middleware
from monitor.web.auth.tokens import Tokens
from monitor.web.connections import ConnectionLimits, Lease
from monitor.web.probes import create_probes
from monitor.web.server import probes_server
from tests.support.live_stream import LiveStream, serve_stream
from tests.support.running_source import LENGTH_S, write_stream_clip
from tests.support.serve_process import ServeProcess, wait_until
from tests.support.web_only import WebAppServer
from tests.support.web_server import TIMEOUT_S

HALF_A_HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Half: "


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    if sent:
        connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Waits for the server to close the connection, whatever it answers before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


@contextmanager
def dripping(connection: socket.socket) -> Iterator[None]:
    """Sends a byte much more often than any limit, while open."""
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            try:
                connection.sendall(b"x")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET",
        HALF_A_HEAD,
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /livez HTTP/1.1\r\n",  # the second head never ends
        b"POST /api/v1/licences HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",  # answered 401
    ],
)
def test_a_request_that_does_not_arrive_is_given_up(sent: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    Tokens(tmp_path).add("one", "read")
    with WebAppServer(tmp_path) as server, connect(server.port, sent) as connection:
        assert is_closed(connection)
        wait_until(lambda: server.limits.n_open == 0, lambda: server.limits.n_open)


def test_a_head_that_arrives_byte_by_byte_has_no_more_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with WebAppServer(tmp_path) as server, connect(server.port, HALF_A_HEAD) as connection, dripping(connection):
        assert is_closed(connection)


def test_a_body_that_arrives_byte_by_byte_has_no_more_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(middleware, "WHOLE_BODY_S", 0.5)
    head = b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    Tokens(tmp_path).add("one", "read")
    with WebAppServer(tmp_path) as server, connect(server.port, head) as connection, dripping(connection):
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_a_request_that_takes_long_to_answer_is_not_closed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    events = b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n"
    token = Tokens(tmp_path).add("one", "read")
    with WebAppServer(tmp_path) as server, connect(server.port, events % token.encode()) as listener:
        assert listener.recv(15) == b"HTTP/1.1 200 OK"
        with connect(server.port) as silent:
            assert is_closed(silent)  # later than the limit
        assert server.limits.n_open == 1
        assert server.context.feed.n_listeners == 1


def test_a_client_that_does_not_read_its_response_is_dropped(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "STUCK_S", 0.3)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with WebAppServer(tmp_path) as server, connect(server.port) as connection:
        connection.sendall(request * 500)  # responses of 30 MB
        wait_until(lambda: server.limits.n_open == 0, lambda: server.limits.n_open)


# --- limits ----------------------------------------------------------------------------------------------------------


def test_silent_connections_beyond_the_limit_give_way_to_new_ones(tmp_path: Path) -> None:
    with WebAppServer(tmp_path, max_connections_per_client=20) as server, ExitStack() as stack:
        for number in range(200):
            stack.enter_context(connect(server.port, HALF_A_HEAD if number % 2 else b""))
            if number % 20 == 0:
                assert server.client()("GET", "/livez").status == 200
        assert server.limits.n_open <= 20
        assert server.client()("GET", "/livez").status == 200


def test_connections_with_requests_under_way_do_not_give_way() -> None:
    limits = ConnectionLimits(total=3, per_peer=2)
    closed: list[str] = []

    def opened(name: str, peer: str) -> Lease | None:
        lease = limits.admit(peer)
        if lease is not None:
            lease.attach(lambda: closed.append(name))
        return lease

    first, second = opened("first", "192.0.2.1"), opened("second", "192.0.2.1")
    assert first
    assert second
    first.set_waiting(False)
    assert opened("third", "192.0.2.1")
    assert closed == ["second"]  # the oldest that waits, not the one at work
    other = opened("other", "192.0.2.2")
    assert other
    assert limits.n_open == 3
    assert opened("another", "2001:db8::1")
    assert closed == ["second", "third"]
    first.release()
    first.release()
    assert limits.n_open == 2


def test_when_all_are_busy_a_new_one_is_refused() -> None:
    limits = ConnectionLimits(total=2, per_peer=2, trusted=lambda peer: peer == "192.0.2.9")
    leases = [limits.admit("192.0.2.1"), limits.admit("192.0.2.9")]
    for lease in leases:
        assert lease
        lease.set_waiting(False)
    assert limits.admit("192.0.2.2") is None
    assert leases[1]
    leases[1].set_waiting(True)
    assert limits.admit("192.0.2.2")


def test_a_proxy_has_no_limit_of_its_own_and_ipv6_counts_by_network() -> None:
    limits = ConnectionLimits(total=10, per_peer=2, trusted=lambda peer: peer == "192.0.2.9")
    proxied = [limits.admit("192.0.2.9") for _ in range(4)]
    assert limits.n_open == 4
    assert all(lease and not lease.is_revoked for lease in proxied)
    network = [limits.admit(f"2001:db8::{n}") for n in range(3)]
    assert network[0]
    assert network[0].is_revoked


@contextmanager
def file_limit(n: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_accept_without_free_files_is_logged_once_and_recovers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "ACCEPT_PAUSE_S", 0.01)
    with caplog.at_level(logging.WARNING):
        asyncio.run(_serve_after_a_want_of_files())
    assert caplog.text.count("cannot accept connections (Too many open files)") == 1


async def _serve_after_a_want_of_files() -> None:
    server = probes_server(create_probes(Metrics(CollectorRegistry()), Health({}, [], {}, vital=[])))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(listener.getsockname()[1], request) as waiting:
        lowest_free = os.dup(listener.fileno())
        os.close(lowest_free)
        with file_limit(lowest_free):
            await asyncio.sleep(0.3)  # thirty times as long as the pause between two tries
        assert await asyncio.to_thread(waiting.recv, 15) == b"HTTP/1.1 200 OK"
    server.should_exit = True
    await serving


# --- a running monitor -----------------------------------------------------------------------------------------------

N_SILENT = 5000
FEW_FILES = ("sh", "-c", 'ulimit -n 1024 && exec "$@"', "sh", sys.executable, "-m", "monitor.cli")


@pytest.mark.slow
def test_five_thousand_silent_connections_stop_nothing(tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    clip = write_stream_clip(tmp_path / "stream.ts")
    with ExitStack() as stack:
        stack.enter_context(file_limit(N_SILENT + 1000))
        streams = [stack.enter_context(serve_stream(LiveStream(clip, LENGTH_S))) for _ in range(2)]
        config.write_text(
            "data_dir: data\nweb: {port: 0, probes_port: 0}\nchannels:\n"
            f'  - {{name: one, url: "http://127.0.0.1:{streams[0].port}/", mode: economy}}\n'
            f'  - {{name: two, url: "http://127.0.0.1:{streams[1].port}/", mode: economy}}\n'
        )
        serve = stack.enter_context(ServeProcess(config, program=FEW_FILES))
        port = int(serve.addresses[0].rpartition(":")[2])

        def seconds(channel: str) -> float:
            return serve.value("copywatch_frames_received_total", channel=channel)

        wait_until(lambda: min(seconds("one"), seconds("two")) > 0, lambda: "".join(serve.log))
        n_lines = len(serve.log)
        for number in range(N_SILENT):
            stack.enter_context(connect(port, HALF_A_HEAD if number % 2 else b""))
        seen = {name: seconds(name) for name in ("one", "two")}
        assert [serve.get("/livez", address) for address in (0, 1)] == [(200, "ok\n")] * 2
        assert serve.problems() == {}
        wait_until(lambda: all(seconds(name) > seen[name] + 2 for name in seen), lambda: "".join(serve.log))
        for name in seen:
            assert serve.value("copywatch_gap_seconds_total", channel=name) <= 0
        assert len(os.listdir(f"/proc/{serve.process.pid}/fd")) < 700  # half of the files, and its own
        assert len(serve.log) - n_lines < 20, "".join(serve.log[n_lines:])
