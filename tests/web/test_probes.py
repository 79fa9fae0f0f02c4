"""The probes and /metrics over a real socket."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from monitor.ops.health import Health
from monitor.ops.metrics import Metrics
from monitor.web.probes import create_probes
from monitor.web.server import probes_server, url_of


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


@pytest.fixture
def running() -> Iterator[Running]:
    metrics, problems = Metrics(CollectorRegistry()), dict[str, str]()
    app = create_probes(metrics, Health(problems, ["index", "outbox"], {}, vital=[]))
    listener = socket.create_server(("127.0.0.1", 0))  # connections wait until the server runs
    server = probes_server(app)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield Running(url_of(listener), metrics, problems)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


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
