"""The active library: references change while channels are matched, and their alerts say so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, STARTED, Alert
from monitor.config.settings import Settings
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor
from reference_db.search.feature_rows import MemoryRows
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import ReferenceFeatures, ReferenceId
from tests.support.planted_channels import FILMS, Part, alerts_of, film_rows, library, plant, trained_models

#   0 noise 10 swift, with other beside it 50 noise 70
STREAM = plant(
    [Part(10, noise=1.0), Part(40, "swift", 20, noise=0.2, beside="other", beside_from_s=5), Part(20, noise=1)]
)


def index_of(*names: str) -> ReferenceIndex:
    pairs = [(reference, features_of(reference.id)) for reference in library(tuple(names)).index.references]
    return ReferenceIndex.from_features(pairs, generation=7)


def features_of(name: str) -> ReferenceFeatures:
    rows = film_rows(name)
    return ReferenceFeatures(rows.astype(np.float16), np.ones(len(rows), np.bool_))


def new_monitor(active: ActiveLibrary) -> ChannelMonitor:
    return ChannelMonitor(active, trained_models(), Settings(), Metrics(CollectorRegistry()))


def test_a_removed_reference_is_still_known_by_its_id() -> None:
    active = ActiveLibrary(index_of("swift", "other"))
    active.replace(index_of("other"))
    assert [reference.id for reference in active.index.references] == ["other"]
    assert active.reference(ReferenceId("swift")).title == "Swift"


def test_removing_a_reference_on_air_ends_its_alert_with_a_reason_and_no_other() -> None:
    active = ActiveLibrary(index_of(*FILMS))
    monitor = new_monitor(active)
    before = alerts_of(monitor, STREAM, 0, 30)
    assert {alert.reference for alert in before if alert.type == STARTED} == {"swift", "other"}
    active.replace(index_of("other", "slow", "long"))
    (ended, *more) = alerts_of(monitor, STREAM, 30, 31)
    assert (ended.type, ended.reference, ended.reason) == (ENDED, "swift", "reference removed")
    assert ended.id in {alert.id for alert in before if alert.reference == "swift"}
    assert ended.channel_end <= 31
    after = more + alerts_of(monitor, STREAM, 31) + monitor.finish()
    assert "swift" not in {alert.reference for alert in after}
    (last,) = [alert for alert in after if alert.type == ENDED]
    assert (last.reference, last.reason) == ("other", None)
    assert last.channel_end == pytest.approx(50, abs=3)


@pytest.mark.parametrize(
    ("names", "damaged", "reason"),
    [
        (("other",), {ReferenceId("swift"): "its feature file has changed on disk"}, "reference quarantined"),
        (("other", "swift"), {}, "reference replaced"),
    ],
)
def test_an_alert_ends_with_the_reason_its_reference_is_no_longer_searched(
    names: tuple[str, ...], damaged: dict[ReferenceId, str], reason: str
) -> None:
    active = ActiveLibrary(index_of(*FILMS))
    monitor = new_monitor(active)
    alerts_of(monitor, STREAM, 0, 30)
    pairs = [
        (replace(one, features_id="f" * 64) if one.id == "swift" else one, features_of(one.id))
        for one in index_of(*names).references
    ]
    index = ReferenceIndex.from_features(pairs)
    active.replace(ReferenceIndex(index.references, 8, index.shards, MemoryRows(pairs), damaged))
    ended = alerts_of(monitor, STREAM, 30, 31)[0]
    assert (ended.type, ended.reference, ended.reason) == (ENDED, "swift", reason)


def test_a_snapshot_continues_on_a_machine_that_registered_the_same_videos_itself() -> None:
    """Their files and rows differ in times and titles, their features do not."""
    here, there = ActiveLibrary(index_of(*FILMS)), ActiveLibrary(_registered_again(index_of(*FILMS)))
    unbroken, first, second = new_monitor(here), new_monitor(here), new_monitor(there)
    expected = alerts_of(unbroken, STREAM, 0) + unbroken.finish()
    alerts = alerts_of(first, STREAM, 0, 30)
    restored = second.restore(first.snapshot({}))
    assert not restored.alerts
    alerts += alerts_of(second, STREAM, 30) + second.finish()
    assert [_without_title(alert) for alert in alerts] == [_without_title(alert) for alert in expected]


def test_a_snapshot_of_an_earlier_version_names_features_by_their_file() -> None:
    pairs = [(replace(one, features_id="a" * 64), features_of(one.id)) for one in index_of(*FILMS).references]
    earlier = new_monitor(ActiveLibrary(ReferenceIndex.from_features(pairs)))
    alerts_of(earlier, STREAM, 0, 30)
    pairs = [(replace(one, features_sha256="a" * 64), features_of(one.id)) for one in index_of(*FILMS).references]
    now = new_monitor(ActiveLibrary(ReferenceIndex.from_features(pairs)))
    assert not now.restore(earlier.snapshot({})).alerts
    assert now.open_alerts == earlier.open_alerts


def _registered_again(index: ReferenceIndex) -> ReferenceIndex:
    pairs = [
        (replace(one, title=f"{one.title} again", features_sha256="f" * 64, imported=True), features_of(one.id))
        for one in index.references
    ]
    return ReferenceIndex.from_features(pairs, generation=3)


def _without_title(alert: Alert) -> dict[str, object]:
    return alert.as_dict() | {"title": None}


def test_a_reference_added_on_air_alerts_and_a_merge_changes_nothing() -> None:
    active = ActiveLibrary(index_of("other", "slow", "long"))
    monitor = new_monitor(active)
    assert "swift" not in {alert.reference for alert in alerts_of(monitor, STREAM, 0, 25)}
    active.replace(index_of(*FILMS))
    rest = alerts_of(monitor, STREAM, 25, 40)
    active.replace(index_of(*FILMS))  # another generation of the same references
    rest += alerts_of(monitor, STREAM, 40) + monitor.finish()
    (ended,) = [alert for alert in rest if alert.type == ENDED and alert.reference == "swift"]
    assert ended.reason is None
    assert ended.channel_start == pytest.approx(10, abs=3)
