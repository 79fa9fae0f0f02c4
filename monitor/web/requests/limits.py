"""Limits on what callers may do at the same time or per minute; a request beyond them gets 429 at once."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from types import TracebackType
from typing import Self

from monitor.web.auth.gatekeeper import Caller
from monitor.web.requests.problems import Problem

UPLOADS_AT_ONCE, UPLOADS_PER_TOKEN = 4, 2
DOWNLOADS_AT_ONCE, DOWNLOADS_PER_TOKEN = 4, 2  # of exports
CHANNELS_PER_MINUTE = 60  # added by the API
MINUTE_S = 60.0


class Slots:
    """A number of things that may run at the same time, in all and for one token; usable from any thread."""

    def __init__(self, n: int, per_token: int, detail: str) -> None:
        self._n, self._per_token, self._detail = n, per_token, detail
        self._used: Counter[str] = Counter()  # by caller
        self._lock = threading.Lock()

    def take(self, caller: Caller | None = None) -> Slot:
        """A slot; raises Problem 429 if none is free. Without tokens there is one caller, who may take all."""
        name = "" if caller is None else caller.name
        limit = self._n if caller is None or caller.is_local else self._per_token
        with self._lock:
            if self._used.total() >= self._n or self._used[name] >= limit:
                raise Problem(429, self._detail, {"Retry-After": "10"})
            self._used[name] += 1
        return Slot(self, name)

    def release(self, name: str) -> None:
        with self._lock:
            self._used[name] -= 1
            self._used += Counter()  # forgets callers without a slot


class Slot:
    """A slot that is taken: released once, by `with` or by `release`."""

    def __init__(self, slots: Slots, name: str) -> None:
        self._slots: Slots | None = slots
        self._name = name

    def release(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


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
        self.uploads = Slots(
            UPLOADS_AT_ONCE,
            UPLOADS_PER_TOKEN,
            f"At most {UPLOADS_AT_ONCE} uploads at once, {UPLOADS_PER_TOKEN} of one token; try again later.",
        )
        self.downloads = Slots(
            DOWNLOADS_AT_ONCE,
            DOWNLOADS_PER_TOKEN,
            f"At most {DOWNLOADS_AT_ONCE} downloads at once, {DOWNLOADS_PER_TOKEN} of one token; try again later.",
        )
        self.probes = Slots(1, 1, "Another address is being tested; try again later.")
        self.new_channels = RateLimit(CHANNELS_PER_MINUTE)
