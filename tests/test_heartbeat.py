"""The event loop's lag is seen, also after it is over."""

import asyncio
import time

from prometheus_client import CollectorRegistry

from monitor import heartbeat
from monitor.metrics import Metrics


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
