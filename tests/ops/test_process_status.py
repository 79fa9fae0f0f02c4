"""Process status: the latency histogram, and how old the index is."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from monitor.ops.process_status import LATENCY_BUCKETS_S, LatencyHistogram, ProcessStatus


def test_no_latency_has_no_bound() -> None:
    assert LatencyHistogram(LATENCY_BUCKETS_S).bound_s(0.95) is None


@given(st.lists(st.floats(0, 200), min_size=1, max_size=60), st.sampled_from([0.5, 0.95, 1.0]))
def test_the_bound_is_the_lowest_that_enough_latencies_stay_within(latencies_s: list[float], share: float) -> None:
    histogram = LatencyHistogram(LATENCY_BUCKETS_S)
    for latency_s in latencies_s:
        histogram.observe(latency_s)
    buckets, n_all, sum_s = histogram.cumulative()
    assert buckets == [(bound_s, sum(one <= bound_s for one in latencies_s)) for bound_s in LATENCY_BUCKETS_S]
    assert n_all == len(latencies_s)
    assert abs(sum_s - sum(latencies_s)) < 1e-6
    enough = [bound_s for bound_s, n_within in buckets if n_within >= share * n_all]
    assert histogram.bound_s(share) == min(enough, default=LATENCY_BUCKETS_S[-1])


def test_the_index_is_as_stale_as_its_last_check_is_old() -> None:
    status = ProcessStatus()
    assert status.index_stale_s == 0.0
    status.index_checked_s = time.monotonic() - 5
    assert 5 <= status.index_stale_s < 60
