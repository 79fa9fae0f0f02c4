"""The whole way: `ingest` reads channels, `match` finds copies, `serve` shows what the fleet found."""

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
from monitor.demo.broadcast import Transmitter
from monitor.errors import ConfigError
from monitor.kafka.channel_assignment import put_channel, remove_channels, shared_channels
from monitor.roles.kafka_ingest import ingest
from monitor.roles.serve import serve
from monitor.runtime.check import check_file
from tests.support.broker import Broker, free_ports
from tests.support.kafka_fleet import Fleet, Scrape
from tests.support.recorded_channel import RecordedChannel


@pytest.fixture
def fleet(broker: Broker, recorded: RecordedChannel) -> Fleet:
    return Fleet.new(broker, recorded)


@asynccontextmanager
async def running(role: Callable[..., Coroutine[Any, Any, None]], *args: Any, **more: Any) -> AsyncIterator[Scrape]:
    """A role in this process; stopped cleanly at the end."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(role(*args, stop=stop, on_ready=ready.set_result, **more))
        try:
            yield Scrape(await ready)
        finally:
            stop.set()


def test_what_ingest_and_match_find_is_what_check_finds(fleet: Fleet) -> None:
    told = asyncio.run(_ingest_and_match(fleet))
    expected: list[Alert] = []
    check_file(fleet.studio.recording, "rows", settings=fleet.studio.settings, on_alert=expected.append)
    rows = [alert for alert in told if alert["channel"] == "rows"]
    assert rows == [json.loads(json.dumps(alert.as_dict())) for alert in expected]
    ended = [alert for alert in expected if alert.type == "alert.ended"]
    pictures = [alert for alert in told if (alert["channel"], alert["type"]) == ("pictures", "alert.ended")]
    assert [one["reference"] for one in pictures] == [one.reference for one in ended] == ["harbour", "garden"]
    for one, other in zip(pictures, ended, strict=True):
        assert abs(one["channel_start"] - other.channel_start) <= 1
        assert abs(one["channel_end"] - other.channel_end) <= 1
        assert abs(one["reference_start"] - other.reference_start) <= 1
        assert abs(one["score"] - other.score) < 0.1


async def _ingest_and_match(fleet: Fleet) -> list[dict[str, Any]]:
    def with_channel(name: str) -> Settings:
        channel = ChannelSettings(name=name, url=str(fleet.studio.recording), mode="exact")
        return fleet.settings().model_copy(update={"channels": [channel]})

    n = len(fleet.seconds)
    async with (
        fleet.member(),
        running(ingest, with_channel("pictures")) as pictures,
        running(ingest, with_channel("rows"), features=True) as rows,
    ):
        await fleet.told_whole(4)
        for scrape, name in ((pictures, "pictures"), (rows, "rows")):  # the last copy has ended before the air does
            await scrape.until(n, "copywatch_frames_processed_total", channel=name)
            assert await scrape.value("copywatch_frames_processed_total", channel=name) == n
        assert await rows.value("copywatch_kafka_up") == 1
    return list((await fleet.told()).values())


def test_ingest_waits_for_a_broker_that_is_away_and_loses_no_second_meanwhile(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monitor.roles.kafka_ingest.ANSWER_S", 2.0)
    fleet.broker._ours()
    asyncio.run(_away(fleet))


async def _away(fleet: Fleet) -> None:
    with Transmitter(fleet.studio.recording) as air:
        channel = ChannelSettings(name="ch1", url=air.url, mode="economy")
        nobody = fleet.settings(bootstrap=f"127.0.0.1:{free_ports(1)[0]}")
        async with running(ingest, nobody.model_copy(update={"channels": [channel]})) as scrape:
            await scrape.until_page("readyz", 503, "does not answer")
            assert (await scrape.page("livez"))[0] == 200
        settings = fleet.settings().model_copy(update={"channels": [channel]})
        async with running(ingest, settings) as scrape:
            await scrape.until(3, "copywatch_frames_processed_total", channel="ch1")
            await asyncio.to_thread(fleet.broker.kill)
            await scrape.until_page("readyz", 503, "does not take records")
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


def test_serve_shows_what_the_fleet_found_and_ends_nothing_of_it(fleet: Fleet, tmp_path: Path) -> None:
    asyncio.run(_face(fleet, tmp_path))


async def _face(fleet: Fleet, tmp_path: Path) -> None:
    def face() -> Settings:
        return fleet.settings(follow_alerts=True).model_copy(update={"data_dir": tmp_path / "face"})

    shown: list[Alert] = []
    await fleet.write(fleet.records("ch1", fleet.seconds[:24]))  # in the middle of the first copy
    async with fleet.member() as member:
        await member.until(24, "copywatch_frames_processed_total", channel="ch1")
        async with running(serve, face(), on_alert=shown.append):
            await _until(lambda: bool(shown))
        begun = list(shown)
        assert [alert.type for alert in begun] == ["alert.started"]
        async with running(serve, face(), on_alert=shown.append) as scrape:
            await fleet.write([*fleet.records("ch1", fleet.seconds[24:]), fleet.end("ch1")])
            await _until(lambda: sum(alert.type == "alert.ended" for alert in shown) == 2)
            assert await scrape.value("copywatch_kafka_up") == 1
    assert {(alert.id, alert.seq): alert.as_dict() for alert in shown}.keys() == fleet.expected("ch1").keys()
    assert len(shown) == len(fleet.expected("ch1"))


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # what is waited for happens in a thread


def test_serve_tells_the_fleet_s_readers_too(fleet: Fleet, tmp_path: Path) -> None:
    asyncio.run(_publishing(fleet))


async def _publishing(fleet: Fleet) -> None:
    channel = ChannelSettings(name="ch1", url=str(fleet.studio.recording), mode="exact")
    settings = fleet.settings(publish_alerts=True).model_copy(update={"channels": [channel]})
    found: list[Alert] = []
    async with running(serve, settings, on_alert=found.append):
        told = await fleet.told_whole(2)
    assert told.keys() == {(alert.id, alert.seq) for alert in found}
    with pytest.raises(ConfigError, match="twice"):
        await serve(fleet.settings(publish_alerts=True, follow_alerts=True), stop=asyncio.Event())


def test_shared_channels_are_spread_and_go_on_elsewhere(fleet: Fleet) -> None:
    asyncio.run(_sharing(fleet))


async def _sharing(fleet: Fleet) -> None:
    settings = fleet.settings(partitions=4)
    names = [f"ch{n}" for n in range(6)]
    with Transmitter(fleet.studio.recording) as air:
        url = air.url.replace("://", "://user:s3cret@")
        for name in names:
            await put_channel(settings.kafka, name, ChannelSettings(name=name, url=url, mode="economy"))
        async with running(ingest, settings, shared=True) as one:
            await one.until(len(names), "copywatch_channel_up")
            async with running(ingest, settings, shared=True) as other:
                await other.until(1, "copywatch_channel_up")
                n_other = await other.value("copywatch_channel_up")
                assert n_other < len(names)
                assert "s3cret" not in await asyncio.to_thread(other._text)
            await one.until(len(names), "copywatch_channel_up")  # back again
            await remove_channels(settings.kafka, names[1:])
            await _gone(one, 1)
    assert [channel.name for channel in await shared_channels(settings.kafka)] == names[:1]
    sent = {record.key.decode() for record in await fleet.broker._read(fleet.frames)}
    assert sent == set(names)


async def _gone(scrape: Scrape, left: int) -> None:
    async with asyncio.timeout(60):
        while await scrape.value("copywatch_channel_up") > left:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # it is seen by scraping only
