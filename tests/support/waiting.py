"""Waiting for what threads do, in a test that runs an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails after a minute."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)  # sinks and writers are threads, which cannot wake this loop
    raise AssertionError("the condition never held")
