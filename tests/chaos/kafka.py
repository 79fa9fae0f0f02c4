"""Kills, zombies, storms and broker restarts against `copywatch match` on a real broker.

One unbroken run over a topic of planted channels says what there is to tell. Every trial reads the same topic in a
group of its own while members are broken at seeded moments and named points; what it told in the end must be the
same: no alert lost, none with a new id, no final segment changed. Trials with members that are wrong on purpose
(`tests.support.killed_match.WRONG`) show that the comparison can fail.
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
from tests.support.killed_match import AT_WORK, POINTS
from tests.support.planted_fleet import (
    Difference,
    Fleet,
    House,
    Member,
    Told,
    compare,
    interleaved,
    programme,
    records,
)

PARTITIONS = 4
MEMBERS = 2
ROUND_S = 600.0  # that a trial may take
LONG_AWAY, AWAY_S = 3, 70.0  # which fault of a broker lasts, and for how long
HANDOVER_S = 5.0  # that channels may take to change hands, beyond the session's time-out

Say = Callable[[str], None]


@dataclass
class Stage:
    """Frames in a topic, and what an unbroken run tells of them."""

    house: House
    broker: Broker
    name: str
    unbroken: list[Told] = field(default_factory=list)

    @classmethod
    def build(cls, folder: Path, broker: Broker, seed: int, channels: int, seconds: int) -> Stage:
        stage = cls(House.build(folder), broker, f"chaos-{seed}-{time.time_ns():x}")
        broker.create_topic(stage.frames, PARTITIONS, retention_ms="-1")
        made = [
            records(stage.house, f"ch{n}", programme(1000 * seed + n, seconds), n, n % PARTITIONS)
            for n in range(channels)
        ]
        broker.write(stage.frames, interleaved(made))
        fleet = stage.fleet("unbroken")
        with members(fleet) as crew:
            crew.begin(1)
            wait_for(fleet.is_done, "an unbroken run", ROUND_S)
        stage.unbroken = fleet.told()
        return stage

    @property
    def frames(self) -> str:
        return f"{self.name}.frames"

    def fleet(self, name: str) -> Fleet:
        return Fleet(self.house, self.broker, f"{self.name}.{name}", self.frames)


class Crew:
    """The members of a trial: who dies is replaced, until there is nothing left to do."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.members: dict[str, Member] = {}
        self.deaths: Counter[str] = Counter()  # by point; "any moment" for those who were killed from outside

    def begin(self, n_members: int, **how: Any) -> None:
        for n in range(n_members):
            self.members[f"m{n}"] = self.fleet.member(f"m{n}", **how)

    def bury(self) -> list[str]:
        """Names of those who died at their point since the last look."""
        gone = [name for name, member in self.members.items() if not member.is_alive]
        for name in gone:
            member = self.members.pop(name)
            assert member.process.exitcode == -signal.SIGKILL, f"a member ended by itself:\n{member.said()[-3000:]}"
            self.deaths[member.point or "any moment"] += 1
        return gone

    def end(self) -> None:
        for member in self.members.values():
            member.kill()


@contextmanager
def members(fleet: Fleet) -> Iterator[Crew]:
    crew = Crew(fleet)
    try:
        yield crew
    finally:
        crew.end()


@dataclass
class Trial:
    """What was done to a group, and what it told."""

    seed: int
    deaths: Counter[str] = field(default_factory=Counter)
    zombies: int = 0
    broker_restarts: int = 0
    broker_kills: int = 0
    joins_and_leaves: int = 0
    difference: Difference | None = None


def kills(stage: Stage, seed: int, n_kills: int, *, soon: bool = False) -> Trial:
    """Members die at random moments and at named points, until so many died or all is read.

    Those who die `soon` do so at the first point of their work: so many die however fast the machine reads.
    """
    rng = random.Random(seed)

    def reborn(fleet: Fleet, name: str) -> Member:
        """Most keep the name, so that the broker gives them their channels at once."""
        if soon:
            return fleet.member(name, rng.choice(AT_WORK), 1)
        instance = name if rng.random() < 0.8 else f"{name}-{rng.randrange(1 << 30):x}"
        if rng.random() < 0.25:
            return fleet.member(instance)
        point = rng.choice(sorted(POINTS))
        return fleet.member(instance, point, rng.choice([1, 1, 2, 3, 5, 9] if point in AT_WORK else [1, 1, 2]))

    def is_hit(victim: Member) -> bool:
        """Once in a while: seldom while it starts or where it has a point of its own to die at."""
        return rng.random() < ((0.05 if not victim.point else 0.02) if victim.is_at_work else 0.005)

    return _dying(stage, stage.fleet(f"kills-{seed}"), Trial(seed), n_kills, reborn, rng, is_hit)


