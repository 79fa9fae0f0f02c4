"""`match` on a real broker: bad records, policies, silence; its alerts are those of an uninterrupted monitor."""

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
from tests.support.broker import Broker
from tests.support.kafka_fleet import KafkaFleet, png_bomb
from tests.support.recorded_channel import RecordedChannel


@pytest.fixture
def fleet(broker: Broker, recorded: RecordedChannel) -> KafkaFleet:
    return KafkaFleet.new(broker, recorded)


def test_bad_and_repeated_records_are_counted_and_stop_nothing(fleet: KafkaFleet) -> None:
    asyncio.run(_bad_late_and_repeated(fleet))


async def _bad_late_and_repeated(fleet: KafkaFleet) -> None:
    good = fleet.records("ch1", fleet.seconds)
    picture = io.BytesIO()
    Image.new("RGB", (320, 180)).save(picture, "JPEG")
    headers = [("pts_ms", b"1"), ("content-type", b"image/png")]
    bad: list[dict[str, Any]] = [
        {"key": b"ch1", "value": b"no picture", "headers": headers},
        {"key": b"ch1", "value": png_bomb(), "headers": headers},
        {"key": None, "value": picture.getvalue(), "headers": headers},
        {"key": b"ch1", "value": b"\0" * (10 << 20), "headers": headers},
        {"key": b"ch1", "value": picture.getvalue(), "headers": []},
    ]
    mixed = [*good[:20], *bad, good[10], good[19], *good[20:], *good[30:40], fleet.end("ch1")]
    await fleet.write(mixed)
    async with fleet.member() as member:
        assert await fleet.alerts_when_ended(2) == fleet.expected("ch1")
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


def test_the_live_policy_skips_to_recent_records_and_counts_them(fleet: KafkaFleet) -> None:
    asyncio.run(_live_skips(fleet))


async def _live_skips(fleet: KafkaFleet) -> None:
    now_ms = round(time.time() * 1000)
    old = [{**record, "timestamp_ms": now_ms - 600_000} for record in fleet.records("ch1", range(20))]
    new = [{**record, "timestamp_ms": now_ms} for record in fleet.records("ch1", fleet.seconds[35:])]
    await fleet.write([*old, *new, fleet.end("ch1")])
    async with fleet.member(policy="live") as member:
        alerts = await fleet.alerts_when_ended(1)
        assert await member.value("copywatch_kafka_skipped_records_total", reason="live") == len(old)
        assert await member.value("copywatch_frames_processed_total", channel="ch1") == len(new)
    assert {alert["reference"] for alert in alerts.values()} == {"garden"}


def test_records_deleted_by_the_broker_are_a_gap(fleet: KafkaFleet) -> None:
    asyncio.run(_deleted(fleet))


async def _deleted(fleet: KafkaFleet) -> None:
    await fleet.write(fleet.records("ch1", range(22)))  # the first copy starts at 14
    async with fleet.member() as member:
        await member.until(22, "copywatch_frames_processed_total", channel="ch1")
    await fleet.write([*fleet.records("ch1", fleet.seconds[22:]), fleet.end("ch1")])
    admin = AIOKafkaAdminClient(bootstrap_servers=fleet.broker.address)
    await admin.start()
    await admin.delete_records({TopicPartition(fleet.frames, 0): RecordsToDelete(before_offset=25)})
    await admin.close()
    async with fleet.member() as member:
        alerts = await fleet.alerts_when_ended(2)
        assert await member.value("copywatch_kafka_skipped_records_total", reason="expired") == 3
    (ended,) = (one for one in alerts.values() if one["type"] == "alert.ended" and one["reference"] == "harbour")
    assert ended["gaps"] == [{"at": 22, "seconds": 3, "reason": "expired"}]
    (started,) = (one for one in alerts.values() if one["type"] == "alert.started" and one["reference"] == "harbour")
    assert started["id"] == ended["id"]


def test_a_silent_channel_ends_its_alerts_and_continues_when_it_is_back(
    fleet: KafkaFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "SILENCE_S", 2.0)
    asyncio.run(_silent(fleet))


async def _silent(fleet: KafkaFleet) -> None:
    await fleet.write(fleet.records("ch1", range(24)))  # in the middle of the first copy
    async with fleet.member() as member:
        silent = (await fleet.alerts_when_ended(1)).values()
        assert {(one["type"], one["channel_end"] >= 22) for one in silent} >= {("alert.ended", True)}
        await fleet.write([*fleet.records("ch1", fleet.seconds[40:]), fleet.end("ch1")])
        alerts = await fleet.alerts_when_ended(2)
        assert await member.value("copywatch_frames_processed_total", channel="ch1") == 24 + len(fleet.seconds) - 40
    assert {one["reference"] for one in alerts.values()} == {"harbour", "garden"}
