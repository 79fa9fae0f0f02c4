"""Process status: figures about the process as a whole that both the metrics and `/api/v1/system` export.

Each is written by the code that knows it and only read by the exporters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate

# Four seconds go to the network's look-ahead, so nothing is faster than that; 10 s is the target.
LATENCY_BUCKETS_S = (4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 30.0, 60.0)


class LatencyHistogram:
    """Latencies counted by bucket; any thread may call."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)  # the last is for those beyond every bound
        self._sum_s = 0.0
        self._lock = threading.Lock()
        self.created_s = time.time()

    def observe(self, latency_s: float) -> None:
        place = sum(latency_s > bound_s for bound_s in self._bounds_s)
        with self._lock:
            self._counts[place] += 1
            self._sum_s += latency_s

    def cumulative(self) -> tuple[list[tuple[float, int]], int, float]:
        """(bound, latencies up to it) for each bound, then the number and the sum of all, as of one moment."""
        with self._lock:
            counts, sum_s = list(self._counts), self._sum_s
        *within, n_all = accumulate(counts)
        return list(zip(self._bounds_s, within, strict=True)), n_all, sum_s

    def bound_s(self, share: float) -> float | None:
        """The lowest bound that this share of the latencies stays within, else the highest; None without latencies."""
        buckets, n_all, _ = self.cumulative()
        if not n_all:
            return None
        return next((bound_s for bound_s, n_within in buckets if n_within >= share * n_all), self._bounds_s[-1])


class ProcessStatus:
    """One per process; a reader sees each figure as it was written last."""

    def __init__(self) -> None:
        self.backlog: Mapping[str, int] = {}  # alert events that each sink has not taken; written by the dispatcher
        self.index_checked_s: float | None = None  # monotonic; when the index was last known to be up to date
        self.evidence_bytes = 0  # written by the evidence keeper
        self.detection_latency = LatencyHistogram(LATENCY_BUCKETS_S)  # first copied second to alert

    @property
    def index_stale_s(self) -> float:
        """Time since the index was last known to be up to date; 0 before the first check."""
        return 0.0 if self.index_checked_s is None else time.monotonic() - self.index_checked_s
