"""`copywatch match` killed by SIGKILL at a named point: python -m tests.support.killed_match POINT COUNT ARGUMENTS...

The point is in the monitor's own code, wrapped here: what runs up to it is what runs in production, and then the
process is gone, with no chance to tidy up. WRONG has matchers that are broken on purpose: a comparison that does not
notice them notices nothing.
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
from monitor.kafka.channel import TopicChannel
from monitor.kafka.partition import Partition
from monitor.roles.kafka_match import MatchMember
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.models import Models
from tests.support.killed_serve import counted, die

IsNow = Callable[[], bool]


def around(
    owner: type, name: str, *, after: bool, only_if: Callable[[Any], bool] = lambda _: True
) -> Callable[[IsNow], None]:
    """Before or after a method, as often as `only_if` says so of its object."""
    method = getattr(owner, name)

    def install(is_now: IsNow) -> None:
        @wraps(method)
        async def dying(self: Any, *args: Any, **more: Any) -> Any:
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
        def dying_now(self: Any, *args: Any, **more: Any) -> Any:
            dies = only_if(self) and is_now()
            if dies and not after:
                die()
            result = method(self, *args, **more)
            if dies:
                die()
            return result

        setattr(owner, name, dying if _is_async(method) else dying_now)

    return install


def _is_async(method: Any) -> bool:
    return bool(method.__code__.co_flags & 0x80)  # CO_COROUTINE


def _has_alerts(partition: Any) -> bool:
    return bool(partition._alerts)


POINTS: dict[str, Callable[[IsNow], None]] = {
    "after poll": around(Partition, "feed", after=True),
    "before a second is matched": around(TopicChannel, "take", after=False),
    "after a second is matched": around(TopicChannel, "take", after=True),
    "in the network": around(Models, "read", after=True),
    "alert decided, nothing written": around(Partition, "_keep", after=False, only_if=_has_alerts),
    "alert written, before the snapshot": around(Partition, "_tell", after=True, only_if=_has_alerts),
    "before the snapshot": around(Partition, "_save", after=False),
    "after the snapshot": around(Partition, "_save", after=True),
    "all written, before the commit": around(Partition, "_move", after=True),
    "after the commit": around(Partition, "_keep", after=True, only_if=_has_alerts),
    "on revoke": around(MatchMember, "on_partitions_revoked", after=False),
    "revoked": around(MatchMember, "on_partitions_revoked", after=True),
    "on assign": around(MatchMember, "on_partitions_assigned", after=False),
    "assigned": around(MatchMember, "on_partitions_assigned", after=True),
    "partition taken over": around(Partition, "_open", after=True),
    "on restore": around(ChannelMonitor, "restore", after=True),
}

AT_WORK = list(POINTS)[:10]  # where a member passes that has something to match; the others are about changing hands


def forgets_state(_: IsNow) -> None:
    """Commits how far it read, and keeps nothing of what it knows: whatever is open is lost with it."""
    save = Partition._save

    async def forgetting(self: Partition, producer: Any, states: Any) -> None:
        await save(self, producer, [])

    Partition._save = forgetting  # type: ignore[method-assign]


def tells_twice(_: IsNow) -> None:
    """Begins anew wherever it takes over, in the middle of whatever is on: an alert gets another id."""
    restore = TopicChannel.restore

    def refusing(self: TopicChannel, content: bytes, headers: Any, first: int) -> Any:
        return restore(self, b"", [header for header in headers if header[0] != "start"], first)

    TopicChannel.restore = refusing  # type: ignore[method-assign]


def refuses_snapshots(_: IsNow) -> None:
    """Can go on from no snapshot, as one of another version can not: it reads again what it needs, and is right."""
    restore = TopicChannel.restore

    def refusing(self: TopicChannel, content: bytes, headers: Any, first: int) -> Any:
        return restore(self, b"", headers, first)

    TopicChannel.restore = refusing  # type: ignore[method-assign]


WRONG: dict[str, Callable[[IsNow], None]] = {"keeps no state": forgets_state, "cannot restore": tells_twice}
REFUSING = "refuses snapshots"


def live(arguments: list[str], log: str, point: str, count: int, wrong: str) -> None:
    """One life in a process of its own; everything said goes to the log."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: gone with the tests
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("COPYWATCH_")]:
        del os.environ[name]
    if wrong:
        (WRONG | {REFUSING: refuses_snapshots})[wrong](counted(1))
    if point:
        POINTS[point](counted(count))
    cli.main(arguments)


if __name__ == "__main__":
    point, count, *arguments = sys.argv[1:]
    if point != "none":
        POINTS[point](counted(int(count)))
    cli.main(arguments)
