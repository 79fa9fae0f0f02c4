"""Kafka spreads channels: over `match` by the partitions of frames, over `ingest` by those of the topic of channels."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.config.settings import ChannelSettings, load_settings
from monitor.kafka.channel_assignment import put_channel, shared_channels
from tests.support.broker import Broker, free_ports, wait_for
from tests.support.kafka_proxy import COORDINATION, ApiProxy
from tests.support.planted_channels import Part
from tests.support.planted_fleet import Fleet, House, Member, interleaved, records

CHANNELS = [f"ch{n}" for n in range(4)]
FIRST = [Part(8, noise=1.0), Part(14, "swift", 5, noise=0.2)]  # in the middle of a copy
REST = [*FIRST, Part(16, "swift", 19, noise=0.2), Part(12, noise=1.0)]


@pytest.fixture
def fleet(broker: Broker, tmp_path: Path) -> Fleet:
    broker.create_topic("wide.frames", len(CHANNELS), retention_ms="-1")
    return Fleet(House.build(tmp_path), broker, "wide", "wide.frames")


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Whatever a test leaves running is ended."""
    begun: list[Member] = []
    yield begun
    for member in begun:
        member.kill()


def test_members_share_the_channels_and_take_over_from_one_that_is_killed(fleet: Fleet, members: list[Member]) -> None:
    everything = set(range(len(CHANNELS)))
    whole = {name: records(fleet.house, name, REST, n, n) for n, name in enumerate(CHANNELS)}
    begun = sum(part.seconds for part in FIRST)
    fleet.broker.write(fleet.frames, interleaved([one[:begun] for one in whole.values()]))
    members.append(fleet.member())
    wait_for(lambda: members[0].partitions == everything, "one member to have all")
    members.append(fleet.member())
    wait_for(lambda: len(members[0].partitions) == len(members[1].partitions) == 2, "two members to share")
    assert members[0].partitions | members[1].partitions == everything
    wait_for(fleet.is_done, "the first seconds of every channel")
    members[1].kill()
    wait_for(lambda: members[0].partitions == everything, "the survivor to have all")
    fleet.broker.write(fleet.frames, interleaved([one[begun:] for one in whole.values()]))
    wait_for(fleet.is_done, "the rest of every channel")
    told = fleet.told()
    assert {alert["channel"] for alert in told} == set(CHANNELS)
    for name in CHANNELS:
        ids = {alert["id"] for alert in told if alert["channel"] == name}
        assert len(ids) == 1, "the copy went on over the change of hands"
        (ended,) = (one for one in told if one["channel"] == name and one["type"] == "alert.ended")
        assert ended["gaps"] == []


def test_a_member_that_is_cut_off_from_the_coordinator_tells_nothing_and_another_tells_all(
    broker: Broker, tmp_path: Path, members: list[Member]
) -> None:
    port, target = broker.proxied()
    broker.create_topic("cut.frames", 1, retention_ms="-1")
    fleet = Fleet(House.build(tmp_path), broker, "cut", "cut.frames")
    whole = records(fleet.house, "ch0", REST, 0, 0)
    begun = sum(part.seconds for part in FIRST)
    with ApiProxy(port, target) as proxy:
        broker.write(fleet.frames, whole[:begun])
        members.append(fleet.member(bootstrap=f"127.0.0.1:{port}"))
        wait_for(fleet.is_done, "the first seconds")
        proxy.shut = COORDINATION
        members.append(fleet.member())
        broker.write(fleet.frames, whole[begun:])  # the first still reads them
        wait_for(fleet.is_done, "another member to go on")
        assert members[1].at_work == {0}
        assert proxy.n_refused > 0
        proxy.shut = frozenset()
        assert members[1].stop() == 0
        wait_for(lambda: members[0].at_work == {0}, "the first to be a member again")
    told = fleet.told()
    assert len({alert["id"] for alert in told}) == 1
    assert len({alert["seq"] for alert in told}) == len(told)
    assert (told[-1]["type"], told[-1]["gaps"]) == ("alert.ended", [])


def watched(member: Member) -> set[str]:
    """The channels of which a member exports metrics."""
    address = re.findall(r"health at (http://[\d.:]+)", member.said())[-1]
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as reply:
        return set(re.findall(r'copywatch_channel_up\{channel="(\w+)"\}', reply.read().decode()))


def test_ingest_processes_share_the_channels_of_a_topic(broker: Broker, tmp_path: Path, members: list[Member]) -> None:
    fleet = Fleet(House(tmp_path, ""), broker, "shared", "shared.frames")
    kafka = load_settings(fleet.config(partitions=4)).kafka
    for name, port in zip(CHANNELS, free_ports(len(CHANNELS)), strict=True):
        channel = ChannelSettings(name=name, url=f"udp://127.0.0.1:{port}")
        asyncio.run(put_channel(kafka, name, channel))
    assert [channel.name for channel in asyncio.run(shared_channels(kafka))] == CHANNELS

    def ingest(number: int) -> Member:
        config = fleet.config(f"i{number}", partitions=4)
        member = Member(["ingest", "--shared", "--config", str(config)], config.with_suffix(".log"))
        members.append(member)
        member.wait_until_it_says("health at")
        return member

    first = ingest(0)
    wait_for(lambda: watched(first) == set(CHANNELS), "one process to have all channels")
    second = ingest(1)
    wait_for(
        lambda: bool(watched(second)) and watched(first) == set(CHANNELS) - watched(second),
        "two processes to share the channels",
    )
    second.kill()
    wait_for(lambda: watched(first) == set(CHANNELS), "the survivor to have all channels")
    asyncio.run(put_channel(kafka, CHANNELS[0], None))
    wait_for(lambda: watched(first) == set(CHANNELS[1:]), "a channel that was removed to be gone")
