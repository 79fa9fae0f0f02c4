"""Server-sent events: told once to all, from where a listener stopped, and never waiting for one who does not read."""

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
from tests.support.web_only import Door
from tests.support.web_server import PATIENCE_S


@contextmanager
def listening(door: Door, **headers: str) -> Iterator[Iterator[dict[str, str]]]:
    """The events as a browser reads them, comments apart, once the server has welcomed us."""
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE_S)
    connection.request("GET", "/api/v1/events", headers={k.replace("_", "-"): v for k, v in headers.items()})
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
        raise AssertionError("the server hung up")

    try:
        yield read()
    finally:
        connection.close()


def test_alerts_are_told_as_they_come_and_from_where_a_listener_stopped(tmp_path: Path) -> None:
    with Door(tmp_path) as door, listening(door) as one, listening(door) as two:
        door.outbox.write([OutboxEntry("ch5", [sample_alert(), sample_alert(type=ENDED, seq=2)])])
        for listener in (one, two):
            started, ended = next(listener), next(listener)
            assert (started["event"], ended["event"]) == ("alert.started", "alert.ended")
            assert (started["id"], ended["id"]) == ("1", "2")
            assert json.loads(ended["data"])["status"] == "ended"
            assert json.loads(ended["data"])["title"] == "<b>The Film</b>"
        with listening(door, Last_Event_ID="1") as back:
            assert next(back)["id"] == "2"
        door.context.rights.review(sample_alert().id, "confirmed", by="ada")
        reviewed = next(one)
        assert reviewed["event"] == "alert.reviewed"
        assert "id" not in reviewed
        assert json.loads(reviewed["data"])["review"]["by"] == "ada"


@pytest.mark.slow
def test_a_listener_that_does_not_read_is_dropped_and_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SEND_S", 4.0)  # the reader, in this process too, may be slow while the rest is told
    with Door(tmp_path) as door, listening(door) as reader:
        asleep = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(50)]
        for one in asleep:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one.recv(1).startswith(b"H")
        feed = door.context.feed
        # Four MB for each: more than the kernel holds back for a connection, far more than a queue.
        wide = tuple({"at": float(n), "seconds": 1.0, "reason": "x" * 500} for n in range(256))
        n_events = 32
        door.outbox.write([OutboxEntry("ch5", [sample_alert(n, reason=json.dumps(wide)) for n in range(n_events)])])
        assert [next(reader)["id"] for _ in range(n_events)] == [str(n + 1) for n in range(n_events)]
        seen = iter(lambda: feed.n_listeners, 1)
        for n, _ in enumerate(seen):
            door.outbox.write([OutboxEntry("ch5", [sample_alert(1000 + n)])])
            next(reader)  # the reader is told all the while
        assert feed.n_listeners == 1
        for one in asleep:
            one.close()


def test_not_more_listeners_than_can_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LISTENERS", 1)
    with Door(tmp_path) as door, listening(door):
        reply = door.client()("GET", "/api/v1/events")
        assert reply.status == 429
        assert reply.headers["retry-after"] == "10"
