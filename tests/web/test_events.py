"""Server-sent events: sent once to all, resumed where a listener stopped, never delayed by one that does not read."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monitor.alerting.alerts import ENDED
from monitor.alerting.outbox import OutboxEntry
from monitor.web.routes import events
from tests.support.sample_alert import sample_alert
from tests.support.web_only import WebAppServer
from tests.support.web_server import TIMEOUT_S


@contextmanager
def listening(server: WebAppServer, **headers: str) -> Iterator[Iterator[dict[str, str]]]:
    """The events as a browser reads them, without comments, from the server's first comment on."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", "/api/v1/events", headers=server.credentials | named)
    reply = connection.getresponse()
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    while reply.readline() != b": welcome\r\n":
        pass

    def read() -> Iterator[dict[str, str]]:
        event: dict[str, str] = {}
        while whole := reply.readline().decode():
            line = whole.rstrip("\r\n")
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = value
            elif not line and "event" in event:
                yield event
                event = {}
        raise AssertionError("the server closed the connection")

    try:
        yield read()
    finally:
        connection.close()


def test_alerts_are_sent_at_once_and_again_after_a_reconnect(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server, listening(server) as one, listening(server) as two:
        server.outbox.write([OutboxEntry("ch5", [sample_alert(), sample_alert(type=ENDED, seq=2)])])
        for listener in (one, two):
            started, ended = next(listener), next(listener)
            assert (started["event"], ended["event"]) == ("alert.started", "alert.ended")
            assert (started["id"], ended["id"]) == ("1", "2")
            assert json.loads(ended["data"])["status"] == "ended"
            assert json.loads(ended["data"])["title"] == "<b>The Film</b>"
        with listening(server, Last_Event_ID="1") as reconnected:
            assert next(reconnected)["id"] == "2"
        server.context.rights.review(sample_alert().id, "confirmed", by="ada")
        reviewed = next(one)
        assert reviewed["event"] == "alert.reviewed"
        assert "id" not in reviewed
        assert json.loads(reviewed["data"])["review"]["by"] == "ada"


@pytest.mark.slow
def test_a_listener_that_does_not_read_is_dropped_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_PER_TOKEN", 100)
    monkeypatch.setattr(events, "SEND_S", 4.0)  # the reader, in this process too, may be slow meanwhile
    with WebAppServer(tmp_path) as server, listening(server) as reader:
        asleep = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for one in asleep:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.sendall(f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n{server.bearer}\r\n".encode())
            assert one.recv(1).startswith(b"H")
        feed = server.context.feed
        # Four MB for each: more than the kernel buffers for a connection, far more than a queue holds.
        padding = tuple({"at": float(n), "seconds": 1.0, "reason": "x" * 500} for n in range(256))
        n_events = 32
        server.outbox.write(
            [OutboxEntry("ch5", [sample_alert(n, reason=json.dumps(padding)) for n in range(n_events)])]
        )
        assert [next(reader)["id"] for _ in range(n_events)] == [str(n + 1) for n in range(n_events)]
        seen = iter(lambda: feed.n_listeners, 1)
        for n, _ in enumerate(seen):
            server.outbox.write([OutboxEntry("ch5", [sample_alert(1000 + n)])])
            next(reader)  # the reader gets its events all the while
        assert feed.n_listeners == 1
        for one in asleep:
            one.close()


def test_the_number_of_listeners_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LISTENERS", 1)
    with WebAppServer(tmp_path) as server, listening(server):
        reply = server.client()("GET", "/api/v1/events")
        assert reply.status == 429
        assert reply.headers["retry-after"] == "10"
