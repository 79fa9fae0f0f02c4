"""What the process of every role shares: how it is stopped, where it is asked for its health, what it complains of."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
from pathlib import Path

from monitor.ops.metrics import Metrics


def stop_on_signals(stop: asyncio.Event) -> None:
    """Has SIGTERM and SIGINT set it; who asks twice is not kept waiting."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_or_leave, stop, number)


async def wait_or(stop: asyncio.Event, seconds: float) -> bool:
    """Waits so long, less where `stop` comes first; whether it did."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True


def stop_or_leave(stop: asyncio.Event, number: int) -> None:
    """Stops; who asks twice is not kept waiting."""
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


def tell_disk(metrics: Metrics, data_dir: Path) -> None:
    """Has every scrape look at the room on the disk; unknown where it cannot be asked, which ends no scrape."""

    def usage(which: int) -> float:
        try:
            return shutil.disk_usage(data_dir)[which]
        except OSError:
            return math.nan

    metrics.data_size.set_function(lambda: usage(0))
    metrics.data_free.set_function(lambda: usage(2))


def note(problems: dict[str, str], what: str, complaint: str | None) -> None:
    """Keeps what is not ready, or that it is again."""
    if complaint is None:
        problems.pop(what, None)
    else:
        problems[what] = complaint