def control(stage: Stage, seed: int, wrong: str) -> Trial:
    """Members that are wrong on purpose die as soon as they have told something; this must be seen in what is told.

    Those that only refuse every snapshot read again what they need, and tell the same.
    """
    fleet = stage.fleet(f"control-{seed}-{wrong.replace(' ', '-')}")

    def reborn(fleet: Fleet, name: str) -> Member:
        return fleet.member(name, "after the commit", wrong=wrong)

    return _dying(stage, fleet, Trial(seed), 2, reborn, random.Random(seed), lambda _: False, wrong)


def _dying(
    stage: Stage,
    fleet: Fleet,
    trial: Trial,
    n_kills: int,
    reborn: Callable[[Fleet, str], Member],
    rng: random.Random,
    is_hit: Callable[[Member], bool],
    wrong: str = "",
) -> Trial:
    with members(fleet) as crew:
        crew.members = {f"m{n}": reborn(fleet, f"m{n}") for n in range(MEMBERS)}
        deadline, next_look_s = time.monotonic() + ROUND_S, 0.0
        while time.monotonic() < deadline:
            for name in crew.bury():
                is_over = crew.deaths.total() >= n_kills
                crew.members[name] = fleet.member(name, wrong=wrong) if is_over else reborn(fleet, name)
            victim = crew.members[rng.choice(sorted(crew.members))]
            if crew.deaths.total() < n_kills and is_hit(victim):
                victim.point = ""  # it did not get so far
                victim.kill()
            elif time.monotonic() > next_look_s:
                if fleet.is_done():
                    break
                next_look_s = time.monotonic() + 0.5
            time.sleep(0.05)  # the pace at which members are looked at
        trial.deaths = crew.deaths
    trial.difference = compare(stage.unbroken, fleet.told())
    return trial


def zombies(stage: Stage, seed: int, n_zombies: int) -> Trial:
    """Members sleep until they have been replaced, then go on as if nothing had happened."""
    rng, trial = random.Random(seed), Trial(seed)
    fleet = stage.fleet(f"zombies-{seed}")
    with members(fleet) as crew:
        crew.begin(MEMBERS + 1)
        for _ in range(n_zombies):
            _wait_for_work(crew, rng)
            sleeper = crew.members[rng.choice(sorted(crew.members))]
            sleeper.send(signal.SIGSTOP)
            time.sleep(fleet.session_s * rng.uniform(1.2, 2.0))  # it sleeps for longer than the broker waits for it
            sleeper.send(signal.SIGCONT)
            trial.zombies += 1
        _finish(crew)
    trial.difference = compare(stage.unbroken, fleet.told())
    return trial


def broker_faults(stage: Stage, seed: int, n_faults: int) -> Trial:
    """The broker goes away, cleanly or not, while members work."""
    rng, trial = random.Random(seed), Trial(seed)
    fleet = stage.fleet(f"broker-{seed}")
    with members(fleet) as crew:
        crew.begin(MEMBERS)
        for n in range(n_faults):
            _wait_for_work(crew, rng)
            if n % 2 == 0:
                stage.broker.kill()
                trial.broker_kills += 1
            else:
                stage.broker.stop()
                trial.broker_restarts += 1
            if n == LONG_AWAY:
                time.sleep(AWAY_S)  # until every client has given up and is made anew
            stage.broker.start()
        _finish(crew)
    trial.difference = compare(stage.unbroken, fleet.told())
    return trial


