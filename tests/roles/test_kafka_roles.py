"""The Kafka roles together: `ingest` reads channels, `match` finds copies, `serve` shows their alerts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from monitor.alerting.alerts import Alert
from monitor.config.settings import ChannelSettings, Settings
from monitor.demo.broadcast import BroadcastServer
from monitor.errors import ConfigError
from monitor.kafka.channel_assignment import remove_channels, shared_channels, write_channel
from monitor.roles.kafka_ingest import ingest
from monitor.roles.serve import serve
from monitor.runtime.check import check_file
from tests.support.broker import Broker, free_ports
from tests.support.kafka_fleet import KafkaFleet, Scrape
from tests.support.recorded_channel import RecordedChannel


@pytest.fixture
def fleet(broker: Broker, recorded: RecordedChannel) -> KafkaFleet:
    return KafkaFleet.new(broker, recorded)


@asynccontextmanager
async def running(role: Callable[..., Coroutine[Any, Any, None]], *args: Any, **more: Any) -> AsyncIterator[Scrape]:
    """A role in this process; stopped cleanly at the end."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(role(*args, stop=stop, on_ready=ready.set_result, **more))
        try:
            address: str = await ready
            yield Scrape(address.partition("/#secret=")[0])  # `serve` without tokens reports a link that signs in
        finally:
            stop.set()


def test_ingest_and_match_find_what_check_finds(fleet: KafkaFleet) -> None:
    alerts = asyncio.run(_ingest_and_match(fleet))
    expected: list[Alert] = []
    check_file(fleet.recorded.recording, "rows", settings=fleet.recorded.settings, on_alert=expected.append)
    rows = [alert for alert in alerts if alert["channel"] == "rows"]
    assert rows == [json.loads(json.dumps(alert.as_dict())) for alert in expected]
    ended = [alert for alert in expected if alert.type == "alert.ended"]
    pictures = [alert for alert in alerts if (alert["channel"], alert["type"]) == ("pictures", "alert.ended")]
    assert [one["reference"] for one in pictures] == [one.reference for one in ended] == ["harbour", "garden"]
    for one, other in zip(pictures, ended, strict=True):
        assert abs(one["channel_start"] - other.channel_start) <= 1
        assert abs(one["channel_end"] - other.channel_end) <= 1
        assert abs(one["reference_start"] - other.reference_start) <= 1
        assert abs(one["score"] - other.score) < 0.1


async def _ingest_and_match(fleet: KafkaFleet) -> list[dict[str, Any]]:
    def with_channel(name: str) -> Settings:
        channel = ChannelSettings(name=name, url=str(fleet.recorded.recording), mode="exact")
        return fleet.settings().model_copy(update={"channels": [channel]})

    n = len(fleet.seconds)
    async with (
        fleet.member(),
        running(ingest, with_channel("pictures")) as pictures,
        running(ingest, with_channel("rows"), features=True) as rows,
    ):
        await fleet.alerts_when_ended(4)
        for scrape, name in ((pictures, "pictures"), (rows, "rows")):  # the last copy ends before the recording does
            await scrape.until(n, "copywatch_frames_processed_total", channel=name)
            assert await scrape.value("copywatch_frames_processed_total", channel=name) == n
        assert await rows.value("copywatch_kafka_up") == 1
    return list((await fleet.read_alerts()).values())


