"""A library that changes while channels are watched."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, STARTED
from monitor.config.settings import Settings
from monitor.ops.health import Worker
from monitor.ops.metrics import Metrics
from monitor.runtime import index_refresh
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor
from reference_db.search import index as index_module
from reference_db.search.feature_rows import MemoryRows
from reference_db.search.index import IndexKeeper, ReferenceIndex
from reference_db.store.catalog import Catalog, ReferenceFeatures, ReferenceId
from tests.support.indexed_films import add, found, remove
from tests.support.planted_channels import FILMS, Part, alerts_of, film_rows, library, plant, trained_models
from tests.support.sample_references import some_reference

#   0 noise 10 swift, with other beside it 50 noise 70
AIR = plant([Part(10, noise=1.0), Part(40, "swift", 20, noise=0.2, beside="other", beside_from_s=5), Part(20, noise=1)])


def index_of(*names: str) -> ReferenceIndex:
    pairs = [(reference, rows_of(reference.id)) for reference in library(tuple(names)).index.references]
    return ReferenceIndex.from_features(pairs, generation=7)


def rows_of(name: str) -> ReferenceFeatures:
    rows = film_rows(name)
    return ReferenceFeatures(rows.astype(np.float16), np.ones(len(rows), np.bool_))


def test_removing_a_reference_that_is_on_air_ends_its_alert_with_a_reason_and_no_other() -> None:
    lent = ActiveLibrary(index_of(*FILMS))
    watch = ChannelMonitor(lent, trained_models(), Settings(), Metrics(CollectorRegistry()))
    before = alerts_of(watch, AIR, 0, 30)
    assert {alert.reference for alert in before if alert.type == STARTED} == {"swift", "other"}
    lent.replace(index_of("other", "slow", "long"))
    (ended, *more) = alerts_of(watch, AIR, 30, 31)
    assert (ended.type, ended.reference, ended.reason) == (ENDED, "swift", "reference removed")
    assert ended.id in {alert.id for alert in before if alert.reference == "swift"}
    assert ended.channel_end <= 31
    after = more + alerts_of(watch, AIR, 31) + watch.finish()
    assert "swift" not in {alert.reference for alert in after}
    (last,) = [alert for alert in after if alert.type == ENDED]
    assert (last.reference, last.reason) == ("other", None)
    assert last.channel_end == pytest.approx(50, abs=3)


@pytest.mark.parametrize(("names", "damaged", "reason"), [
    (("other",), {ReferenceId("swift"): "its feature file has changed on disk"}, "reference quarantined"),
    (("other", "swift"), {}, "reference replaced"),
])  # fmt: skip
def test_an_alert_tells_what_became_of_its_reference(
    names: tuple[str, ...], damaged: dict[ReferenceId, str], reason: str
) -> None:
    lent = ActiveLibrary(index_of(*FILMS))
    watch = ChannelMonitor(lent, trained_models(), Settings(), Metrics(CollectorRegistry()))
    alerts_of(watch, AIR, 0, 30)
    pairs = [(replace(one, features_sha256="f" * 64) if one.id == "swift" else one, rows_of(one.id)) for one in
             index_of(*names).references]  # fmt: skip
    held = ReferenceIndex.from_features(pairs)
    lent.replace(ReferenceIndex(held.references, 8, held.shards, MemoryRows(pairs), damaged))
    ended = alerts_of(watch, AIR, 30, 31)[0]
    assert (ended.type, ended.reference, ended.reason) == (ENDED, "swift", reason)


def test_a_reference_added_while_it_is_on_air_is_told_and_a_merge_changes_nothing() -> None:
    lent = ActiveLibrary(index_of("other", "slow", "long"))
    watch = ChannelMonitor(lent, trained_models(), Settings(), Metrics(CollectorRegistry()))
    assert "swift" not in {alert.reference for alert in alerts_of(watch, AIR, 0, 25)}
    lent.replace(index_of(*FILMS))
    rest = alerts_of(watch, AIR, 25, 40)
    lent.replace(index_of(*FILMS))  # another generation of the same references
    rest += alerts_of(watch, AIR, 40) + watch.finish()
    (ended,) = [alert for alert in rest if alert.type == ENDED and alert.reference == "swift"]
    assert ended.reason is None
    assert ended.channel_start == pytest.approx(10, abs=3)


@pytest.mark.parametrize("exact_rows", [100, 10**6])
def test_a_process_takes_up_what_comes_and_goes_and_merges_it_aside(
    tmp_path: Path, exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_refresh, "REFRESH_S", 0.05)
    monkeypatch.setattr(index_module, "SMALL_ROWS", 100)
    asyncio.run(_live(tmp_path, exact_rows))


async def _live(folder: Path, exact_rows: int) -> None:
    add(folder, 0, 1, 2)
    keeper, metrics = IndexKeeper(folder, "enc-1", exact_rows=exact_rows), Metrics(CollectorRegistry())
    problems: dict[str, str] = {}
    lent = ActiveLibrary(keeper.refresh())
    following = asyncio.create_task(index_refresh.watch_catalog(keeper, lent, metrics, problems, Worker()))

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert not following.done()
            await asyncio.sleep(0.02)  # lets the loop work; what is waited for has no event

    def has(*numbers: int) -> bool:
        """These films, in one part: what was added has been merged."""
        names = {reference.id for reference in lent.index.references}
        return names == {f"film-{n}" for n in numbers} and len(lent.index.shards) == 1

    async with asyncio.timeout(120):
        await asyncio.to_thread(add, folder, 3, 4)
        await until(lambda: has(*range(5)))
        assert all(row[0][0] == "film-4" for row in found(lent.index, 4))
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
        await until(lambda: _stale_s(metrics) > max(1.0, stale_s))  # it cannot be taken up, and the gauge says so
        with Catalog.open(folder, write=True) as catalog:
            catalog.remove(ReferenceId("foreign"))
        await until(lambda: "index" not in problems and _stale_s(metrics) < 1.0)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


def _stale_s(metrics: Metrics) -> float:
    value = metrics.registry.get_sample_value("copywatch_index_stale_seconds")
    assert value is not None
    return value