def zombie_and_broker(stage: Stage, seed: int) -> Trial:
    """A member sleeps, and wakes up to a broker that was killed and began anew meanwhile."""
    rng, trial = random.Random(seed), Trial(seed, zombies=1, broker_kills=1)
    fleet = stage.fleet(f"both-{seed}")
    with members(fleet) as crew:
        crew.begin(MEMBERS)
        _wait_for_work(crew, rng)
        sleeper = crew.members[rng.choice(sorted(crew.members))]
        sleeper.send(signal.SIGSTOP)
        time.sleep(fleet.session_s * 1.3)  # it sleeps for longer than the broker waits for it
        stage.broker.kill()
        stage.broker.start()
        sleeper.send(signal.SIGCONT)
        _finish(crew)
    trial.difference = compare(stage.unbroken, fleet.told())
    return trial


def storm(stage: Stage, seed: int, n_changes: int) -> Trial:
    """Members join and leave all the time."""
    rng, trial = random.Random(seed), Trial(seed)
    fleet = stage.fleet(f"storm-{seed}")
    with members(fleet) as crew:
        crew.begin(MEMBERS)
        guests: list[Member] = []
        for _ in range(n_changes):
            if len(guests) < 2 and (not guests or rng.random() < 0.5):
                guests.append(fleet.member())
                guests[-1].wait_until_it_says("health at")
            else:
                assert guests.pop(rng.randrange(len(guests))).stop() == 0
            trial.joins_and_leaves += 1
            _wait_for_work(crew, rng)
        for guest in guests:
            guest.kill()
        _finish(crew)
    trial.difference = compare(stage.unbroken, fleet.told())
    return trial


def handovers(stage: Stage, seed: int, n_kills: int) -> dict[str, Any]:
    """How long it takes until a second member works on its share once it is ready, and from the kill of that member
    until the first has taken up all that it had."""
    fleet, everything = stage.fleet(f"handovers-{seed}"), set(range(PARTITIONS))
    joined_s: list[float] = []
    killed_s: list[float] = []
    with members(fleet) as crew:
        survivor = crew.members["m0"] = fleet.member()
        wait_for(lambda: survivor.at_work == everything, "the first to work on all")
        for _ in range(n_kills):
            victim = crew.members["m1"] = fleet.member()
            victim.wait_until_it_says("health at")
            since_s = time.monotonic()
            wait_for(lambda: victim.at_work | survivor.partitions == everything != survivor.partitions, "a share")  # noqa: B023
            joined_s.append(time.monotonic() - since_s)
            victim.kill()
            since_s = time.monotonic()
            wait_for(lambda: survivor.partitions == everything, "the survivor to have all")
            moved = everything - _kept_over(survivor)
            wait_for(lambda: moved <= survivor.at_work, "the survivor to work on all")  # noqa: B023
            killed_s.append(time.monotonic() - since_s)
    return {
        "handovers": n_kills,
        "session_s": fleet.session_s,
        "joined_seconds_median": round(statistics.median(joined_s), 2),
        "joined_seconds_most": round(max(joined_s), 2),
        "killed_seconds_median": round(statistics.median(killed_s), 2),
        "killed_seconds_most": round(max(killed_s), 2),
        "wrong": sum(one > fleet.session_s + HANDOVER_S for one in (*joined_s, *killed_s)),
    }


def _kept_over(member: Member) -> set[int]:
    """Partitions that a member had before the last change and goes on with from memory, without a word."""
    before = member.said().rpartition("partitions now:")[0].rpartition("partitions now:")[2]
    return {int(number) for number in re.findall(r"\d+", before.split("]")[0])}


def _wait_for_work(crew: Crew, rng: random.Random) -> None:
    """Until some members hold partitions, and then a moment of any length."""
    wait_for(lambda: any(member.is_at_work for member in crew.members.values()), "members with partitions")
    time.sleep(rng.uniform(0.2, 2.0))  # any moment will do


def _finish(crew: Crew) -> None:
    wait_for(crew.fleet.is_done, f"{crew.fleet.name} to have read all", ROUND_S)
    assert not crew.bury()


def figures(trials: list[Trial], unbroken: list[Told]) -> dict[str, Any]:
    """All of them together."""
    done = [trial.difference for trial in trials if trial.difference is not None]
    assert len(done) == len(trials)
    return {
        "trials": len(trials),
        "alerts_each": len({alert["id"] for alert in unbroken}),
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
        "wrong": sum(one.wrong for one in done),
    }
