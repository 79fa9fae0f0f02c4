"""Change signals: any thread reports a change, and tasks that watch for it wake at once.

Within one process this takes the place of polling. A signal carries no data: a watcher clears its event, looks at
what it watches, and waits again, so a change during the look wakes it once more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ChangeSignal:
    """Safe in any thread; watchers may belong to several event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def notify(self) -> None:
        """Sets the event of every watcher."""
        with self._lock:
            watchers = list(self._watchers)
        for loop, event in watchers:
            with suppress(RuntimeError):  # its loop has been closed meanwhile
                loop.call_soon_threadsafe(event.set)

    def _add(self, watcher: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._watchers.append(watcher)

    def _remove(self, watcher: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._watchers.remove(watcher)


@contextmanager
def watch(*signals: ChangeSignal) -> Iterator[asyncio.Event]:
    """An event of the running loop that each of the signals sets while the context is open."""
    watcher = asyncio.get_running_loop(), asyncio.Event()
    for signal in signals:
        signal._add(watcher)
    try:
        yield watcher[1]
    finally:
        for signal in signals:
            signal._remove(watcher)
