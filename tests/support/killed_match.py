"""`copywatch match` killed by SIGKILL at a named point: python -m tests.support.killed_match POINT COUNT ARGUMENTS...

The point is a method of the product, wrapped here: the process runs production code up to it, then dies without
cleaning up. BROKEN has matchers that are incorrect on purpose, to show that the comparison of alerts can fail.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from monitor import cli
from monitor.kafka.channel import KafkaChannel
from monitor.kafka.partition import Partition
from monitor.roles.kafka_match import MatchMember
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.models import Models
from tests.support.killed_serve import counted, die

IsNow = Callable[[], bool]


def around(
    owner: type, name: str, *, after: bool, only_if: Callable[[Any], bool] = lambda _: True
) -> Callable[[IsNow], None]:
    """Kills before or after the n-th call of a method for which `only_if` holds."""
    method = getattr(owner, name)

    def install(is_now: IsNow) -> None:
        @wraps(method)
        async def run_and_die(self: Any, *args: Any, **more: Any) -> Any:
            dies = only_if(self) and is_now()
            if dies and not after:
                die()
            result = method(self, *args, **more)
            if isinstance(result, Awaitable):
                result = await result
            if dies:
                die()
            return result

        @wraps(method)
        def run_and_die_now(self: Any, *args: Any, **more: Any) -> Any:
            dies = only_if(self) and is_now()
            if dies and not after:
                die()
            result = method(self, *args, **more)
            if dies:
                die()
            return result

        setattr(owner, name, run_and_die if _is_async(method) else run_and_die_now)

    return install


def _is_async(method: Any) -> bool:
    return bool(method.__code__.co_flags & 0x80)  # CO_COROUTINE


def _has_alerts(partition: Any) -> bool:
    return bool(partition._results.alerts)


POINTS: dict[str, Callable[[IsNow], None]] = {
    "after poll": around(Partition, "feed", after=True),
    "before a second is matched": around(KafkaChannel, "process", after=False),
    "after a second is matched": around(KafkaChannel, "process", after=True),
    "in the network": around(Models, "read", after=True),
    "alert decided, nothing written": around(Partition, "_commit", after=False, only_if=_has_alerts),
    "alert written, before the snapshot": around(Partition, "_send_results", after=True, only_if=_has_alerts),
    "before the snapshot": around(Partition, "_send_state", after=False),
    "after the snapshot": around(Partition, "_send_state", after=True),
    "all written, before the commit": around(Partition, "_send_offset", after=True),
    "after the commit": around(Partition, "_commit", after=True, only_if=_has_alerts),
    "on revoke": around(MatchMember, "on_partitions_revoked", after=False),
    "revoked": around(MatchMember, "on_partitions_revoked", after=True),
    "on assign": around(MatchMember, "on_partitions_assigned", after=False),
    "assigned": around(MatchMember, "on_partitions_assigned", after=True),
    "partition opened": around(Partition, "_open", after=True),
    "on restore": around(ChannelMonitor, "restore", after=True),
}

PROCESSING_POINTS = list(POINTS)[
    :10
]  # reached by every member that processes records; the others are part of a rebalance


def store_no_state(_: IsNow) -> None:
    """Commits the offset without the state of channels: open alerts are lost."""
    send_state = Partition._send_state

    async def send_nothing(self: Partition, producer: Any, states: Any) -> None:
        await send_state(self, producer, [])

    Partition._send_state = send_nothing  # type: ignore[method-assign]


def start_fresh(_: IsNow) -> None:
    """Starts every channel fresh after a take-over, in the middle of a copy: the alert gets another id."""
    restore = KafkaChannel.restore

    def refusing(self: KafkaChannel, content: bytes, headers: Any, first: int) -> Any:
        return restore(self, b"", [header for header in headers if header[0] != "start"], first)

    KafkaChannel.restore = refusing  # type: ignore[method-assign]


def refuse_snapshots(_: IsNow) -> None:
    """Refuses every snapshot, as another version would: it replays the records it needs and emits the same alerts."""
    restore = KafkaChannel.restore

    def refusing(self: KafkaChannel, content: bytes, headers: Any, first: int) -> Any:
        return restore(self, b"", headers, first)

    KafkaChannel.restore = refusing  # type: ignore[method-assign]


BROKEN: dict[str, Callable[[IsNow], None]] = {"stores no state": store_no_state, "cannot restore": start_fresh}
REFUSING = "refuses snapshots"


def run_role(arguments: list[str], log: str, point: str, count: int, broken: str) -> None:
    """Runs a command in a process of its own; its output goes to the log."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with the tests
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("COPYWATCH_")]:
        del os.environ[name]
    if broken:
        (BROKEN | {REFUSING: refuse_snapshots})[broken](counted(1))
    if point:
        POINTS[point](counted(count))
    cli.main(arguments)


if __name__ == "__main__":
    point, count, *arguments = sys.argv[1:]
    if point != "none":
        POINTS[point](counted(int(count)))
    cli.main(arguments)
