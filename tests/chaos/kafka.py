"""Kills, zombies, rebalance storms and broker restarts against `copywatch match` on a real broker.

One undisturbed run over a topic of planted channels gives the expected alerts. Every trial reads the same topic in its
own consumer group while members fail at seeded moments and named points; its alerts must be the same in the end: no
alert lost, none with a new id, no final segment changed. Trials with members that are incorrect on purpose
(`tests.support.killed_match.BROKEN`) show that the comparison can fail.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.broker import Broker, wait_for
from tests.support.killed_match import POINTS, PROCESSING_POINTS
from tests.support.planted_fleet import (
    AlertEvent,
    Difference,
    PlantedFleet,
    PlantedLibrary,
    RoleProcess,
    compare_alerts,
    interleaved,
    programme,
    records,
)

PARTITIONS = 4
MEMBERS = 2
ROUND_S = 600.0  # longest allowed time of a trial
LONG_AWAY, AWAY_S = 3, 70.0  # which broker fault is long, and for how long
HANDOVER_S = 5.0  # for channels to move to another member, beyond the session time-out

Say = Callable[[str], None]


@dataclass
class Baseline:
    """Frames in a topic, and the alerts of an undisturbed run over them."""

    library: PlantedLibrary
    broker: Broker
    name: str
    alerts: list[AlertEvent] = field(default_factory=list)

    @classmethod
    def build(cls, folder: Path, broker: Broker, seed: int, channels: int, seconds: int) -> Baseline:
        baseline = cls(PlantedLibrary.build(folder), broker, f"chaos-{seed}-{time.time_ns():x}")
        broker.create_topic(baseline.frames, PARTITIONS, retention_ms="-1")
        batches = [
            records(baseline.library, f"ch{n}", programme(1000 * seed + n, seconds), n, n % PARTITIONS)
            for n in range(channels)
        ]
        broker.write(baseline.frames, interleaved(batches))
        fleet = baseline.fleet("undisturbed")
        with members(fleet) as group:
            group.start(1)
            wait_for(fleet.is_done, "an undisturbed run", ROUND_S)
        baseline.alerts = fleet.read_alerts()
        return baseline

    @property
    def frames(self) -> str:
        return f"{self.name}.frames"

    def fleet(self, name: str) -> PlantedFleet:
        return PlantedFleet(self.library, self.broker, f"{self.name}.{name}", self.frames)


class MemberGroup:
    """The members of a trial; those that die are replaced until all records are read."""

    def __init__(self, fleet: PlantedFleet) -> None:
        self.fleet = fleet
        self.members: dict[str, RoleProcess] = {}
        self.deaths: Counter[str] = Counter()  # by point; "any moment" for kills from outside

    def start(self, n_members: int, **how: Any) -> None:
        for n in range(n_members):
            self.members[f"m{n}"] = self.fleet.member(f"m{n}", **how)

    def remove_dead(self) -> list[str]:
        """Removes members that died since the last call; returns their names."""
        dead = [name for name, member in self.members.items() if not member.is_alive]
        for name in dead:
            member = self.members.pop(name)
            assert member.process.exitcode == -signal.SIGKILL, f"a member exited:\n{member.log_text()[-3000:]}"
            self.deaths[member.point or "any moment"] += 1
        return dead

    def stop(self) -> None:
        for member in self.members.values():
            member.kill()


@contextmanager
def members(fleet: PlantedFleet) -> Iterator[MemberGroup]:
    group = MemberGroup(fleet)
    try:
        yield group
    finally:
        group.stop()


@dataclass
class Trial:
    """The faults of one trial, and how its alerts differ."""

    seed: int
    deaths: Counter[str] = field(default_factory=Counter)
    zombies: int = 0
    broker_restarts: int = 0
    broker_kills: int = 0
    joins_and_leaves: int = 0
    difference: Difference | None = None


def kills(baseline: Baseline, seed: int, n_kills: int, *, soon: bool = False) -> Trial:
    """Members die at random moments and at named points, until `n_kills` died or all records are read.

    With `soon` they die at the first point of their work, so that the number does not depend on the machine.
    """
    rng = random.Random(seed)

    def replacement(fleet: PlantedFleet, name: str) -> RoleProcess:
        """Most have the same instance name, so that the broker assigns them the same channels at once."""
        if soon:
            return fleet.member(name, rng.choice(PROCESSING_POINTS), 1)
        instance = name if rng.random() < 0.8 else f"{name}-{rng.randrange(1 << 30):x}"
        if rng.random() < 0.25:
            return fleet.member(instance)
        point = rng.choice(sorted(POINTS))
        return fleet.member(
            instance, point, rng.choice([1, 1, 2, 3, 5, 9] if point in PROCESSING_POINTS else [1, 1, 2])
        )

    def is_hit(victim: RoleProcess) -> bool:
        """Whether to kill it now: rarely while it starts or if it has a point to die at."""
        return rng.random() < ((0.05 if not victim.point else 0.02) if victim.has_open_partition else 0.005)

    return _run_with_kills(baseline, baseline.fleet(f"kills-{seed}"), Trial(seed), n_kills, replacement, rng, is_hit)


def control(baseline: Baseline, seed: int, broken: str) -> Trial:
    """Members that are incorrect on purpose die after their first alert; the alerts must show it.

    Those that only refuse every snapshot read again what they need, and emit the same alerts.
    """
    fleet = baseline.fleet(f"control-{seed}-{broken.replace(' ', '-')}")

    def replacement(fleet: PlantedFleet, name: str) -> RoleProcess:
        return fleet.member(name, "after the commit", broken=broken)

    return _run_with_kills(baseline, fleet, Trial(seed), 2, replacement, random.Random(seed), lambda _: False, broken)


def _run_with_kills(
    baseline: Baseline,
    fleet: PlantedFleet,
    trial: Trial,
    n_kills: int,
    replacement: Callable[[PlantedFleet, str], RoleProcess],
    rng: random.Random,
    is_hit: Callable[[RoleProcess], bool],
    broken: str = "",
) -> Trial:
    with members(fleet) as group:
        group.members = {f"m{n}": replacement(fleet, f"m{n}") for n in range(MEMBERS)}
        deadline, next_look_s = time.monotonic() + ROUND_S, 0.0
        while time.monotonic() < deadline:
            for name in group.remove_dead():
                is_over = group.deaths.total() >= n_kills
                group.members[name] = fleet.member(name, broken=broken) if is_over else replacement(fleet, name)
            victim = group.members[rng.choice(sorted(group.members))]
            if group.deaths.total() < n_kills and is_hit(victim):
                victim.point = ""  # killed before it reached the point
                victim.kill()
            elif time.monotonic() > next_look_s:
                if fleet.is_done():
                    break
                next_look_s = time.monotonic() + 0.5
            time.sleep(0.05)  # polling interval
        trial.deaths = group.deaths
    trial.difference = compare_alerts(baseline.alerts, fleet.read_alerts())
    return trial


def zombies(baseline: Baseline, seed: int, n_zombies: int) -> Trial:
    """Members are stopped until they have been replaced, then continue."""
    rng, trial = random.Random(seed), Trial(seed)
    fleet = baseline.fleet(f"zombies-{seed}")
    with members(fleet) as group:
        group.start(MEMBERS + 1)
        for _ in range(n_zombies):
            _wait_for_work(group, rng)
            sleeper = group.members[rng.choice(sorted(group.members))]
            sleeper.send(signal.SIGSTOP)
            time.sleep(fleet.session_s * rng.uniform(1.2, 2.0))  # longer than the session time-out
            sleeper.send(signal.SIGCONT)
            trial.zombies += 1
        _finish(group)
    trial.difference = compare_alerts(baseline.alerts, fleet.read_alerts())
    return trial


def broker_faults(baseline: Baseline, seed: int, n_faults: int) -> Trial:
    """The broker stops, cleanly or not, while members work."""
    rng, trial = random.Random(seed), Trial(seed)
    fleet = baseline.fleet(f"broker-{seed}")
    with members(fleet) as group:
        group.start(MEMBERS)
        for n in range(n_faults):
            _wait_for_work(group, rng)
            if n % 2 == 0:
                baseline.broker.kill()
                trial.broker_kills += 1
            else:
                baseline.broker.stop()
                trial.broker_restarts += 1
            if n == LONG_AWAY:
                time.sleep(AWAY_S)  # until every client has given up and reconnects
            baseline.broker.start()
        _finish(group)
    trial.difference = compare_alerts(baseline.alerts, fleet.read_alerts())
    return trial


def zombie_and_broker(baseline: Baseline, seed: int) -> Trial:
    """A member is stopped, and resumes after the broker was killed and restarted."""
    rng, trial = random.Random(seed), Trial(seed, zombies=1, broker_kills=1)
    fleet = baseline.fleet(f"both-{seed}")
    with members(fleet) as group:
        group.start(MEMBERS)
        _wait_for_work(group, rng)
        sleeper = group.members[rng.choice(sorted(group.members))]
        sleeper.send(signal.SIGSTOP)
        time.sleep(fleet.session_s * 1.3)  # longer than the session time-out
        baseline.broker.kill()
        baseline.broker.start()
        sleeper.send(signal.SIGCONT)
        _finish(group)
    trial.difference = compare_alerts(baseline.alerts, fleet.read_alerts())
    return trial


def storm(baseline: Baseline, seed: int, n_changes: int) -> Trial:
    """Members join and leave continuously."""
    rng, trial = random.Random(seed), Trial(seed)
    fleet = baseline.fleet(f"storm-{seed}")
    with members(fleet) as group:
        group.start(MEMBERS)
        extra: list[RoleProcess] = []
        for _ in range(n_changes):
            if len(extra) < 2 and (not extra or rng.random() < 0.5):
                extra.append(fleet.member())
                extra[-1].wait_for_log("health at")
            else:
                assert extra.pop(rng.randrange(len(extra))).stop() == 0
            trial.joins_and_leaves += 1
            _wait_for_work(group, rng)
        for member in extra:
            member.kill()
        _finish(group)
    trial.difference = compare_alerts(baseline.alerts, fleet.read_alerts())
    return trial


def handovers(baseline: Baseline, seed: int, n_kills: int) -> dict[str, Any]:
    """Time from a second member's start until it works on its partitions, and from its kill until the first member has
    resumed all of them."""
    fleet, everything = baseline.fleet(f"handovers-{seed}"), set(range(PARTITIONS))
    joined_s: list[float] = []
    killed_s: list[float] = []
    with members(fleet) as group:
        survivor = group.members["m0"] = fleet.member()
        wait_for(lambda: survivor.open_partitions == everything, "the first to work on all")
        for _ in range(n_kills):
            victim = group.members["m1"] = fleet.member()
            victim.wait_for_log("health at")
            since_s = time.monotonic()
            wait_for(lambda: _share_all(victim, survivor), "both to work on a share")  # noqa: B023
            joined_s.append(time.monotonic() - since_s)
            victim.kill()
            since_s = time.monotonic()
            wait_for(lambda: survivor.partitions == everything, "the survivor to have all")
            moved = everything - _retained(survivor)
            wait_for(lambda: moved <= survivor.open_partitions, "the survivor to work on all")  # noqa: B023
            killed_s.append(time.monotonic() - since_s)
    return {
        "handovers": n_kills,
        "session_s": fleet.session_s,
        "joined_seconds_median": round(statistics.median(joined_s), 2),
        "joined_seconds_most": round(max(joined_s), 2),
        "killed_seconds_median": round(statistics.median(killed_s), 2),
        "killed_seconds_most": round(max(killed_s), 2),
        "failures": sum(one > fleet.session_s + HANDOVER_S for one in (*joined_s, *killed_s)),
    }


def _share_all(joined: RoleProcess, other: RoleProcess) -> bool:
    """Whether the two share all partitions, and the first works on its own."""
    everything = set(range(PARTITIONS))
    return joined.open_partitions | other.partitions == everything != other.partitions


def _retained(member: RoleProcess) -> set[int]:
    """Partitions that a member had before the last rebalance; it continues them from memory without a log line."""
    before = member.log_text().rpartition("assigned partitions:")[0].rpartition("assigned partitions:")[2]
    return {int(number) for number in re.findall(r"\d+", before.split("]")[0])}


def _wait_for_work(group: MemberGroup, rng: random.Random) -> None:
    """Waits until members hold partitions, and then a random time."""
    wait_for(lambda: any(member.has_open_partition for member in group.members.values()), "members with partitions")
    time.sleep(rng.uniform(0.2, 2.0))  # a random moment


def _finish(group: MemberGroup) -> None:
    wait_for(group.fleet.is_done, f"{group.fleet.name} to have read all", ROUND_S)
    assert not group.remove_dead()


def figures(trials: list[Trial], expected: list[AlertEvent]) -> dict[str, Any]:
    """Totals over the trials."""
    done = [trial.difference for trial in trials if trial.difference is not None]
    assert len(done) == len(trials)
    return {
        "trials": len(trials),
        "alerts_each": len({alert["id"] for alert in expected}),
        "kills": sum(trial.deaths.total() for trial in trials),
        "kills_by_point": dict(sorted(sum((trial.deaths for trial in trials), Counter()).items())),
        "zombies": sum(trial.zombies for trial in trials),
        "broker_restarts": sum(trial.broker_restarts for trial in trials),
        "broker_kills": sum(trial.broker_kills for trial in trials),
        "joins_and_leaves": sum(trial.joins_and_leaves for trial in trials),
        "lost": sum(one.lost for one in done),
        "new_ids": sum(one.new for one in done),
        "changed": sum(one.changed for one in done),
        "unended": sum(one.unended for one in done),
        "repeated_events": sum(one.repeated for one in done),
        "failures": sum(one.n_wrong for one in done),
    }
