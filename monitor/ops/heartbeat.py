"""Lag of the event loop: HTTP, brokers and every channel share it, so nothing may block it.

A blocked loop cannot report that while it lasts. The gauge therefore shows the maximum of the last 15 s, and a thread
beside the loop logs the loop's stack once it has been blocked for seconds.
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
N_BEATS = 60  # that the gauge covers; together 15 s, so that a scrape every 15 s misses none
BLOCKED_S = 5.0  # without a beat, after which the loop's stack is logged, once


async def measure_loop_lag(metrics: Metrics) -> None:
    """Runs until cancelled."""
    lags_s: deque[float] = deque(maxlen=N_BEATS)
    watchdog = _Watchdog()
    try:
        while True:
            beat_s = watchdog.beat_s = time.monotonic()
            await asyncio.sleep(EVERY_S)
            lags_s.append(max(0.0, time.monotonic() - beat_s - EVERY_S))
            metrics.event_loop_lag.set(max(lags_s))
    finally:
        watchdog.stopped.set()


class _Watchdog:
    """A thread that watches the beats of the loop in which it was created."""

    def __init__(self) -> None:
        self.beat_s = time.monotonic()  # of the latest beat
        self.stopped = threading.Event()
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        logged_s = 0.0  # the beat after which a blocked loop was last logged
        while not self.stopped.wait(BLOCKED_S / 4):
            beat_s = self.beat_s
            if time.monotonic() - beat_s > BLOCKED_S and beat_s != logged_s:
                logged_s = beat_s
                frame = sys._current_frames().get(self._loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                logger.error("the event loop is blocked for more than %.0f s by\n%s", BLOCKED_S, stack.rstrip())
