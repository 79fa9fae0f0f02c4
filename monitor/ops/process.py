"""What the process of every role shares: stopping on signals, waits that an event ends, disk space in the metrics."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
from pathlib import Path

from monitor.ops.metrics import Metrics


def stop_on_signals(stop: asyncio.Event) -> None:
    """Sets `stop` on SIGTERM or SIGINT; a second signal exits at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop_or_exit, stop, number)


def _stop_or_exit(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits until the event is set, at most so long; whether it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def report_disk(metrics: Metrics, data_dir: Path) -> None:
    """Has every scrape measure the space on the disk; NaN if that fails, so that the scrape does not fail."""

    def usage(which: int) -> float:
        try:
            return shutil.disk_usage(data_dir)[which]
        except OSError:
            return math.nan

    metrics.data_size.set_function(lambda: usage(0))
    metrics.data_free.set_function(lambda: usage(2))
