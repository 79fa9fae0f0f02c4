"""What brokers, producers and slow members do to a `match`: it is told of, recovered from, and changes no alert."""

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
from monitor.kafka.channel import TopicChannel
from monitor.kafka.partition import Partition
from monitor.roles import kafka_match
from tests.support.broker import Broker
from tests.support.fault_proxy import FaultProxy
from tests.support.kafka_fleet import Fleet
from tests.support.recorded_channel import RecordedChannel


@pytest.fixture
def fleet(broker: Broker, recorded: RecordedChannel) -> Fleet:
    return Fleet.new(broker, recorded)


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> list[Partition]:
    """Every partition that a member has, as it is made."""
    made: list[Partition] = []
    new = kafka_match.MatchMember._new

    def kept(self: kafka_match.MatchMember, frames: Any) -> Partition:
        made.append(new(self, frames))
        return made[-1]

    monkeypatch.setattr(kafka_match.MatchMember, "_new", kept)
    return made


@pytest.fixture
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker, and what it has, so that tests need not wait."""
    monkeypatch.setattr(kafka_match, "ASK_EVERY_S", 0.2)
    monkeypatch.setattr(kafka_match, "REFRESH_METADATA_S", 0.5)


@pytest.mark.usefixtures("asked_often")
def test_a_topic_that_is_deleted_is_complained_of_until_it_is_back(fleet: Fleet) -> None:
    asyncio.run(_deleted(fleet))


async def _deleted(fleet: Fleet) -> None:
    await fleet.write(fleet.records("ch1", range(24)))  # in the middle of the first copy
    async with fleet.member() as member:
        await member.until(24, "copywatch_frames_processed_total", channel="ch1")
        assert (await member.page("readyz"))[0] == 200
        await fleet.broker._with_admin(lambda admin: admin.delete_topics([fleet.frames]))
        await member.until_page("readyz", 503, f"the topic {fleet.frames} is gone")
        assert await member.value("copywatch_kafka_up") == 0
        assert (await member.page("livez"))[0] == 200  # a restart would not mend it
        await fleet.broker._create(fleet.frames, 1, {})
        await fleet.write([*fleet.records("ch1", fleet.seconds[24:]), fleet.end("ch1")])
        assert await fleet.told_whole(2) == fleet.expected("ch1")
        await member.until_page("readyz", 200, "ready")
        assert await member.value("copywatch_kafka_up") == 1


@pytest.mark.usefixtures("asked_often")
def test_partitions_that_are_added_are_taken_up(fleet: Fleet) -> None:
    asyncio.run(_added(fleet))


async def _added(fleet: Fleet) -> None:
    async with fleet.member() as member:
        await member.until(1, "copywatch_kafka_partitions")
        await fleet.broker._with_admin(lambda admin: admin.create_partitions({fleet.frames: NewPartitions(3)}))
        await member.until(3, "copywatch_kafka_partitions")
        await fleet.write([*fleet.records("ch1", fleet.seconds), fleet.end("ch1")], partition=2)
        assert await fleet.told_whole(2) == fleet.expected("ch1")


def test_a_producer_that_the_broker_turns_away_is_made_anew_and_all_is_told(
    fleet: Fleet, partitions: list[Partition]
) -> None:
    asyncio.run(_turned_away(fleet, partitions))


async def _turned_away(fleet: Fleet, made: list[Partition]) -> None:
    await fleet.write(fleet.records("ch1", range(20)))
    async with fleet.member(session_timeout_s=1.0) as member:
        await member.until(20, "copywatch_frames_processed_total", channel="ch1")
        # Another comes by the same name: all that we write is refused from now on.
        name = f"{fleet.name}.{fleet.frames}.0"
        other = AIOKafkaProducer(bootstrap_servers=fleet.broker.address, transactional_id=name)
        async with other, other.transaction():
            pass
        await fleet.write(fleet.records("ch1", range(20, 48)))
        await member.until(1, "copywatch_kafka_retakes_total")
        await fleet.told_whole(1)  # the first copy ended at 32
        # The broker has lost count of what we wrote, or we have.
        await _lose_count(made[0])
        await fleet.write([*fleet.records("ch1", fleet.seconds[48:]), fleet.end("ch1")])
        await member.until(2, "copywatch_kafka_retakes_total")
        assert await fleet.told_whole(2) == fleet.expected("ch1")
    assert len(await fleet.broker._read(f"{fleet.name}.alerts")) == len(fleet.expected("ch1")), "nothing twice"


async def _lose_count(partition: Partition) -> None:
    """Skips some sequence numbers of what is written: the broker answers OutOfOrderSequenceNumber."""
    async with partition._working:
        assert partition._producer is not None
        numbers = partition._producer._txn_manager._sequence_numbers
        for topic_partition in numbers:
            numbers[topic_partition] += 5


def test_a_broker_at_another_address_is_found_by_the_one_that_was_configured(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_match, "GIVE_UP_S", 2.0)
    monkeypatch.setattr(partition, "KEEP_S", 3.0)
    asyncio.run(_moved(fleet))


async def _moved(fleet: Fleet) -> None:
    broker = fleet.broker
    with FaultProxy(int(broker.address.rpartition(":")[2])) as name:  # a name that leads to where the broker is
        by_name = {"bootstrap": f"127.0.0.1:{name.port}", "rebalance_timeout_s": 1.0}
        async with fleet.member(**by_name) as member:
            await fleet.write(fleet.records("ch1", range(24)))
            await member.until(24, "copywatch_frames_processed_total", channel="ch1")
            await asyncio.to_thread(broker.move)
            name.target = broker.ports["PLAINTEXT"]
            await fleet.write([*fleet.records("ch1", fleet.seconds[24:]), fleet.end("ch1")])
            assert await fleet.told_whole(2) == fleet.expected("ch1")
            await member.until_page("readyz", 200, "ready")


def test_a_batch_whose_compression_hides_more_than_may_be_sent_on_stops_nothing(fleet: Fleet) -> None:
    asyncio.run(_bomb(fleet))


async def _bomb(fleet: Fleet) -> None:
    good = fleet.records("ch1", fleet.seconds)
    hidden = bytes(MAX_REQUEST_BYTES + (1 << 20))
    assert len(gzip.compress(hidden)) < 1 << 20
    bomb = {"key": b"ch1", "value": hidden, "headers": [("pts_ms", b"1"), ("content-type", b"image/png")]}
    await fleet.write(good[:20])
    packing = AIOKafkaProducer(
        bootstrap_servers=fleet.broker.address, compression_type="gzip", max_request_size=2 * len(hidden)
    )
    async with packing:
        await packing.send_and_wait(fleet.frames, **bomb)
    await fleet.write([*good[20:], fleet.end("ch1")])
    async with fleet.member():
        assert await fleet.told_whole(2) == fleet.expected("ch1")
    (letter,) = await fleet.broker._read(f"{fleet.frames}.dlq")
    assert (letter.key, letter.value) == (b"ch1", b"")  # too large to be sent on
    assert dict(letter.headers)["copywatch.errors.reason"] == b"too_large"


def test_a_loop_that_was_held_up_for_longer_than_a_session_loses_and_doubles_nothing(fleet: Fleet) -> None:
    asyncio.run(_held_up(fleet))


async def _held_up(fleet: Fleet) -> None:
    await fleet.write([*fleet.records("ch1", fleet.seconds), fleet.end("ch1")])
    async with fleet.member(session_timeout_s=1.0) as member:
        await member.until(10, "copywatch_frames_processed_total", channel="ch1")
        time.sleep(3.0)  # noqa: ASYNC251 - as nothing may do on the loop, which the member shares with this test
        assert await fleet.told_whole(2) == fleet.expected("ch1")
        assert await member.value("copywatch_event_loop_lag_seconds") > 2
    assert len(await fleet.broker._read(f"{fleet.name}.alerts")) == len(fleet.expected("ch1"))


def test_a_member_that_is_behind_pauses_its_partition_and_stays_a_member(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, partitions: list[Partition]
) -> None:
    take, pause, n_paused = TopicChannel.take, AIOKafkaConsumer.pause, 0

    async def slow(self: TopicChannel, record: Any) -> Any:
        await asyncio.sleep(0.1)  # of a member that cannot keep up
        return await take(self, record)

    def counted(self: AIOKafkaConsumer, *frames: Any) -> None:
        nonlocal n_paused
        n_paused += 1
        pause(self, *frames)

    monkeypatch.setattr(TopicChannel, "take", slow)
    monkeypatch.setattr(AIOKafkaConsumer, "pause", counted)
    monkeypatch.setattr(partition, "BUFFER_RECORDS", 10)
    monkeypatch.setattr(partition, "ROUND", 5)
    monkeypatch.setattr(kafka_match, "FETCH_BYTES", 8 << 10)  # some batches of 5 rows
    asyncio.run(_behind(fleet, partitions))
    assert n_paused > 1  # once is when it was given the partition


async def _behind(fleet: Fleet, made: list[Partition]) -> None:
    aged_ms = round(time.time() * 1000) - 500_000
    records = [{**record, "timestamp_ms": aged_ms} for record in fleet.records("ch1", range(40))]
    for begin in range(0, len(records), 5):  # as batches of their own: one is fetched as a whole
        await fleet.write(records[begin : begin + 5])
    async with fleet.member(session_timeout_s=1.0) as member:
        await member.until(1, "copywatch_frames_processed_total", channel="ch1")
        most, lag, lag_s = 0, set[float](), set[float]()
        while (done := await member.value("copywatch_frames_processed_total", channel="ch1")) < 35:
            most = max(most, len(made[0]._buffer))
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
