"""Outages of channels: reported once, and once more at their end, also across a restart."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from monitor.alerting.webhooks import WebhookStore
from monitor.config.settings import ChannelSettings
from tests.support.serve_process import wait_until
from tests.support.web_only import WebAppServer

pytestmark = pytest.mark.slow  # waits for real outages


class Channel:
    """A channel whose state the test sets, in the status that a running web reads."""

    def __init__(self, server: WebAppServer, name: str = "ch5") -> None:
        self._status = server.context.metrics.channels.of(name)
        server.channels = [ChannelSettings(name=name, url="http://192.0.2.1/x")]

    def is_now(self, state: str) -> None:
        self._status.enter(state)


def queued_messages(webhooks: WebhookStore, id: str) -> list[dict[str, Any]]:
    """The webhook's messages, oldest first."""
    return [json.loads(one.body) for one in reversed(webhooks.deliveries(id))]


def test_an_outage_and_its_end_are_reported_once(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    id = webhooks.add("https://192.0.2.7/hook", ["channel.down", "channel.up"]).id
    with WebAppServer(tmp_path, channel_down_s=0.0) as server:
        channel = Channel(server)
        channel.is_now("stalled")
        wait_until(lambda: len(queued_messages(webhooks, id)) == 1, lambda: queued_messages(webhooks, id))
        channel.is_now("failed")  # the same outage
        wait_until(
            lambda: server.web.outages._channels.states() == {"ch5": "failed"}, lambda: "the state is not updated"
        )
    with WebAppServer(tmp_path, channel_down_s=0.0) as server:  # after a restart
        channel = Channel(server)
        channel.is_now("impaired")  # frames arrive
        wait_until(lambda: len(queued_messages(webhooks, id)) == 2, lambda: queued_messages(webhooks, id))
        channel.is_now("up")
        channel.is_now("stalled")
        wait_until(lambda: len(queued_messages(webhooks, id)) == 3, lambda: queued_messages(webhooks, id))
    down, up, again = queued_messages(webhooks, id)
    assert [one["type"] for one in (down, up, again)] == ["channel.down", "channel.up", "channel.down"]
    assert down["data"] == {"channel": "ch5", "state": "stalled", "down_since": down["data"]["down_since"]}
    assert up["data"] == {"channel": "ch5", "state": "impaired", "down_since": down["data"]["down_since"]}
    assert again["data"]["down_since"] >= up["data"]["down_since"]


def test_a_webhook_added_during_an_outage_learns_its_start(tmp_path: Path) -> None:
    with WebAppServer(tmp_path, channel_down_s=0.0) as server:
        Channel(server).is_now("failed")
        wait_until(lambda: "ch5" in server.web.outages._down_since, lambda: "it was not seen")
        since = server.web.outages._down_since["ch5"]
        wait_until(lambda: time.time() > since + 1, lambda: "the clock does not advance")
        id = WebhookStore(tmp_path).add("https://192.0.2.7/hook").id
        wait_until(lambda: len(queued_messages(WebhookStore(tmp_path), id)) == 1, lambda: "it is not reported")
    (down,) = queued_messages(WebhookStore(tmp_path), id)
    assert datetime.fromisoformat(down["data"]["down_since"]).timestamp() == since


def test_a_quick_reconnect_is_not_reported(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    id = webhooks.add("https://192.0.2.7/hook").id
    with WebAppServer(tmp_path, channel_down_s=3600.0) as server:
        channel, outages = Channel(server), server.web.outages
        channel.is_now("stalled")
        wait_until(lambda: "ch5" in outages._down_since, lambda: "it was not seen")
        channel.is_now("up")
        wait_until(lambda: not outages._down_since, lambda: "it was not seen")
    assert queued_messages(webhooks, id) == []
