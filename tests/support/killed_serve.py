"""`copywatch serve` killed by SIGKILL at a named point: python -m tests.support.killed_serve POINT COUNT ARGUMENTS...

The point is a method of the product, wrapped here: the process runs production code up to it, then dies without
cleaning up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from monitor import cli
from monitor.alerting.alerts import Alert
from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.alerting.sinks import JsonLinesSink
from monitor.runtime.channel_monitor import ChannelMonitor


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def counted(count: int) -> Callable[[], bool]:
    """True at the count-th call."""
    left = count

    def is_now() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    return is_now


def around_write(is_now: Callable[[], bool], *, after: bool) -> None:
    """Before or after the transaction that stores an alert."""
    write = Outbox.write

    def run_and_die(
        self: Outbox, entries: Sequence[OutboxEntry], delivered: Mapping[str, Collection[int]] | None = None
    ) -> None:
        dies = any(entry.alerts for entry in entries) and is_now()
        if dies and not after:
            die()
        write(self, entries, delivered)
        if dies:
            die()

    Outbox.write = run_and_die  # type: ignore[method-assign]


def around_line(is_now: Callable[[], bool], *, after: bool) -> None:
    """In the middle of a line of the file, or after it and before the delivery is stored."""
    send = JsonLinesSink.send

    def run_and_die(self: JsonLinesSink, alerts: list[Alert]) -> None:
        dies = is_now()
        if dies and not after:
            with self.path.open("ab") as file:
                file.write(json.dumps(alerts[0].as_dict()).encode()[:150])
            die()
        send(self, alerts)
        if dies:
            die()

    JsonLinesSink.send = run_and_die  # type: ignore[method-assign]


def at_snapshot(is_now: Callable[[], bool]) -> None:
    """With a snapshot in memory that is not stored yet."""
    snapshot = ChannelMonitor.snapshot

    def run_and_die(self: ChannelMonitor, position: Mapping[str, object]) -> bytes:
        content = snapshot(self, position)
        if is_now():
            die()
        return content

    ChannelMonitor.snapshot = run_and_die  # type: ignore[method-assign]


def at_restore(is_now: Callable[[], bool]) -> None:
    """Right after a channel was restored."""
    restore = ChannelMonitor.restore

    def run_and_die(self: ChannelMonitor, content: bytes) -> object:
        restored = restore(self, content)
        if is_now():
            die()
        return restored

    ChannelMonitor.restore = run_and_die  # type: ignore[method-assign, assignment]


POINTS: dict[str, Callable[[Callable[[], bool]], None]] = {
    "before-commit": lambda is_now: around_write(is_now, after=False),
    "after-commit": lambda is_now: around_write(is_now, after=True),
    "mid-line": lambda is_now: around_line(is_now, after=False),
    "after-line": lambda is_now: around_line(is_now, after=True),
    "snapshot": at_snapshot,
    "restore": at_restore,
}

if __name__ == "__main__":
    point, count, *arguments = sys.argv[1:]
    if point != "none":
        POINTS[point](counted(int(count)))
    cli.main(arguments)
