"""Faults of brokers, producers and slow members: `match` reports and survives them, and no alert changes."""

from __future__ import annotations

import asyncio
import gzip
import time
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import NewPartitions

from monitor.kafka import partition
from monitor.kafka.broker import MAX_REQUEST_BYTES
from monitor.kafka.channel import KafkaChannel
from monitor.kafka.partition import Partition
from monitor.roles import kafka_match
from tests.support.broker import Broker
from tests.support.fault_proxy import FaultProxy
from tests.support.kafka_fleet import KafkaFleet
from tests.support.recorded_channel import RecordedChannel


@pytest.fixture
def fleet(broker: Broker, recorded: RecordedChannel) -> KafkaFleet:
    return KafkaFleet.new(broker, recorded)


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> list[Partition]:
    """Every partition that a member creates."""
    created: list[Partition] = []
    new_partition = kafka_match.MatchMember._new_partition

    def record_new(self: kafka_match.MatchMember, frames: Any) -> Partition:
        created.append(new_partition(self, frames))
        return created[-1]

    monkeypatch.setattr(kafka_match.MatchMember, "_new_partition", record_new)
    return created


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the broker and its topics, so that tests need not wait."""
    monkeypatch.setattr(kafka_match, "CHECK_EVERY_S", 0.2)
    monkeypatch.setattr(kafka_match, "REFRESH_METADATA_S", 0.5)


@pytest.mark.usefixtures("frequent_checks")
def test_a_deleted_topic_is_reported_until_it_is_created_again(fleet: KafkaFleet) -> None:
    asyncio.run(_deleted(fleet))


async def _deleted(fleet: KafkaFleet) -> None:
    await fleet.write(fleet.records("ch1", range(24)))  # in the middle of the first copy
    async with fleet.member() as member:
        await member.until(24, "copywatch_frames_processed_total", channel="ch1")
        assert (await member.page("readyz"))[0] == 200
        await fleet.broker._with_admin(lambda admin: admin.delete_topics([fleet.frames]))
        await member.until_page("readyz", 503, f"the topic {fleet.frames} does not exist")
        assert await member.value("copywatch_kafka_up") == 0
        assert (await member.page("livez"))[0] == 200  # a restart would not help
        await fleet.broker._create(fleet.frames, 1, {})
        await fleet.write([*fleet.records("ch1", fleet.seconds[24:]), fleet.end("ch1")])
        assert await fleet.alerts_when_ended(2) == fleet.expected("ch1")
        await member.until_page("readyz", 200, "ready")
        assert await member.value("copywatch_kafka_up") == 1


@pytest.mark.usefixtures("frequent_checks")
def test_added_partitions_are_processed(fleet: KafkaFleet) -> None:
    asyncio.run(_added(fleet))


async def _added(fleet: KafkaFleet) -> None:
    async with fleet.member() as member:
        await member.until(1, "copywatch_kafka_partitions")
        await fleet.broker._with_admin(lambda admin: admin.create_partitions({fleet.frames: NewPartitions(3)}))
        await member.until(3, "copywatch_kafka_partitions")
        await fleet.write([*fleet.records("ch1", fleet.seconds), fleet.end("ch1")], partition=2)
        assert await fleet.alerts_when_ended(2) == fleet.expected("ch1")


def test_a_fenced_producer_is_replaced_and_no_alert_is_lost(fleet: KafkaFleet, partitions: list[Partition]) -> None:
    asyncio.run(_fenced(fleet, partitions))


async def _fenced(fleet: KafkaFleet, partitions: list[Partition]) -> None:
    await fleet.write(fleet.records("ch1", range(20)))
    async with fleet.member(session_timeout_s=1.0) as member:
        await member.until(20, "copywatch_frames_processed_total", channel="ch1")
        # Another producer with the same transactional id: the broker refuses all further writes of ours.
        name = f"{fleet.name}.{fleet.frames}.0"
        other = AIOKafkaProducer(bootstrap_servers=fleet.broker.address, transactional_id=name)
        async with other, other.transaction():
            pass
        await fleet.write(fleet.records("ch1", range(20, 48)))
        await member.until(1, "copywatch_kafka_retakes_total")
        await fleet.alerts_when_ended(1)  # the first copy ended at 32
        # The sequence numbers of broker and producer no longer match.
        await _skip_sequence_numbers(partitions[0])
        await fleet.write([*fleet.records("ch1", fleet.seconds[48:]), fleet.end("ch1")])
        await member.until(2, "copywatch_kafka_retakes_total")
        assert await fleet.alerts_when_ended(2) == fleet.expected("ch1")
    assert len(await fleet.broker._read(f"{fleet.name}.alerts")) == len(fleet.expected("ch1")), "nothing twice"


async def _skip_sequence_numbers(partition: Partition) -> None:
    """The broker then answers OutOfOrderSequenceNumber."""
    async with partition._busy:
        assert partition._producer is not None
        numbers = partition._producer._txn_manager._sequence_numbers
        for topic_partition in numbers:
            numbers[topic_partition] += 5


def test_a_broker_that_moves_is_found_through_the_bootstrap_address(
    fleet: KafkaFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_match, "GIVE_UP_S", 2.0)
    monkeypatch.setattr(partition, "TRANSACTION_TIMEOUT_S", 3.0)
    asyncio.run(_moved(fleet))


async def _moved(fleet: KafkaFleet) -> None:
    broker = fleet.broker
    with FaultProxy(int(broker.address.rpartition(":")[2])) as name:  # stands for a DNS name
        by_name = {"bootstrap": f"127.0.0.1:{name.port}", "rebalance_timeout_s": 1.0}
        async with fleet.member(**by_name) as member:
            await fleet.write(fleet.records("ch1", range(24)))
            await member.until(24, "copywatch_frames_processed_total", channel="ch1")
            await asyncio.to_thread(broker.move)
            name.target = broker.ports["PLAINTEXT"]
            await fleet.write([*fleet.records("ch1", fleet.seconds[24:]), fleet.end("ch1")])
            assert await fleet.alerts_when_ended(2) == fleet.expected("ch1")
            await member.until_page("readyz", 200, "ready")


def test_a_compressed_batch_larger_than_the_request_limit_stops_nothing(fleet: KafkaFleet) -> None:
    asyncio.run(_bomb(fleet))


async def _bomb(fleet: KafkaFleet) -> None:
    good = fleet.records("ch1", fleet.seconds)
    hidden = bytes(MAX_REQUEST_BYTES + (1 << 20))
    assert len(gzip.compress(hidden)) < 1 << 20
    bomb = {"key": b"ch1", "value": hidden, "headers": [("pts_ms", b"1"), ("content-type", b"image/png")]}
    await fleet.write(good[:20])
    compressing = AIOKafkaProducer(
        bootstrap_servers=fleet.broker.address, compression_type="gzip", max_request_size=2 * len(hidden)
    )
    async with compressing:
        await compressing.send_and_wait(fleet.frames, **bomb)
    await fleet.write([*good[20:], fleet.end("ch1")])
    async with fleet.member():
        assert await fleet.alerts_when_ended(2) == fleet.expected("ch1")
    (letter,) = await fleet.broker._read(f"{fleet.frames}.dlq")
    assert (letter.key, letter.value) == (b"ch1", b"")  # too large to forward
    assert dict(letter.headers)["copywatch.errors.reason"] == b"too_large"


def test_an_event_loop_blocked_longer_than_a_session_loses_and_repeats_no_alert(fleet: KafkaFleet) -> None:
    asyncio.run(_blocked(fleet))


async def _blocked(fleet: KafkaFleet) -> None:
    await fleet.write([*fleet.records("ch1", fleet.seconds), fleet.end("ch1")])
    async with fleet.member(session_timeout_s=1.0) as member:
        await member.until(10, "copywatch_frames_processed_total", channel="ch1")
        time.sleep(3.0)  # noqa: ASYNC251 - blocks the loop, which the member shares with this test
        assert await fleet.alerts_when_ended(2) == fleet.expected("ch1")
        assert await member.value("copywatch_event_loop_lag_seconds") > 2
    assert len(await fleet.broker._read(f"{fleet.name}.alerts")) == len(fleet.expected("ch1"))


def test_a_member_that_is_behind_pauses_its_partition_and_stays_in_the_group(
    fleet: KafkaFleet, monkeypatch: pytest.MonkeyPatch, partitions: list[Partition]
) -> None:
    process, pause, n_paused = KafkaChannel.process, AIOKafkaConsumer.pause, 0

    async def slow(self: KafkaChannel, record: Any) -> Any:
        await asyncio.sleep(0.1)  # a member that cannot keep up
        return await process(self, record)

    def counted(self: AIOKafkaConsumer, *frames: Any) -> None:
        nonlocal n_paused
        n_paused += 1
        pause(self, *frames)

    monkeypatch.setattr(KafkaChannel, "process", slow)
    monkeypatch.setattr(AIOKafkaConsumer, "pause", counted)
    monkeypatch.setattr(partition, "BUFFER_RECORDS", 10)
    monkeypatch.setattr(partition, "MAX_BATCH", 5)
    monkeypatch.setattr(kafka_match, "FETCH_BYTES", 8 << 10)  # some batches of 5 rows
    asyncio.run(_behind(fleet, partitions))
    assert n_paused > 1  # the first pause is that of the assignment


async def _behind(fleet: KafkaFleet, partitions: list[Partition]) -> None:
    aged_ms = round(time.time() * 1000) - 500_000
    records = [{**record, "timestamp_ms": aged_ms} for record in fleet.records("ch1", range(40))]
    for start in range(0, len(records), 5):  # in separate batches: a batch is fetched as a whole
        await fleet.write(records[start : start + 5])
    async with fleet.member(session_timeout_s=1.0) as member:
        await member.until(1, "copywatch_frames_processed_total", channel="ch1")
        most, lag, lag_s = 0, set[float](), set[float]()
        while (done := await member.value("copywatch_frames_processed_total", channel="ch1")) < 35:
            most = max(most, len(partitions[0]._buffer))
            lag.add(await member.value("copywatch_kafka_lag_records", partition="0"))
            lag_s.add(await member.value("copywatch_kafka_lag_seconds", partition="0"))
            assert await member.value("copywatch_kafka_partitions") == 1
        assert done >= 35
        assert 0 < most < 20
        assert max(lag) >= 25
        assert min(lag_s) > 499
        await member.until(40, "copywatch_frames_processed_total", channel="ch1")
        assert await member.value("copywatch_kafka_rebalances_total") == 1
        await member.until_is(0, "copywatch_kafka_lag_records", partition="0")
        await member.until_is(0, "copywatch_kafka_lag_seconds", partition="0")
