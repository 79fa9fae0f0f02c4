"""Scale-out: `match` shares the partitions of frames, `ingest` those of the topic of channels."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.config.settings import ChannelSettings, load_settings
from monitor.kafka.channel_assignment import shared_channels, write_channel
from tests.support.broker import Broker, free_ports, wait_for
from tests.support.kafka_proxy import COORDINATION, ApiProxy
from tests.support.planted_channels import Part
from tests.support.planted_fleet import PlantedFleet, PlantedLibrary, RoleProcess, interleaved, records

CHANNELS = [f"ch{n}" for n in range(4)]
FIRST = [Part(8, noise=1.0), Part(14, "swift", 5, noise=0.2)]  # in the middle of a copy
REST = [*FIRST, Part(16, "swift", 19, noise=0.2), Part(12, noise=1.0)]


@pytest.fixture
def fleet(broker: Broker, tmp_path: Path) -> PlantedFleet:
    broker.create_topic("wide.frames", len(CHANNELS), retention_ms="-1")
    return PlantedFleet(PlantedLibrary.build(tmp_path), broker, "wide", "wide.frames")


@pytest.fixture
def members() -> Iterator[list[RoleProcess]]:
    """Members of a test; those still running are killed at its end."""
    started: list[RoleProcess] = []
    yield started
    for member in started:
        member.kill()


def test_members_share_the_partitions_and_take_over_those_of_a_killed_one(
    fleet: PlantedFleet, members: list[RoleProcess]
) -> None:
    everything = set(range(len(CHANNELS)))
    whole = {name: records(fleet.library, name, REST, n, n) for n, name in enumerate(CHANNELS)}
    n_first = sum(part.seconds for part in FIRST)
    fleet.broker.write(fleet.frames, interleaved([one[:n_first] for one in whole.values()]))
    members.append(fleet.member())
    wait_for(lambda: members[0].partitions == everything, "one member to have all")
    members.append(fleet.member())
    wait_for(lambda: len(members[0].partitions) == len(members[1].partitions) == 2, "two members to share")
    assert members[0].partitions | members[1].partitions == everything
    wait_for(fleet.is_done, "the first seconds of every channel")
    members[1].kill()
    wait_for(lambda: members[0].partitions == everything, "the survivor to have all")
    fleet.broker.write(fleet.frames, interleaved([one[n_first:] for one in whole.values()]))
    wait_for(fleet.is_done, "the rest of every channel")
    alerts = fleet.read_alerts()
    assert {alert["channel"] for alert in alerts} == set(CHANNELS)
    for name in CHANNELS:
        ids = {alert["id"] for alert in alerts if alert["channel"] == name}
        assert len(ids) == 1, "the copy continued across the take-over"
        (ended,) = (one for one in alerts if one["channel"] == name and one["type"] == "alert.ended")
        assert ended["gaps"] == []


def test_a_member_without_its_coordinator_emits_nothing_and_another_emits_all(
    broker: Broker, tmp_path: Path, members: list[RoleProcess]
) -> None:
    port, target = broker.proxied()
    broker.create_topic("cut.frames", 1, retention_ms="-1")
    fleet = PlantedFleet(PlantedLibrary.build(tmp_path), broker, "cut", "cut.frames")
    whole = records(fleet.library, "ch0", REST, 0, 0)
    n_first = sum(part.seconds for part in FIRST)
    with ApiProxy(port, target) as proxy:
        broker.write(fleet.frames, whole[:n_first])
        members.append(fleet.member(bootstrap=f"127.0.0.1:{port}"))
        wait_for(fleet.is_done, "the first seconds")
        proxy.blocked = COORDINATION
        members.append(fleet.member())
        broker.write(fleet.frames, whole[n_first:])  # the first still reads them
        wait_for(fleet.is_done, "another member to continue")
        assert members[1].open_partitions == {0}
        assert proxy.n_refused > 0
        proxy.blocked = frozenset()
        assert members[1].stop() == 0
        wait_for(lambda: members[0].open_partitions == {0}, "the first to be a member again")
    alerts = fleet.read_alerts()
    assert len({alert["id"] for alert in alerts}) == 1
    assert len({alert["seq"] for alert in alerts}) == len(alerts)
    assert (alerts[-1]["type"], alerts[-1]["gaps"]) == ("alert.ended", [])


def exported_channels(member: RoleProcess) -> set[str]:
    """The channels in the metrics of a process."""
    address = re.findall(r"health at (http://[\d.:]+)", member.log_text())[-1]
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as reply:
        return set(re.findall(r'copywatch_channel_up\{channel="(\w+)"\}', reply.read().decode()))


def test_ingest_processes_share_the_channels_of_a_topic(
    broker: Broker, tmp_path: Path, members: list[RoleProcess]
) -> None:
    fleet = PlantedFleet(PlantedLibrary(tmp_path, ""), broker, "shared", "shared.frames")
    kafka = load_settings(fleet.config(partitions=4)).kafka
    for name, port in zip(CHANNELS, free_ports(len(CHANNELS)), strict=True):
        channel = ChannelSettings(name=name, url=f"udp://127.0.0.1:{port}")
        asyncio.run(write_channel(kafka, name, channel))
    assert [channel.name for channel in asyncio.run(shared_channels(kafka))] == CHANNELS

    def ingest(number: int) -> RoleProcess:
        config = fleet.config(f"i{number}", partitions=4)
        member = RoleProcess(["ingest", "--shared", "--config", str(config)], config.with_suffix(".log"))
        members.append(member)
        member.wait_for_log("health at")
        return member

    first = ingest(0)
    wait_for(lambda: exported_channels(first) == set(CHANNELS), "one process to have all channels")
    second = ingest(1)
    wait_for(
        lambda: (
            bool(exported_channels(second)) and exported_channels(first) == set(CHANNELS) - exported_channels(second)
        ),
        "two processes to share the channels",
    )
    second.kill()
    wait_for(lambda: exported_channels(first) == set(CHANNELS), "the survivor to have all channels")
    asyncio.run(write_channel(kafka, CHANNELS[0], None))
    wait_for(lambda: exported_channels(first) == set(CHANNELS[1:]), "the removed channel to stop")
