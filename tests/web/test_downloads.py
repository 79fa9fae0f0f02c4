"""Downloads: sent as fast as the client takes them, a few at once, and ended if it takes nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.web.auth.gatekeeper import LOCAL_NAME, Caller
from monitor.web.auth.tokens import Tokens
from monitor.web.requests import downloads
from monitor.web.requests.downloads import RecentlyUsed
from monitor.web.requests.limits import Slots
from monitor.web.requests.problems import Problem
from tests.support.long_reference import add_long_reference
from tests.support.serve_process import wait_until
from tests.support.web_only import WebAppServer

EXPORT = "/api/v1/references/film/export"
N_SECONDS = 20_000  # 20 MB: more than the buffers of a connection


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloads")
    add_long_reference(folder, "enc-1", "film", N_SECONDS)
    return folder


@pytest.fixture
def server(data_dir: Path) -> Iterator[WebAppServer]:
    with WebAppServer(data_dir) as opened:
        yield opened


def unread(server: WebAppServer, token: str = "") -> socket.socket:
    """A request for the export whose response is not read."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    authorization = f"Authorization: Bearer {token}\r\n" if token else server.bearer
    connection.sendall(f"GET {EXPORT} HTTP/1.1\r\nHost: localhost\r\n{authorization}\r\n".encode())
    assert connection.recv(12, socket.MSG_PEEK).endswith(b" 200")
    return connection


def test_a_client_that_takes_nothing_loses_its_slot(server: WebAppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SEND_S", 0.5)
    connections = [unread(server) for _ in range(4)]
    client = server.client()
    wait_until(lambda: client("GET", EXPORT).status == 200, lambda: "no slot became free")
    for connection in connections:
        connection.close()


def test_one_token_cannot_take_every_slot(server: WebAppServer, data_dir: Path) -> None:
    tokens = Tokens(data_dir)
    greedy, other = tokens.add("greedy", "read"), tokens.add("other", "read")
    try:
        connections = [unread(server, greedy) for _ in range(2)]
        assert server.client(greedy)("GET", EXPORT).status == 429
        assert server.client(other)("GET", EXPORT).status == 200
        for connection in connections:
            connection.close()
        wait_until(lambda: server.client(greedy)("GET", EXPORT).status == 200, lambda: "no slot became free")
    finally:
        tokens.remove("greedy")
        tokens.remove("other")


def test_slots_are_counted_in_all_and_by_token() -> None:
    slots = Slots(3, 2, "busy")
    ada, bob = Caller("ada", "read"), Caller("bob", "read")
    taken = [slots.take(ada), slots.take(ada)]
    with pytest.raises(Problem):
        slots.take(ada)
    taken.append(slots.take(bob))
    with pytest.raises(Problem):
        slots.take(Caller("eve", "read"))
    for slot in (*taken, *taken):  # releasing twice frees one slot
        slot.release()
    assert [slots.take(Caller(LOCAL_NAME, "admin")) for _ in range(3)]
    with pytest.raises(Problem):
        slots.take(bob)


def test_a_cache_forgets_what_was_used_least_recently() -> None:
    cache: RecentlyUsed[int] = RecentlyUsed(2)
    for n, key in enumerate("ab"):
        cache.put(key, n)
    assert cache.get("a") == 0
    cache.put("c", 2)
    assert [cache.get(key) for key in "abc"] == [0, None, 2]
