"""Exponential back-off: each delay before a retry is twice the previous one, up to a limit.

One object per retried operation. Call `take_s` or `wait` after a failure and `reset` after a success. The delays never
end; the caller decides when to give up.
"""

from __future__ import annotations

import asyncio
import random

from monitor.ops.process import wait_for_event

FIRST_S, LAST_S = 1.0, 30.0


class Backoff:
    """Not thread-safe: one task or thread uses it."""

    def __init__(self, first_s: float = FIRST_S, last_s: float = LAST_S, *, jitter: float = 0.0) -> None:
        self._first_s, self._last_s, self._jitter = first_s, last_s, jitter
        self.reset()

    def reset(self) -> None:
        """Starts with the first delay again."""
        self.next_s = self._first_s  # the next delay, before jitter
        self.is_first = True  # no delay was taken since the last success: log the failure

    def raise_to(self, least_s: float) -> None:
        """Makes the next delay at least this long."""
        self.next_s = max(self.next_s, least_s)

    def take_s(self) -> float:
        """The delay to wait now, with jitter of ± `jitter` of it; the next one is twice as long."""
        delay_s = self.next_s
        self.next_s, self.is_first = min(2 * delay_s, self._last_s), False
        return delay_s * random.uniform(1 - self._jitter, 1 + self._jitter)

    async def wait(self, stop: asyncio.Event | None = None) -> None:
        """Waits for the next delay, or until `stop` is set."""
        if stop is None:
            await asyncio.sleep(self.take_s())
        else:
            await wait_for_event(stop, self.take_s())
