"""`match` on a real broker: bad records, policies, silence; what is told is what one unbroken watch tells."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from PIL import Image

from monitor.kafka import partition
from tests.kafka.test_records import bomb
from tests.support.broker import Broker
from tests.support.kafka_fleet import Fleet
from tests.support.recorded_channel import RecordedChannel


@pytest.fixture
def fleet(broker: Broker, recorded: RecordedChannel) -> Fleet:
    return Fleet.new(broker, recorded)


def test_bad_late_and_repeated_records_stop_nothing_and_are_counted(fleet: Fleet) -> None:
    asyncio.run(_bad_late_and_repeated(fleet))


async def _bad_late_and_repeated(fleet: Fleet) -> None:
    good = fleet.records("ch1", fleet.seconds)
    picture = io.BytesIO()
    Image.new("RGB", (320, 180)).save(picture, "JPEG")
    headers = [("pts_ms", b"1"), ("content-type", b"image/png")]
    bad: list[dict[str, Any]] = [
        {"key": b"ch1", "value": b"no picture", "headers": headers},
        {"key": b"ch1", "value": bomb(), "headers": headers},
        {"key": None, "value": picture.getvalue(), "headers": headers},
        {"key": b"ch1", "value": b"\0" * (10 << 20), "headers": headers},
        {"key": b"ch1", "value": picture.getvalue(), "headers": []},
    ]
    mixed = [*good[:20], *bad, good[10], good[19], *good[20:], *good[30:40], fleet.end("ch1")]
    await fleet.write(mixed)
    async with fleet.member() as member:
        assert await fleet.told_whole(2) == fleet.expected("ch1")
        reasons = ("not_a_picture", "too_many_pixels", "no_key", "too_large", "headers")
        for reason in reasons:
            assert await member.value("copywatch_kafka_dead_letters_total", reason=reason) == 1
        dropped = {
            reason: await member.value("copywatch_frames_dropped_total", channel="ch1", reason=reason)
            for reason in ("repeated", "backward")
        }
        assert dropped == {"repeated": 1, "backward": 11}
        assert await member.value("copywatch_frames_processed_total", channel="ch1") == len(good)
        assert await member.value("copywatch_kafka_lag_records") == 0
        assert await member.value("copywatch_kafka_up") == 1
    letters = await fleet.broker._read(f"{fleet.frames}.dlq")
    assert [(letter.key, letter.value) for letter in letters] == [(one["key"], one["value"]) for one in bad]
    assert [dict(letter.headers)["copywatch.errors.reason"].decode() for letter in letters] == list(reasons)


def test_live_skips_to_now_and_says_so(fleet: Fleet) -> None:
    asyncio.run(_live_skips(fleet))


async def _live_skips(fleet: Fleet) -> None:
    now_ms = round(time.time() * 1000)
    old = [{**record, "timestamp_ms": now_ms - 600_000} for record in fleet.records("ch1", range(20))]
    new = [{**record, "timestamp_ms": now_ms} for record in fleet.records("ch1", fleet.seconds[35:])]
    await fleet.write([*old, *new, fleet.end("ch1")])
    async with fleet.member(policy="live") as member:
        told = await fleet.told_whole(1)
        assert await member.value("copywatch_kafka_skipped_records_total", reason="live") == len(old)
        assert await member.value("copywatch_frames_processed_total", channel="ch1") == len(new)
    assert {alert["reference"] for alert in told.values()} == {"garden"}


def test_what_the_broker_deleted_is_a_gap(fleet: Fleet) -> None:
    asyncio.run(_deleted(fleet))


async def _deleted(fleet: Fleet) -> None:
    await fleet.write(fleet.records("ch1", range(22)))  # the first copy began at 14
    async with fleet.member() as member:
        await member.until(22, "copywatch_frames_processed_total", channel="ch1")
    await fleet.write([*fleet.records("ch1", fleet.seconds[22:]), fleet.end("ch1")])
    admin = AIOKafkaAdminClient(bootstrap_servers=fleet.broker.address)
    await admin.start()
    await admin.delete_records({TopicPartition(fleet.frames, 0): RecordsToDelete(before_offset=25)})
    await admin.close()
    async with fleet.member() as member:
        told = await fleet.told_whole(2)
        assert await member.value("copywatch_kafka_skipped_records_total", reason="expired") == 3
    (ended,) = (one for one in told.values() if one["type"] == "alert.ended" and one["reference"] == "harbour")
    assert ended["gaps"] == [{"at": 22, "seconds": 3, "reason": "expired"}]
    (started,) = (one for one in told.values() if one["type"] == "alert.started" and one["reference"] == "harbour")
    assert started["id"] == ended["id"]


def test_a_channel_that_falls_silent_is_over_and_goes_on_when_it_is_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "SILENCE_S", 2.0)
    asyncio.run(_silent(fleet))


async def _silent(fleet: Fleet) -> None:
    await fleet.write(fleet.records("ch1", range(24)))  # in the middle of the first copy
    async with fleet.member() as member:
        silent = (await fleet.told_whole(1)).values()
        assert {(one["type"], one["channel_end"] >= 22) for one in silent} >= {("alert.ended", True)}
        await fleet.write([*fleet.records("ch1", fleet.seconds[40:]), fleet.end("ch1")])
        told = await fleet.told_whole(2)
        assert await member.value("copywatch_frames_processed_total", channel="ch1") == 24 + len(fleet.seconds) - 40
    assert {one["reference"] for one in told.values()} == {"harbour", "garden"}
