"""Notifications to systemd: ready, stopping, and the watchdog's keepalive.

They go to the datagram socket that NOTIFY_SOCKET names; without it nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress


def notify(*lines: str) -> None:
    """Sends lines such as READY=1 to the service manager, if there is one. One that is gone is not an error."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        sender.setblocking(False)  # a manager that does not read must not block the loop
        sender.sendto("\n".join(lines).encode(), "\0" + address[1:] if address.startswith("@") else address)


async def feed_watchdog(stuck_worker: Callable[[], str | None]) -> None:
    """Sends WATCHDOG=1 from the event loop twice per WATCHDOG_USEC, only while no vital worker is stuck.

    Returns at once where systemd set no watchdog for this process; else runs until cancelled.
    """
    period_us = os.environ.get("WATCHDOG_USEC", "0")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    if not period_us.isdigit() or int(period_us) == 0 or not is_ours:
        return
    while True:
        problem = stuck_worker()
        notify("WATCHDOG=1" if problem is None else f"STATUS={problem}")
        await asyncio.sleep(int(period_us) / 2e6)
