"""Keeps the index of a running monitor up to date: builds new generations in the background, then swaps them in.

Nothing here runs in the batcher's thread, and heavy work runs at a low priority, so that no frame waits for it.
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

REFRESH_S = 1.0  # between two checks of the catalogue for changes
BUSY_S = 30.0  # until a merge is retried that failed or that another process is doing
LOW_PRIORITY = 10  # a nice value


def report_index(index: ReferenceIndex, metrics: Metrics) -> None:
    """Logs damaged references and exports the size of the index."""
    for id, what in index.damaged.items():
        logger.error("reference %s is not searched: %s; run `copywatch refs verify`", id, what)
    metrics.references.set(len(index.references))
    metrics.damaged_references.set(len(index.damaged))
    metrics.reference_seconds.set(sum(reference.n_seconds for reference in index.references))
    metrics.index_generation.set(index.generation)


async def watch_catalog(
    keeper: IndexKeeper, library: ActiveLibrary, metrics: Metrics, problems: dict[str, str], worker: Worker
) -> None:
    """Swaps in a new index soon after the catalogue changed; matching uses the old one until then. Never returns."""
    metrics.process.index_checked_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        merging: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(REFRESH_S)
            checked_at = time.monotonic()
            try:
                refreshing = asyncio.ensure_future(asyncio.to_thread(keeper.refresh))
                worker.track(refreshing)
                index = await refreshing
                _swap(library, index, metrics)
                if keeper.is_complete:
                    metrics.process.index_checked_s = checked_at
                problems.pop("index", None)
            except Exception as error:
                if problems.get("index") != str(error):
                    logger.error("the index is stale: %s", error, exc_info=not isinstance(error, CatalogError))
                problems["index"] = str(error)
            # wants_compaction last: it may block while a merge runs
            if (merging is None or merging.done()) and keeper.wants_compaction:
                merging = tasks.create_task(_merge(keeper, library, metrics))


async def _merge(keeper: IndexKeeper, library: ActiveLibrary, metrics: Metrics) -> None:
    """Merges added references into the large shard, at a low priority; the old shards are searched until then."""
    try:
        index = await _at_low_priority(keeper.compact)
    except Exception as error:
        logger.error("merging the index failed: %s", error, exc_info=not isinstance(error, CatalogError))
        index = None
    if index is None:
        await asyncio.sleep(BUSY_S)
    else:
        _swap(library, index, metrics)


async def _at_low_priority(work: Callable[[], T]) -> T:
    """The result of `work`, run at a low priority in a thread that does not block the exit of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)  # on Linux of this thread only
        result, error = None, None
        try:
            result = work()
        except Exception as failed:
            error = failed
        with suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="index", daemon=True).start()
    return await done


def _swap(library: ActiveLibrary, index: ReferenceIndex, metrics: Metrics) -> None:
    if index is not library.index:
        library.replace(index)
        report_index(index, metrics)
        logger.info("index refreshed: %d references", len(index.references))
