"""Channels that stay away: told once, told again when they are back, also over a restart."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from monitor.alerting.webhooks import WebhookStore
from monitor.config.settings import ChannelSettings
from tests.support.serve_process import until
from tests.support.web_only import Door

pytestmark = pytest.mark.slow  # waits for real outages


class Channel:
    """A channel whose state the test sets, in the status that a running web reads."""

    def __init__(self, door: Door, name: str = "ch5") -> None:
        self._status = door.context.metrics.channels.of(name)
        door.channels = [(ChannelSettings(name=name, url="http://192.0.2.1/x"), False)]

    def is_now(self, state: str) -> None:
        self._status.enter(state)


def told(webhooks: WebhookStore, id: str) -> list[dict[str, Any]]:
    """What the webhook is owed, the oldest first."""
    return [json.loads(one.body) for one in reversed(webhooks.deliveries(id))]


def test_a_channel_that_stays_away_is_told_once_and_so_is_its_return(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    id = webhooks.add("https://192.0.2.7/hook", ["channel.down", "channel.up"]).id
    with Door(tmp_path, channel_down_s=0.0) as door:
        channel = Channel(door)
        channel.is_now("stalled")
        until(lambda: len(told(webhooks, id)) == 1, lambda: told(webhooks, id))
        channel.is_now("failed")  # the same outage
        until(lambda: door.web.outages._board.states() == {"ch5": "failed"}, lambda: "the board does not look")
    with Door(tmp_path, channel_down_s=0.0) as door:  # after a restart
        channel = Channel(door)
        channel.is_now("impaired")  # pictures come
        until(lambda: len(told(webhooks, id)) == 2, lambda: told(webhooks, id))
        channel.is_now("up")
        channel.is_now("stalled")
        until(lambda: len(told(webhooks, id)) == 3, lambda: told(webhooks, id))
    down, up, again = told(webhooks, id)
    assert [one["type"] for one in (down, up, again)] == ["channel.down", "channel.up", "channel.down"]
    assert down["data"] == {"channel": "ch5", "state": "stalled", "down_since": down["data"]["down_since"]}
    assert up["data"] == {"channel": "ch5", "state": "impaired", "down_since": down["data"]["down_since"]}
    assert again["data"]["down_since"] >= up["data"]["down_since"]


def test_who_comes_during_an_outage_is_told_since_when(tmp_path: Path) -> None:
    with Door(tmp_path, channel_down_s=0.0) as door:
        Channel(door).is_now("failed")
        until(lambda: "ch5" in door.web.outages._since, lambda: "it was not seen")
        since = door.web.outages._since["ch5"]
        until(lambda: time.time() > since + 1, lambda: "time stands still")
        id = WebhookStore(tmp_path).add("https://192.0.2.7/hook").id
        until(lambda: len(told(WebhookStore(tmp_path), id)) == 1, lambda: "it is not told")
    (down,) = told(WebhookStore(tmp_path), id)
    assert datetime.fromisoformat(down["data"]["down_since"]).timestamp() == since


def test_one_that_reconnects_in_time_is_no_news(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    id = webhooks.add("https://192.0.2.7/hook").id
    with Door(tmp_path, channel_down_s=3600.0) as door:
        channel, outages = Channel(door), door.web.outages
        channel.is_now("stalled")
        until(lambda: "ch5" in outages._since, lambda: "it was not seen")
        channel.is_now("up")
        until(lambda: not outages._since, lambda: "it was not seen")
    assert told(webhooks, id) == []
