"""Limits on what callers may do at the same time or per minute; a request beyond them gets 429 at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from monitor.web.requests.problems import Problem

UPLOADS_AT_ONCE = 4
CHANNELS_PER_MINUTE = 60  # added by the API
MINUTE_S = 60.0


class Slots:
    """A number of things that may run at the same time; usable from any thread."""

    def __init__(self, n: int, detail: str) -> None:
        self._free, self._detail = threading.BoundedSemaphore(n), detail

    @contextmanager
    def use(self) -> Iterator[None]:
        """Holds a slot; raises Problem 429 if none is free."""
        if not self._free.acquire(blocking=False):
            raise Problem(429, self._detail, {"Retry-After": "10"})
        try:
            yield
        finally:
            self._free.release()


class RateLimit:
    """A number of calls per minute; usable from any thread."""

    def __init__(self, per_minute: int) -> None:
        self._called_at: deque[float] = deque(maxlen=per_minute)
        self._lock = threading.Lock()

    def take(self) -> None:
        """Counts one call; raises Problem 429 if the last minute had too many."""
        with self._lock:
            now = time.monotonic()
            if len(self._called_at) == self._called_at.maxlen and now - self._called_at[0] < MINUTE_S:
                raise Problem(429, f"At most {self._called_at.maxlen} per minute are allowed.", {"Retry-After": "60"})
            self._called_at.append(now)


class RequestLimits:
    """The limits of one application."""

    def __init__(self) -> None:
        self.uploads = Slots(UPLOADS_AT_ONCE, f"{UPLOADS_AT_ONCE} uploads are already in progress; try again later.")
        self.probes = Slots(1, "Another address is being tested; try again later.")
        self.new_channels = RateLimit(CHANNELS_PER_MINUTE)
