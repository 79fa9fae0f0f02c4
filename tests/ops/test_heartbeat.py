"""The event loop's lag is seen, also after it is over."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from monitor.ops import heartbeat
from monitor.ops.metrics import Metrics


def test_what_held_the_loop_up_is_still_told_when_it_is_over() -> None:
    metrics = Metrics(CollectorRegistry())

    async def held_up() -> None:
        beating = asyncio.create_task(heartbeat.beat(metrics))
        asyncio.get_running_loop().call_later(0.01, time.sleep, 2 * heartbeat.EVERY_S)  # as nothing may do there
        await asyncio.sleep(5 * heartbeat.EVERY_S)  # the late beat, and some in time which do not hide it
        beating.cancel()

    asyncio.run(held_up())
    lag_s = metrics.registry.get_sample_value("copywatch_event_loop_lag_seconds")
    assert lag_s is not None
    assert lag_s >= heartbeat.EVERY_S / 2


def test_what_holds_the_loop_up_is_logged_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "STUCK_S", 0.2)

    def told() -> list[str]:
        return [record.message for record in caplog.records if record.name == heartbeat.logger.name]

    def a_call_that_blocks() -> None:
        deadline = time.monotonic() + 30
        while not told() and time.monotonic() < deadline:
            time.sleep(0.01)  # as nothing may do on the loop

    async def held_up() -> None:
        beating = asyncio.create_task(heartbeat.beat(Metrics(CollectorRegistry())))
        await asyncio.sleep(0)  # it has begun to beat
        a_call_that_blocks()
        beating.cancel()

    asyncio.run(held_up())
    (words,) = told()
    assert "held up" in words
    assert "a_call_that_blocks" in words
