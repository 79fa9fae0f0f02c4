"""How late the event loop is: HTTP, brokers and every channel share it, so nothing may hold it up.

A loop that is held up cannot say so while it lasts. The gauge therefore keeps the worst of the last seconds, and a
thread beside the loop logs what holds it up when that lasts for seconds.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque

from monitor.ops.metrics import Metrics

logger = logging.getLogger(__name__)

EVERY_S = 0.25
KEPT = 60  # beats; together 15 s, so that a scrape every 15 s misses none
STUCK_S = 5.0  # without a beat, after which the loop's stack is logged, once


async def beat(metrics: Metrics) -> None:
    """Measures until cancelled."""
    late_s: deque[float] = deque(maxlen=KEPT)
    watchdog = _Watchdog()
    try:
        while True:
            due_s = watchdog.beaten_s = time.monotonic()
            await asyncio.sleep(EVERY_S)
            late_s.append(max(0.0, time.monotonic() - due_s - EVERY_S))
            metrics.event_loop_lag.set(max(late_s))
    finally:
        watchdog.over.set()


class _Watchdog:
    """A thread that looks at the beats of the loop it was made in."""

    def __init__(self) -> None:
        self.beaten_s = time.monotonic()
        self.over = threading.Event()
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        told_s = 0.0  # the beat after which the loop was stuck when that was told last
        while not self.over.wait(STUCK_S / 4):
            beaten_s = self.beaten_s
            if time.monotonic() - beaten_s > STUCK_S and beaten_s != told_s:
                told_s = beaten_s
                frame = sys._current_frames().get(self._loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                logger.error("the event loop is held up for more than %.0f s by\n%s", STUCK_S, stack.rstrip())
