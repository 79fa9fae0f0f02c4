"""A review through the API is applied by an event: the response already has the outcome, and nothing polls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from monitor.alerting import reviews
from monitor.alerting.dispatcher import AlertDispatcher
from monitor.alerting.outbox import OutboxEntry
from monitor.alerting.reviews import watch_rights
from monitor.web.routes import alerts
from tests.support.sample_alert import sample_events
from tests.support.web_only import WebAppServer

ENDED_ID, OTHER_ID, OPEN_ID = "a" * 24, "b" * 24, "c" * 24
NEVER_S = 3600.0


@contextmanager
def monitor_of(server: WebAppServer) -> Iterator[None]:
    """Applies reviews as a running monitor does, in a thread and an event loop of its own."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        context = server.context
        dispatcher = AlertDispatcher(server.outbox, {}, context.metrics, timedelta(days=30))
        dispatcher.emitted = context.emitted
        watching = watch_rights(context.rights, context.library, context.metrics, {}, context.history, dispatcher)
        tasks = [asyncio.create_task(dispatcher.run()), asyncio.create_task(watching)]
        started.set()
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        dispatcher.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(60)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebAppServer]:
    monkeypatch.setattr(reviews, "LOOK_S", NEVER_S)
    with WebAppServer(tmp_path) as opened:
        events = [*sample_events(ENDED_ID), *sample_events(OTHER_ID), *sample_events(OPEN_ID)[:2]]
        opened.outbox.write([OutboxEntry("ch5", events)])
        yield opened


def test_a_false_review_of_an_ended_alert_is_answered_with_its_retraction(
    server: WebAppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "APPLIED_S", NEVER_S)
    client, path = server.client(), f"/api/v1/alerts/{ENDED_ID}/review"
    with monitor_of(server):
        false = client("POST", path, {"decision": "false"}).json
        assert (false["status"], false["reason"]) == ("retracted", "reviewed: false positive")
        assert [event["type"] for event in false["events"]][-2:] == ["alert.ended", "alert.retracted"]
        again = client("POST", path, {"decision": "false"}).json  # already retracted: nothing to wait for
        assert len(again["events"]) == len(false["events"])
        both = client("POST", "/api/v1/alerts/review", {"ids": [ENDED_ID, OTHER_ID], "decision": "false"}).json
        assert [alert["status"] for alert in both["items"]] == ["retracted", "retracted"]


def test_without_a_monitor_that_applies_it_a_review_is_stored_and_answered(
    server: WebAppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "APPLIED_S", 0.2)
    before = time.monotonic()
    open_alert = server.client()("POST", f"/api/v1/alerts/{OPEN_ID}/review", {"decision": "false"}).json
    assert time.monotonic() - before >= 0.2  # its channel could have retracted it meanwhile
    assert (open_alert["status"], open_alert["review"]["decision"]) == ("open", "false")
    confirmed = server.client()("POST", f"/api/v1/alerts/{ENDED_ID}/review", {"decision": "confirmed"}).json
    assert (confirmed["status"], confirmed["review"]["decision"]) == ("ended", "confirmed")
