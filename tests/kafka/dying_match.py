"""`copywatch match` that is killed at a named point: python -m tests.kafka.dying_match POINT COUNT ARGUMENTS...

The point is in the monitor's own code, wrapped here: what runs up to it is what runs in production, and then the
process is gone, with no chance to tidy up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from monitor import cli
from monitor.kafka.matching import Member
from monitor.kafka.partition import Partition
from tests.dying_serve import counted, die

Pred = Callable[[Any], bool]


def around(kind: type, name: str, is_now: Callable[[], bool], *, after: bool, when: Pred = lambda it: True) -> None:
    """Wraps a coroutine method: the process dies before or after it, at the count-th time that `when` holds."""
    work = getattr(kind, name)

    async def dying(self: Any, *args: Any) -> Any:
        dies = when(self) and is_now()
        if dies and not after:
            die()
        result = await work(self, *args)
        if dies:
            die()
        return result

    setattr(kind, name, dying)


def has_news(partition: Any) -> bool:
    return bool(partition._alerts)


def at_feed(is_now: Callable[[], bool]) -> None:
    """With records polled and nothing done."""
    feed = Partition.feed

    def dying(self: Partition, records: Any) -> None:
        feed(self, records)
        if is_now():
            die()

    Partition.feed = dying  # type: ignore[method-assign]


POINTS: dict[str, Callable[[Callable[[], bool]], None]] = {
    "after-poll": at_feed,
    "after-round": lambda is_now: around(Partition, "_take", is_now, after=True),
    "before-keep": lambda is_now: around(Partition, "_keep", is_now, after=False, when=has_news),
    "after-tell": lambda is_now: around(Partition, "_tell", is_now, after=True, when=has_news),
    "before-save": lambda is_now: around(Partition, "_save", is_now, after=False),
    "after-save": lambda is_now: around(Partition, "_save", is_now, after=True, when=has_news),
    "before-commit": lambda is_now: around(Partition, "_move", is_now, after=True, when=has_news),
    "after-commit": lambda is_now: around(Partition, "_keep", is_now, after=True, when=has_news),
    "after-open": lambda is_now: around(Partition, "_open", is_now, after=True),
    "before-open": lambda is_now: around(Partition, "_open", is_now, after=False),
    "in-assign": lambda is_now: around(Member, "on_partitions_assigned", is_now, after=False),
    "after-assign": lambda is_now: around(Member, "on_partitions_assigned", is_now, after=True),
    "in-revoke": lambda is_now: around(Member, "on_partitions_revoked", is_now, after=False),
    "after-revoke": lambda is_now: around(Member, "on_partitions_revoked", is_now, after=True),
}

if __name__ == "__main__":
    point, count, *arguments = sys.argv[1:]
    if point != "none":
        POINTS[point](counted(int(count)))
    cli.main(arguments)