def test_ingest_waits_for_an_unreachable_broker_and_loses_no_second(
    fleet: KafkaFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monitor.roles.kafka_ingest.REQUEST_TIMEOUT_S", 2.0)
    fleet.broker.require_own()
    asyncio.run(_unreachable(fleet))


async def _unreachable(fleet: KafkaFleet) -> None:
    with BroadcastServer(fleet.recorded.recording) as broadcast:
        channel = ChannelSettings(name="ch1", url=broadcast.url, mode="economy")
        no_broker = fleet.settings(bootstrap=f"127.0.0.1:{free_ports(1)[0]}")
        async with running(ingest, no_broker.model_copy(update={"channels": [channel]})) as scrape:
            await scrape.until_page("readyz", 503, "does not answer")
            assert (await scrape.page("livez"))[0] == 200
        settings = fleet.settings().model_copy(update={"channels": [channel]})
        async with running(ingest, settings) as scrape:
            await scrape.until(3, "copywatch_frames_processed_total", channel="ch1")
            await asyncio.to_thread(fleet.broker.kill)
            await scrape.until_page("readyz", 503, "does not accept records")
            assert await scrape.value("copywatch_kafka_up") == 0
            assert (await scrape.page("livez"))[0] == 200
            n_sent = await scrape.value("copywatch_frames_processed_total", channel="ch1")
            await scrape.until(n_sent + 3, "copywatch_frames_received_total", channel="ch1")
            await asyncio.to_thread(fleet.broker.start)
            await scrape.until(n_sent + 3, "copywatch_frames_processed_total", channel="ch1")
            await scrape.until_page("readyz", 200, "ready")
            assert await scrape.value("copywatch_frames_dropped_total", channel="ch1") == 0
    sent = [dict(record.headers) for record in await fleet.broker._read(fleet.frames)]
    seconds = [int(headers["pts_ms"]) // 1000 for headers in sent if headers["content-type"] == b"image/jpeg"]
    assert sorted(seconds) == seconds
    assert sorted(set(seconds)) == list(range(seconds[0], seconds[-1] + 1))


def test_serve_shows_the_alerts_of_matchers_and_ends_none_of_them(fleet: KafkaFleet, tmp_path: Path) -> None:
    asyncio.run(_follow_alerts(fleet, tmp_path))


async def _follow_alerts(fleet: KafkaFleet, tmp_path: Path) -> None:
    settings = fleet.settings(follow_alerts=True).model_copy(update={"data_dir": tmp_path / "serve"})
    shown: list[Alert] = []
    await fleet.write(fleet.records("ch1", fleet.seconds[:24]))  # in the middle of the first copy
    async with fleet.member() as member:
        await member.until(24, "copywatch_frames_processed_total", channel="ch1")
        async with running(serve, settings, on_alert=shown.append):
            await _until(lambda: bool(shown))
        assert [alert.type for alert in shown] == ["alert.started"]
        async with running(serve, settings, on_alert=shown.append) as scrape:
            await fleet.write([*fleet.records("ch1", fleet.seconds[24:]), fleet.end("ch1")])
            await _until(lambda: sum(alert.type == "alert.ended" for alert in shown) == 2)
            assert await scrape.value("copywatch_kafka_up") == 1
    assert {(alert.id, alert.seq): alert.as_dict() for alert in shown}.keys() == fleet.expected("ch1").keys()
    assert len(shown) == len(fleet.expected("ch1"))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # polls a thread


def test_serve_publishes_its_alerts_to_the_topic(fleet: KafkaFleet, tmp_path: Path) -> None:
    asyncio.run(_publishing(fleet))


async def _publishing(fleet: KafkaFleet) -> None:
    channel = ChannelSettings(name="ch1", url=str(fleet.recorded.recording), mode="exact")
    settings = fleet.settings(publish_alerts=True).model_copy(update={"channels": [channel]})
    found: list[Alert] = []
    async with running(serve, settings, on_alert=found.append):
        alerts = await fleet.alerts_when_ended(2)
    assert alerts.keys() == {(alert.id, alert.seq) for alert in found}
    with pytest.raises(ConfigError, match="twice"):
        await serve(fleet.settings(publish_alerts=True, follow_alerts=True), stop=asyncio.Event())


def test_shared_channels_are_spread_and_move_between_processes(fleet: KafkaFleet) -> None:
    asyncio.run(_sharing(fleet))


async def _sharing(fleet: KafkaFleet) -> None:
    settings = fleet.settings(partitions=4)
    names = [f"ch{n}" for n in range(6)]
    with BroadcastServer(fleet.recorded.recording) as broadcast:
        url = broadcast.url.replace("://", "://user:s3cret@")
        for name in names:
            await write_channel(settings.kafka, name, ChannelSettings(name=name, url=url, mode="economy"))
        async with running(ingest, settings, shared=True) as one:
            await one.until(len(names), "copywatch_channel_up")
            async with running(ingest, settings, shared=True) as other:
                await other.until(1, "copywatch_channel_up")
                n_other = await other.value("copywatch_channel_up")
                assert n_other < len(names)
                assert "s3cret" not in await asyncio.to_thread(other._text)
            await one.until(len(names), "copywatch_channel_up")  # back again
            await remove_channels(settings.kafka, names[1:])
            await _wait_for_channels(one, 1)
    assert [channel.name for channel in await shared_channels(settings.kafka)] == names[:1]
    sent = {record.key.decode() for record in await fleet.broker._read(fleet.frames)}
    assert sent == set(names)


async def _wait_for_channels(scrape: Scrape, n_channels: int) -> None:
    async with asyncio.timeout(60):
        while await scrape.value("copywatch_channel_up") > n_channels:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # polls the metrics
