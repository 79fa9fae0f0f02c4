"""A fleet on a real broker: channels of planted feature rows in a topic, a library, and members that come and go.

Members are forked from a process that has imported everything and done nothing, so that a life costs a second, not
four; each then runs `copywatch match` as anybody would, with a configuration file.
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
from monitor.kafka.records import end_of, record_of
from reference_db.features.encoder import load_encoder
from reference_db.store.catalog import Catalog, Reference, ReferenceFeatures, ReferenceId
from tests.support import killed_match
from tests.support.broker import Broker, Record, wait_for
from tests.support.planted_channels import BEGAN, FILMS, Part, film_rows, plant

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.support.killed_match"])
SESSION_S = 3.0
_NUMBERS = itertools.count()  # of members without a name

Told = dict[str, Any]  # an alert as it is in the topic


@dataclass(frozen=True)
class House:
    """A library of planted films, in which the shipped encoder believes."""

    folder: Path
    encoder_id: str

    @classmethod
    def build(cls, folder: Path) -> House:
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
    """So many seconds of a channel: copies between other things, some broken by dull or lost seconds or a new clock."""
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
            broken = rng.choice([Part(3, dull=True, noise=1.0), Part(4, lost=True)])
            parts += [broken, replace(copy, seconds=8, from_s=copy.from_s + copy.seconds + broken.seconds)]
        parts.append(Part(rng.randint(9, 16), noise=1.0, new_epoch=rng.random() < 0.1))
    return parts


def records(house: House, channel: str, parts: Sequence[Part], seed: int, partition: int | None = None) -> list[Record]:
    """The programme as feature rows, and the record that says that the stream ended."""
    air, found = plant(parts, seed), []
    for sample, encoded in zip(air.samples, air.rows, strict=True):
        epoch = ChannelEpoch(channel, sample.epoch.name, sample.epoch.began_at, sample.epoch.first_s)
        one = record_of(replace(sample, epoch=epoch), encoded, house.encoder_id)
        found.append(Record(one["value"], one["key"], one["headers"], partition))
    last = air.samples[-1]
    end = end_of(channel, (last.second + 1) * 1000, last.epoch.name, last.arrived_at + timedelta(seconds=1))
    return [*found, Record(end["value"], end["key"], end["headers"], partition)]


def interleaved(channels: Sequence[Sequence[Record]]) -> list[Record]:
    """As live channels would come: a second of each in turn."""
    longest = max(len(one) for one in channels)
    return [one[n] for n in range(longest) for one in channels if n < len(one)]


@dataclass(frozen=True)
class Fleet:
    """Members of one group, with topics of their own for alerts and state; the frames may be shared."""

    house: House
    broker: Broker
    name: str
    frames: str
    session_s: float = SESSION_S

    @property
    def alerts(self) -> str:
        return f"{self.name}.alerts"

    def config(self, instance: str | None = None, logging: dict[str, str] | None = None, **more: Any) -> Path:
        kafka = {
            "bootstrap": self.broker.address,
            "frames": self.frames,
            "alerts": self.alerts,
            "state": f"{self.name}.state",
            "channels": f"{self.name}.channels",
            "group": self.name,
            "session_timeout_s": self.session_s,
            "rebalance_timeout_s": 10.0,
            **({"instance": instance} if instance else {}),
            **more,
        }
        folder = self.house.folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{instance or f'member-{next(_NUMBERS)}'}.yaml"
        settings = {"data_dir": str(self.house.folder / "data"), "web": {"port": 0}, "kafka": kafka}
        path.write_text(yaml.safe_dump(settings | ({"logging": logging} if logging else {})))
        return path

    def member(
        self, instance: str | None = None, point: str = "", count: int = 1, wrong: str = "", **more: Any
    ) -> Member:
        config = self.config(instance, **more)
        return Member(["match", "--config", str(config)], config.with_suffix(".log"), point, count, wrong)

    def is_done(self) -> bool:
        """Whether all that is in the topic of frames is in the state."""
        try:
            done, ends = self.broker.committed(self.name), self.broker.end_offsets(self.frames)
        except (KafkaError, TimeoutError):  # the group is just being made, or the broker is away on purpose
            return False
        return all(done.get((self.frames, partition), 0) >= end for partition, end in ends.items())

    def told(self) -> list[Told]:
        """Every alert of the topic, in its order."""
        return [json.loads(record.value) for record in self.broker.read(self.alerts)]


class Member:
    """One process of `copywatch match`, or of another role."""

    def __init__(self, arguments: list[str], log: Path, point: str = "", count: int = 1, wrong: str = "") -> None:
        self.log = log
        self.point = point
        self._said = log.stat().st_size if log.exists() else 0
        self.process = FORKING.Process(target=killed_match.live, args=(arguments, str(log), point, count, wrong))
        self.process.start()

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def said(self) -> str:
        """What this life wrote to its log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._said)
            return file.read().decode(errors="replace")

    def wait_until_it_says(self, words: str) -> None:
        def is_said() -> bool:
            assert self.is_alive or words in self.said(), f"it ended with {self.process.exitcode}:\n{self.said()}"
            return words in self.said()

        wait_for(is_said, f"{words!r} in {self.log}")

    @property
    def is_at_work(self) -> bool:
        """Whether it has taken up a partition."""
        return "goes on at offset" in self.said()

    @property
    def partitions(self) -> set[int]:
        """Those that it said it was given last."""
        said = re.findall(r"partitions now: (\[[\d, ]*\]|none)", self.said())
        return {int(number) for number in re.findall(r"\d+", said[-1])} if said else set()

    @property
    def at_work(self) -> set[int]:
        """Those of them that it has taken up since."""
        since = self.said().rpartition("partitions now:")[2]
        return {int(number) for number in re.findall(r"partition (\d+) goes on at offset", since)} & self.partitions

    def send(self, number: int) -> None:
        if self.process.pid is not None and self.is_alive:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """By SIGKILL; returns when it is gone."""
        self.send(signal.SIGKILL)
        self.process.join()

    def stop(self) -> int | None:
        """A clean end; the exit code."""
        self.send(signal.SIGTERM)
        self.process.join()
        return self.process.exitcode


def final(told: Sequence[Told]) -> dict[str, Told]:
    """The last word on each alert."""
    last: dict[str, Told] = {}
    for alert in told:
        if alert["id"] not in last or alert["seq"] >= last[alert["id"]]["seq"]:
            last[alert["id"]] = alert
    return last


@dataclass(frozen=True)
class Difference:
    """How what was told differs from what an unbroken life tells."""

    lost: int
    new: int
    changed: int
    unended: int
    repeated: int  # events told again, word for word or not; consumers put one over the other

    @property
    def wrong(self) -> int:
        return self.lost + self.new + self.changed + self.unended


def compare(unbroken: Sequence[Told], told: Sequence[Told]) -> Difference:
    expected, found = final(unbroken), final(told)
    both = expected.keys() & found.keys()
    return Difference(
        lost=len(expected.keys() - found.keys()),
        new=len(found.keys() - expected.keys()),
        changed=sum(found[one] != expected[one] for one in both),
        unended=sum(found[one]["type"] not in (ENDED, RETRACTED) for one in found),
        repeated=len(told) - len({(alert["id"], alert["seq"]) for alert in told}),
    )
