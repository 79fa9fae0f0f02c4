"""What systemd is told: that we are ready, that we stop, and again and again that we live.

The words go to the datagram socket that NOTIFY_SOCKET names; without it nobody asked, and nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress


def notify(*words: str) -> None:
    """Sends lines such as READY=1 to the service manager, if there is one; it may have gone, which is no fault."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        sender.setblocking(False)  # a manager that does not read must not hold up the loop
        sender.sendto("\n".join(words).encode(), "\0" + address[1:] if address.startswith("@") else address)


async def feed_watchdog(hangs: Callable[[], str | None]) -> None:
    """Sends WATCHDOG=1 twice as often as asked for, by the event loop itself and only while nothing vital hangs."""
    asked_us = os.environ.get("WATCHDOG_USEC", "0")
    if (
        not asked_us.isdigit()
        or int(asked_us) == 0
        or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid())
    ):
        return
    while True:
        if (hung := hangs()) is None:
            notify("WATCHDOG=1")
        else:
            notify(f"STATUS={hung}")
        await asyncio.sleep(int(asked_us) / 2e6)
