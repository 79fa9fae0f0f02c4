"""The probes and /metrics over a real socket."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from monitor.ops.health import Health
from monitor.ops.metrics import Metrics
from monitor.web.auth.tokens import Tokens
from monitor.web.probes import create_probes
from monitor.web.server import probes_server, url_of
from tests.support.web_only import WebAppServer
from tests.support.web_server import Client


@dataclass
class Running:
    address: str
    metrics: Metrics
    problems: dict[str, str]

    def get(self, path: str, accept: str = "*/*") -> tuple[int, str, str]:
        request = urllib.request.Request(self.address + path, headers={"Accept": accept})
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.status, reply.headers["content-type"], reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["content-type"], error.read().decode()


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serves the application as on a port of probes; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))  # connections wait until the server runs
    server = probes_server(app)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    metrics, problems = Metrics(CollectorRegistry()), dict[str, str]()
    with serving(create_probes(metrics, Health(problems, ["index", "outbox"], {}, vital=[]))) as address:
        yield Running(address, metrics, problems)


def test_alive_despite_problems(running: Running) -> None:
    running.problems["index"] = "not loaded yet"
    status, _, body = running.get("/livez")
    assert (status, body) == (200, "ok\n")


def test_ready_only_without_problems(running: Running) -> None:
    running.problems["index"] = "not loaded yet"
    status, kind, body = running.get("/readyz")
    assert (status, kind) == (503, "application/json")
    assert json.loads(body) == {"status": "not ready", "problems": {"index": "not loaded yet"}}
    running.problems.clear()
    status, _, body = running.get("/readyz")
    assert (status, json.loads(body)) == (200, {"status": "ready"})


def test_verbose_lists_every_check(running: Running) -> None:
    assert json.loads(running.get("/readyz?verbose")[2])["checks"] == {"index": "ok", "outbox": "ok"}
    running.problems["index"] = "not loaded yet"
    status, _, body = running.get("/readyz?verbose")
    assert (status, json.loads(body)["checks"]) == (503, {"index": "not loaded yet", "outbox": "ok"})


def test_metrics_in_the_requested_format(running: Running) -> None:
    running.metrics.references.set(3)
    status, kind, body = running.get("/metrics")
    assert status == 200
    assert kind.startswith("text/plain; version=")
    assert "\ncopywatch_references 3.0\n" in body
    assert "\nprocess_cpu_seconds_total " in body
    _, kind, body = running.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_channels_are_listed_with_their_states(running: Running) -> None:
    assert json.loads(running.get("/channelz")[2]) == {"channels": {}}
    running.metrics.channels.of("five").enter("denied", "refused")
    running.metrics.channels.of("file")
    status, kind, body = running.get("/channelz")
    assert (status, kind) == (200, "application/json")
    channels = json.loads(body)["channels"]
    since = [channel.pop("since") for channel in channels.values()]
    assert channels == {"five": {"state": "denied", "reason": "refused"}, "file": {"state": "starting", "reason": None}}
    assert all(moment.endswith("Z") for moment in since)


def test_nothing_else_is_served(running: Running) -> None:
    assert [running.get(path)[0] for path in ("/", "/docs", "/openapi.json")] == [404, 404, 404]


def test_metrics_can_require_a_token(tmp_path: Path) -> None:
    token = Tokens(tmp_path).add("prometheus", "read")
    protected = ("/metrics", "/channelz", "/readyz?verbose")
    with WebAppServer(tmp_path) as server:
        assert [server.stranger()("GET", path).status for path in protected] == [200] * 3
    with WebAppServer(tmp_path, metrics_token=True) as server:
        for path in protected:
            refused = server.stranger()("GET", path)
            assert refused.status == 401, path
            assert "copywatch_" not in refused.body.decode()
            assert server.client("cw_wrong")("GET", path).status == 401
            assert server.client(token)("GET", path).status == 200
        assert [server.stranger()("GET", path).status for path in ("/livez", "/readyz")] == [200, 200]
        context = server.context
        with serving(create_probes(context.metrics, context.health, context.check_reader)) as address:
            statuses = [Client(address)("GET", path).status for path in (*protected, "/livez")]
            assert statuses == [401, 401, 401, 200]
            assert Client(address, {"Authorization": f"Bearer {token}"})("GET", "/metrics").status == 200
