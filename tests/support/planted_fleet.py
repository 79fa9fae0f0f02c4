"""A group of matchers on a real broker: planted feature rows in a topic, a library, and members that join and leave.

Members are forked from a process that has imported everything and done nothing, so that a start takes one second
instead of four; each then runs `copywatch match` with a configuration file.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from aiokafka.errors import KafkaError

from monitor.alerting.alerts import ENDED, RETRACTED
from monitor.ingest.clock import ChannelEpoch
from monitor.kafka.records import end_record, sample_record
from reference_db.features.encoder import load_encoder
from reference_db.store.catalog import Catalog, Reference, ReferenceFeatures, ReferenceId
from tests.support import killed_match
from tests.support.broker import Broker, Record, wait_for
from tests.support.planted_channels import BEGAN, FILMS, Part, film_rows, plant

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.support.killed_match"])
SESSION_S = 3.0
_NUMBERS = itertools.count()  # of members without an instance name

AlertEvent = dict[str, Any]  # as in the topic


@dataclass(frozen=True)
class PlantedLibrary:
    """A data folder with planted films, as if the shipped encoder had registered them."""

    folder: Path
    encoder_id: str

    @classmethod
    def build(cls, folder: Path) -> PlantedLibrary:
        encoder_id = load_encoder().encoder_id
        with Catalog.open(folder / "data", write=True) as catalog:
            for name in FILMS:
                rows = film_rows(name)
                reference = Reference(
                    ReferenceId(name), name.title(), "", {}, "0" * 64, len(rows), 0, encoder_id, f"{name:0>64}", BEGAN
                )
                catalog.add(reference, ReferenceFeatures(rows.astype(np.float16), np.ones(len(rows), np.bool_)))
        return cls(folder, encoder_id)


def programme(seed: int, seconds: int) -> list[Part]:
    """The parts of a channel: copies between noise, some interrupted by blank or lost seconds or a new clock."""
    rng, parts = random.Random(seed), [Part(8, noise=1.0)]
    while sum(part.seconds for part in parts) < seconds:
        film = rng.choice(FILMS)
        copy = Part(
            rng.randint(10, 35),
            film,
            rng.randint(0, 30),
            rng.choice([0.8, 1.0, 1.0, 1.25]),
            rng.choice([0.2, 0.5]),
            beside=rng.choice([None, None, None, "other"]),
        )
        parts.append(copy)
        if rng.random() < 0.3:
            break_ = rng.choice([Part(3, black=True, noise=1.0), Part(4, lost=True)])
            parts += [break_, replace(copy, seconds=8, from_s=copy.from_s + copy.seconds + break_.seconds)]
        parts.append(Part(rng.randint(9, 16), noise=1.0, new_epoch=rng.random() < 0.1))
    return parts


def records(
    library: PlantedLibrary, channel: str, parts: Sequence[Part], seed: int, partition: int | None = None
) -> list[Record]:
    """The parts as records of feature rows, and the end record."""
    stream, found = plant(parts, seed), []
    for sample, encoded in zip(stream.samples, stream.rows, strict=True):
        epoch = ChannelEpoch(channel, sample.epoch.name, sample.epoch.began_at, sample.epoch.first_s)
        one = sample_record(replace(sample, epoch=epoch), encoded, library.encoder_id)
        found.append(Record(one["value"], one["key"], one["headers"], partition))
    last = stream.samples[-1]
    end = end_record(channel, (last.second + 1) * 1000, last.epoch.name, last.arrived_at + timedelta(seconds=1))
    return [*found, Record(end["value"], end["key"], end["headers"], partition)]


def interleaved(channels: Sequence[Sequence[Record]]) -> list[Record]:
    """In the order of live channels: a second of each in turn."""
    longest = max(len(one) for one in channels)
    return [one[n] for n in range(longest) for one in channels if n < len(one)]


@dataclass(frozen=True)
class PlantedFleet:
    """One consumer group, with its own topics of alerts and state; groups may share the frames."""

    library: PlantedLibrary
    broker: Broker
    name: str
    frames: str
    session_s: float = SESSION_S

    @property
    def alerts_topic(self) -> str:
        return f"{self.name}.alerts"

    def config(self, instance: str | None = None, logging: dict[str, str] | None = None, **more: Any) -> Path:
        kafka = {
            "bootstrap": self.broker.address,
            "frames": self.frames,
            "alerts": self.alerts_topic,
            "state": f"{self.name}.state",
            "channels": f"{self.name}.channels",
            "group": self.name,
            "session_timeout_s": self.session_s,
            "rebalance_timeout_s": 10.0,
            **({"instance": instance} if instance else {}),
            **more,
        }
        folder = self.library.folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{instance or f'member-{next(_NUMBERS)}'}.yaml"
        settings = {"data_dir": str(self.library.folder / "data"), "web": {"port": 0}, "kafka": kafka}
        path.write_text(yaml.safe_dump(settings | ({"logging": logging} if logging else {})))
        return path

    def member(
        self, instance: str | None = None, point: str = "", count: int = 1, broken: str = "", **more: Any
    ) -> RoleProcess:
        config = self.config(instance, **more)
        return RoleProcess(["match", "--config", str(config)], config.with_suffix(".log"), point, count, broken)

    def is_done(self) -> bool:
        """Whether the group has committed all frames of the topic."""
        try:
            done, ends = self.broker.committed(self.name), self.broker.end_offsets(self.frames)
        except (KafkaError, TimeoutError):  # the group is being created, or the broker is stopped on purpose
            return False
        return all(done.get((self.frames, partition), 0) >= end for partition, end in ends.items())

    def read_alerts(self) -> list[AlertEvent]:
        """Every event of the alert topic, in order."""
        return [json.loads(record.value) for record in self.broker.read(self.alerts_topic)]


class RoleProcess:
    """One process of `copywatch match`, or of another role."""

    def __init__(self, arguments: list[str], log: Path, point: str = "", count: int = 1, broken: str = "") -> None:
        self.log = log
        self.point = point
        self._log_start = log.stat().st_size if log.exists() else 0
        self.process = FORKING.Process(target=killed_match.run_role, args=(arguments, str(log), point, count, broken))
        self.process.start()

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def log_text(self) -> str:
        """What this process wrote to its log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def wait_for_log(self, text: str) -> None:
        def has_line() -> bool:
            assert self.is_alive or text in self.log_text(), (
                f"it ended with {self.process.exitcode}:\n{self.log_text()}"
            )
            return text in self.log_text()

        wait_for(has_line, f"{text!r} in {self.log}")

    @property
    def has_open_partition(self) -> bool:
        """Whether it has opened a partition."""
        return "continues at offset" in self.log_text()

    @property
    def partitions(self) -> set[int]:
        """Its newest assignment."""
        assigned = re.findall(r"assigned partitions: (\[[\d, ]*\]|none)", self.log_text())
        return {int(number) for number in re.findall(r"\d+", assigned[-1])} if assigned else set()

    @property
    def open_partitions(self) -> set[int]:
        """Those of its newest assignment that it has opened since."""
        since = self.log_text().rpartition("assigned partitions:")[2]
        return {int(number) for number in re.findall(r"partition (\d+) continues at offset", since)} & self.partitions

    def send(self, number: int) -> None:
        if self.process.pid is not None and self.is_alive:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL; returns when the process has ended."""
        self.send(signal.SIGKILL)
        self.process.join()

    def stop(self) -> int | None:
        """Sends SIGTERM; returns the exit code."""
        self.send(signal.SIGTERM)
        self.process.join()
        return self.process.exitcode


def latest_events(events: Sequence[AlertEvent]) -> dict[str, AlertEvent]:
    """The last event of each alert."""
    last: dict[str, AlertEvent] = {}
    for alert in events:
        if alert["id"] not in last or alert["seq"] >= last[alert["id"]]["seq"]:
            last[alert["id"]] = alert
    return last


@dataclass(frozen=True)
class Difference:
    """How the alerts of a trial differ from those of an undisturbed run."""

    lost: int
    new: int
    changed: int
    unended: int
    repeated: int  # events emitted again; consumers replace one by the other

    @property
    def n_wrong(self) -> int:
        return self.lost + self.new + self.changed + self.unended


def compare_alerts(undisturbed: Sequence[AlertEvent], events: Sequence[AlertEvent]) -> Difference:
    expected, found = latest_events(undisturbed), latest_events(events)
    both = expected.keys() & found.keys()
    return Difference(
        lost=len(expected.keys() - found.keys()),
        new=len(found.keys() - expected.keys()),
        changed=sum(found[one] != expected[one] for one in both),
        unended=sum(found[one]["type"] not in (ENDED, RETRACTED) for one in found),
        repeated=len(events) - len({(alert["id"], alert["seq"]) for alert in events}),
    )
