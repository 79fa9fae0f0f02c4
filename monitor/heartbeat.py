"""How late the event loop is: HTTP, brokers and every channel share it, so nothing may hold it up.

A loop that is held up cannot say so while it lasts; the gauge therefore keeps the worst of the last seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from monitor.metrics import Metrics

EVERY_S = 0.25
KEPT = 60  # beats; together 15 s, so that a scrape every 15 s misses none


async def beat(metrics: Metrics) -> None:
    """Measures until cancelled."""
    late_s: deque[float] = deque(maxlen=KEPT)
    while True:
        due_s = time.monotonic() + EVERY_S
        await asyncio.sleep(EVERY_S)
        late_s.append(max(0.0, time.monotonic() - due_s))
        metrics.event_loop_lag.set(max(late_s))
