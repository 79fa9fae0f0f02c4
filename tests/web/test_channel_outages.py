"""Outages of channels: reported once, and once more at their end, also across a restart."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from monitor.alerting.webhooks import WebhookStore
from monitor.config.settings import ChannelSettings
from tests.support.hls_encoder import hls_encoder, serve_folder
from tests.support.running_source import write_stream_clip
from tests.support.serve_process import ServeProcess, wait_until
from tests.support.web_only import WebAppServer

pytestmark = pytest.mark.slow  # waits for real outages

DOWN_S = 5.0
RECONNECTS = "copywatch_reconnects_total"
SHORT_SILENCE = (sys.executable, "-m", "tests.support.short_silence_serve")


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


def test_an_outage_counts_from_the_newest_frame_and_has_its_reason(tmp_path: Path) -> None:
    webhooks = WebhookStore(tmp_path)
    id = webhooks.add("https://192.0.2.7/hook").id
    with WebAppServer(tmp_path, channel_down_s=60.0) as server:
        Channel(server)
        status = server.context.metrics.channels.of("ch5")
        last_new_at = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=61)
        status.note_new_frame(last_new_at)
        status.enter("stalled", "http://192.0.2.1 has sent no picture for 10 s", "stalled")
        wait_until(lambda: len(queued_messages(webhooks, id)) == 1, lambda: queued_messages(webhooks, id))
    (down,) = queued_messages(webhooks, id)
    assert datetime.fromisoformat(down["data"].pop("down_since")) == last_new_at
    reason = "http://192.0.2.1 has sent no picture for 10 s"
    assert down["data"] == {"channel": "ch5", "state": "stalled", "reason": reason}


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


@pytest.mark.system
def test_a_channel_whose_encoder_died_is_down_once_until_it_is_back(tmp_path: Path) -> None:
    """A real `serve` with short time-outs; the origin serves the last playlist of a killed encoder all the time."""
    clip, folder, config = write_stream_clip(tmp_path / "film.ts"), tmp_path / "hls", tmp_path / "copywatch.yaml"
    (tmp_path / "data").mkdir()
    webhooks = WebhookStore(tmp_path / "data")
    id = webhooks.add("https://192.0.2.7/hook", ["channel.down", "channel.up"]).id
    with serve_folder(folder) as origin:
        url = f"http://user:s3cret@127.0.0.1:{origin.port}/live.m3u8?token=s3cret"
        config.write_text(
            f"data_dir: data\nweb: {{port: 0}}\nwebhooks: {{channel_down_s: {DOWN_S}}}\n"
            f'channels:\n  - {{name: five, url: "{url}", mode: exact}}\n'
        )
        with hls_encoder(clip, folder) as encoder, ServeProcess(config, program=SHORT_SILENCE) as serve:
            wait_until(lambda: shown(serve)["state"] == "up", lambda: serve.log[-5:])
            encoder.kill()
            encoder.wait()
            wait_until(lambda: shown(serve)["state"] == "stalled", lambda: shown(serve))
            last_new_at = shown(serve)["last_new_at"]
            watch_while_dead(serve, lambda: serve.value(RECONNECTS, channel="five", reason="repeated") >= 3)
            assert shown(serve)["last_new_at"] == last_new_at
            assert serve.value("copywatch_epochs_total", channel="five") == 1
            reason = shown(serve)["reason"]
            assert "serves only pictures that were received before; nothing new since" in reason
            assert "s3cret" not in reason
            assert reason in serve.get("/channelz")[1]
        with ServeProcess(config, program=SHORT_SILENCE) as serve:  # the outage outlives a restart
            watch_while_dead(serve, lambda: serve.value(RECONNECTS, channel="five", reason="repeated") >= 1)
            (down,) = queued_messages(webhooks, id)
            with hls_encoder(clip, folder):
                wait_until(lambda: len(queued_messages(webhooks, id)) == 2, lambda: shown(serve))
    _, up = queued_messages(webhooks, id)
    assert (down["type"], up["type"]) == ("channel.down", "channel.up")
    down_since = datetime.fromisoformat(down["data"]["down_since"])
    assert (
        down_since
        == datetime.fromisoformat(last_new_at).replace(microsecond=0)
        == datetime.fromisoformat(up["data"]["down_since"])
    )
    reported_after_s = (datetime.fromisoformat(down["timestamp"]) - down_since).total_seconds()
    assert reported_after_s <= DOWN_S + 15


def shown(serve: ServeProcess) -> dict[str, Any]:
    """The channel as the API shows it."""
    channel: dict[str, Any] = json.loads(serve.get("/api/v1/channels/five")[1])
    return channel


def watch_while_dead(serve: ServeProcess, is_over: Callable[[], bool]) -> None:
    """Looks at a dead channel until then: it may never be up."""

    def is_down_and_over() -> bool:
        seen = shown(serve)["state"], serve.value("copywatch_channel_up", channel="five")
        assert seen in (("starting", 0.0), ("stalled", 0.0)), (seen, serve.log[-9:])
        return is_over()

    wait_until(is_down_and_over, lambda: (shown(serve), serve.log[-9:]))
