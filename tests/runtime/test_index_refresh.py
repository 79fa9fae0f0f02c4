"""Index refresh: a running process follows the catalogue and merges shards in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from monitor.ops.health import Worker
from monitor.ops.metrics import Metrics
from monitor.runtime import index_refresh
from monitor.runtime.active_library import ActiveLibrary
from reference_db.search import index as index_module
from reference_db.search.index import IndexKeeper
from reference_db.store.catalog import Catalog, ReferenceFeatures, ReferenceId
from tests.support.indexed_films import add, found, remove
from tests.support.planted_channels import film_rows
from tests.support.sample_references import some_reference


@pytest.mark.parametrize("exact_rows", [100, 10**6])
def test_a_process_follows_the_catalogue_and_merges_in_the_background(
    tmp_path: Path, exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_refresh, "REFRESH_S", 0.05)
    monkeypatch.setattr(index_module, "SMALL_ROWS", 100)
    asyncio.run(_change_the_catalogue(tmp_path, exact_rows))


async def _change_the_catalogue(folder: Path, exact_rows: int) -> None:
    add(folder, 0, 1, 2)
    keeper, metrics = IndexKeeper(folder, "enc-1", exact_rows=exact_rows), Metrics(CollectorRegistry())
    problems: dict[str, str] = {}
    active = ActiveLibrary(keeper.refresh())
    watching = asyncio.create_task(index_refresh.watch_catalog(keeper, active, metrics, problems, Worker()))

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert not watching.done()
            await asyncio.sleep(0.02)  # lets the loop run; there is no event to wait for

    def has(*numbers: int) -> bool:
        """Exactly these films, in one shard: added ones have been merged."""
        names = {reference.id for reference in active.index.references}
        return names == {f"film-{n}" for n in numbers} and len(active.index.shards) == 1

    async with asyncio.timeout(120):
        await asyncio.to_thread(add, folder, 3, 4)
        await until(lambda: has(*range(5)))
        assert all(row[0][0] == "film-4" for row in found(active.index, 4))
        await asyncio.to_thread(remove, folder, 0)
        await until(lambda: has(*range(1, 5)))
        assert metrics.registry.get_sample_value("copywatch_references") == 4
        with Catalog.open(folder, write=True) as catalog:
            foreign = some_reference(ReferenceId("foreign"), 10)
            rows = film_rows("other")[:10].astype(np.float16)
            catalog.add(replace(foreign, encoder_id="enc-2"), ReferenceFeatures(rows, np.ones(10, np.bool_)))
        await until(lambda: "index" in problems)
        assert "foreign" in problems["index"]
        stale_s = _stale_s(metrics)
        await until(lambda: _stale_s(metrics) > max(1.0, stale_s))  # the index is not refreshed, and the gauge says so
        with Catalog.open(folder, write=True) as catalog:
            catalog.remove(ReferenceId("foreign"))
        await until(lambda: "index" not in problems and _stale_s(metrics) < 1.0)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


def _stale_s(metrics: Metrics) -> float:
    value = metrics.registry.get_sample_value("copywatch_index_stale_seconds")
    assert value is not None
    return value
