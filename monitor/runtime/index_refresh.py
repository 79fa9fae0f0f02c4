"""A library that is kept fresh while it is in use: new generations of the index are made aside, then swapped in.

Nothing here runs in the compute thread, and what is heavy runs at a low priority, so that no second waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

from monitor.ops.health import Worker
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from reference_db.errors import CatalogError
from reference_db.search.index import IndexKeeper, ReferenceIndex

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFRESH_S = 1.0  # how often the catalogue is asked whether it changed
BUSY_S = 30.0  # until merging is tried again when it did not work, or another process is at it
LOW_PRIORITY = 10  # a nice value


def report_index(index: ReferenceIndex, metrics: Metrics) -> None:
    for id, what in index.damaged.items():
        logger.error("reference %s is not searched: %s; run `copywatch refs verify`", id, what)
    metrics.references.set(len(index.references))
    metrics.damaged_references.set(len(index.damaged))
    metrics.reference_seconds.set(sum(reference.n_seconds for reference in index.references))
    metrics.index_generation.set(index.generation)


async def follow(
    keeper: IndexKeeper, library: ActiveLibrary, metrics: Metrics, problems: dict[str, str], worker: Worker
) -> None:
    """Swaps in a new index soon after the catalogue changed; matching goes on with the old one meanwhile."""
    metrics.process.index_checked_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        merging: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(REFRESH_S)
            asked_at = time.monotonic()
            try:
                asking = asyncio.ensure_future(asyncio.to_thread(keeper.refresh))
                worker.track(asking)
                index = await asking
                _swap(library, index, metrics)
                if keeper.is_complete:
                    metrics.process.index_checked_s = asked_at
                problems.pop("index", None)
            except Exception as error:
                if problems.get("index") != str(error):
                    logger.error("the index is stale: %s", error, exc_info=not isinstance(error, CatalogError))
                problems["index"] = str(error)
            # asked second: while a merge runs, the keeper may keep who asks waiting
            if (merging is None or merging.done()) and keeper.wants_compaction:
                merging = tasks.create_task(_merge(keeper, library, metrics))


async def _merge(keeper: IndexKeeper, library: ActiveLibrary, metrics: Metrics) -> None:
    """Merges what was added into the large part, at a low priority; what was searched before is searched till then."""
    try:
        index = await _aside(keeper.compact)
    except Exception as error:
        logger.error("the index was not merged: %s", error, exc_info=not isinstance(error, CatalogError))
        index = None
    if index is None:
        await asyncio.sleep(BUSY_S)
    else:
        _swap(library, index, metrics)


async def _aside(work: Callable[[], T]) -> T:
    """The result of `work`, done at a low priority in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)  # Linux: of this thread alone
        result, error = None, None
        try:
            result = work()
        except Exception as broken:
            error = broken
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="index", daemon=True).start()
    return await done


def _swap(library: ActiveLibrary, index: ReferenceIndex, metrics: Metrics) -> None:
    if index is not library.index:
        library.replace(index)
        report_index(index, metrics)
        logger.info("index refreshed: %d references", len(index.references))
