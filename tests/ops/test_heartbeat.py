"""Lag of the event loop: measured, shown for a while afterwards, and logged with its cause while it lasts."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from monitor.ops import heartbeat
from monitor.ops.metrics import Metrics


def test_the_gauge_still_shows_a_lag_after_it_is_over() -> None:
    metrics = Metrics(CollectorRegistry())

    async def block_once() -> None:
        measuring = asyncio.create_task(heartbeat.measure_loop_lag(metrics))
        asyncio.get_running_loop().call_later(0.01, time.sleep, 2 * heartbeat.EVERY_S)  # no product code may do this
        await asyncio.sleep(5 * heartbeat.EVERY_S)  # the late beat, and some in time which do not hide it
        measuring.cancel()

    asyncio.run(block_once())
    lag_s = metrics.registry.get_sample_value("copywatch_event_loop_lag_seconds")
    assert lag_s is not None
    assert lag_s >= heartbeat.EVERY_S / 2


def test_the_call_that_blocks_the_loop_is_logged_while_it_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "BLOCKED_S", 0.2)

    def logged() -> list[str]:
        return [record.message for record in caplog.records if record.name == heartbeat.logger.name]

    def a_call_that_blocks() -> None:
        deadline = time.monotonic() + 30
        while not logged() and time.monotonic() < deadline:
            time.sleep(0.01)  # no product code may do this on the loop

    async def block_once() -> None:
        measuring = asyncio.create_task(heartbeat.measure_loop_lag(Metrics(CollectorRegistry())))
        await asyncio.sleep(0)  # until it runs
        a_call_that_blocks()
        measuring.cancel()

    asyncio.run(block_once())
    (message,) = logged()
    assert "the event loop is blocked" in message
    assert "a_call_that_blocks" in message
