"""Back-off: the delays it gives, and that a stop ends a wait at once."""

from __future__ import annotations

import asyncio
import time

from monitor.ops.backoff import Backoff


def test_delays_double_up_to_the_limit_and_start_again_after_a_reset() -> None:
    backoff = Backoff(1.0, 30.0)
    assert [backoff.take_s() for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    backoff.reset()
    assert [backoff.take_s() for _ in range(2)] == [1.0, 2.0]


def test_only_the_first_failure_after_a_success_is_the_first() -> None:
    backoff = Backoff(2.0, 2.0)
    assert backoff.is_first
    backoff.take_s()
    assert not backoff.is_first
    backoff.reset()
    assert backoff.is_first


def test_a_raised_delay_is_the_one_that_doubles() -> None:
    backoff = Backoff(1.0, 30.0)
    backoff.raise_to(5.0)
    assert [backoff.take_s() for _ in range(2)] == [5.0, 10.0]
    backoff.raise_to(3.0)
    assert backoff.next_s == 20.0


def test_jitter_stays_within_its_share_and_does_not_accumulate() -> None:
    backoff = Backoff(10.0, 10.0, jitter=0.2)
    delays = [backoff.take_s() for _ in range(500)]
    assert 8.0 <= min(delays) < 9.0
    assert 11.0 < max(delays) <= 12.0


def test_a_stop_ends_the_wait_at_once() -> None:
    async def run() -> float:
        stop, backoff = asyncio.Event(), Backoff(30.0)
        asyncio.get_running_loop().call_later(0.05, stop.set)
        began_s = time.monotonic()
        await backoff.wait(stop)
        await backoff.wait(stop)  # already set: no wait at all
        return time.monotonic() - began_s

    assert asyncio.run(run()) < 10.0


def test_without_a_stop_it_waits_for_the_whole_delay() -> None:
    began_s = time.monotonic()
    asyncio.run(Backoff(0.1).wait())
    assert time.monotonic() - began_s >= 0.1
