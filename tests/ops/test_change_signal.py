"""Change signals wake the tasks that watch, from any thread, and no other task."""

from __future__ import annotations

import asyncio
import threading

from monitor.ops.change_signal import ChangeSignal, watch


def test_a_change_in_any_thread_wakes_every_watcher_of_every_loop() -> None:
    one, other = ChangeSignal(), ChangeSignal()
    all_watch = threading.Barrier(4)

    async def wait_for_change(*signals: ChangeSignal) -> None:
        with watch(*signals) as changed:
            await asyncio.to_thread(all_watch.wait)
            async with asyncio.timeout(60):
                await changed.wait()

    loops = [
        threading.Thread(target=asyncio.run, args=(wait_for_change(*signals),))
        for signals in ((one,), (one, other), (other, one))
    ]
    for loop in loops:
        loop.start()
    all_watch.wait()
    one.notify()
    for loop in loops:
        loop.join()


def test_a_change_during_the_look_is_not_missed() -> None:
    async def run() -> bool:
        signal = ChangeSignal()
        with watch(signal) as changed:
            signal.notify()
            await changed.wait()
            changed.clear()
            signal.notify()  # while the watcher looks
            await changed.wait()
            changed.clear()
        signal.notify()  # nothing watches any more
        await asyncio.sleep(0)
        return changed.is_set()

    assert not asyncio.run(run())


def test_a_loop_that_was_closed_does_not_stop_the_others() -> None:
    signal = ChangeSignal()
    closed = asyncio.new_event_loop()
    signal._watchers.append((closed, asyncio.Event()))
    closed.close()

    async def run() -> None:
        with watch(signal) as changed:
            signal.notify()
            async with asyncio.timeout(60):
                await changed.wait()

    asyncio.run(run())
