"""What evidence does when things go wrong or on for long; planted features, so that hours take seconds."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, STARTED, Alert
from monitor.config.settings import EvidenceSettings, Settings
from monitor.evidence import keeper as keeper_module
from monitor.evidence.keeper import EvidenceKeeper, Seen
from monitor.evidence.pictures import ALBUM, QUALITY, RING_S, Album, Ring
from monitor.evidence.store import EvidenceStore
from monitor.ingest.sources import Sample
from monitor.ops.metrics import Metrics
from monitor.rights.rules import Rules
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor
from reference_db.media.frames import Frame
from reference_db.media.jpeg import encode_jpeg
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, Reference, ReferenceFeatures, ReferenceId
from tests.support.planted_channels import BEGAN, Part, PlantedStream, film_rows, outcomes_of, plant, trained_models

#   0 noise 10 swift from its second 20 on 60 noise 80
PARTS = [Part(10, noise=1.0), Part(50, "swift", 20, noise=0.2), Part(20, noise=1.0)]


def card(second: int) -> NDArray[np.uint8]:
    """A picture that says which second it shows, by its grey."""
    return np.full((18, 32, 3), 40 + second * 2 % 200, np.uint8)


def shown_second(content: bytes | None) -> int:
    assert content is not None
    return round((float(np.asarray(Image.open(io.BytesIO(content))).mean()) - 40) / 2)


def with_pictures(air: PlantedStream) -> PlantedStream:
    samples: list[Sample] = [
        replace(sample, frame=Frame(sample.second, float(sample.second), card(sample.second))) for sample in air.samples
    ]
    return PlantedStream(samples, air.rows)


AIR = with_pictures(plant(PARTS))


@dataclass
class Room:
    """A library with one film on disk, and channels that keep evidence."""

    folder: Path
    evidence: EvidenceSettings = field(default_factory=EvidenceSettings)
    rules: Rules = field(default_factory=Rules)
    metrics: Metrics = field(default_factory=lambda: Metrics(CollectorRegistry()))
    told: list[Alert] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = EvidenceStore(self.folder)
        self.keeper, self.watch = self.begin()

    def begin(self) -> tuple[EvidenceKeeper, ChannelMonitor]:
        """A new life."""
        settings = Settings(data_dir=self.folder, evidence=self.evidence)
        with Catalog.open(self.folder) as catalog:
            library = ActiveLibrary(ReferenceIndex.build(catalog, "planted"))
        keeper = EvidenceKeeper(settings, trained_models().net, self.metrics, lambda: self.rules)
        return keeper, ChannelMonitor(library, trained_models(), settings, self.metrics, keeper)

    def air(self, air: PlantedStream, begin: int = 0, end: int | None = None) -> None:
        for outcome in outcomes_of(self.watch, air.samples[begin:end], air.rows[begin:end]):
            self.told += outcome.alerts
        self.keeper.flush()

    def finish(self) -> Alert:
        self.told += self.watch.finish()
        self.keeper.flush()
        return self.told[-1]

    def report(self, alert: Alert) -> dict[str, Any]:
        report = self.store.stored(alert.id)
        assert report is not None
        return report

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"copywatch_evidence_{name}", labels) or 0.0


def register(folder: Path, *, thumbnails: bool = True, imported: bool = False) -> None:
    rows = film_rows("swift")
    reference = Reference(
        ReferenceId("swift"), "Swift", "", {}, "0" * 64, len(rows), 0, "planted", "", BEGAN, imported=imported
    )
    features = ReferenceFeatures(rows.astype(np.float16), np.ones(len(rows), np.bool_))
    pictures = [encode_jpeg(card(second), quality=QUALITY) for second in range(len(rows))] if thumbnails else None
    with Catalog.open(folder, write=True) as catalog:
        catalog.add(reference, features, pictures)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    register(tmp_path)
    return Room(tmp_path)


def test_an_open_alert_has_evidence_that_says_it_is_open_and_the_pairs_belong_together(room: Room) -> None:
    room.air(AIR, 0, 40)
    started = room.told[0]
    report = room.report(started)
    assert (report["complete"], report["note"]) == (False, "the alert is still open")
    assert room.value("failures_total", reason="failed") == 0
    room.air(AIR, 40)
    ended = room.finish()
    report = room.report(ended)
    assert (ended.type, report["complete"], report["note"]) == (ENDED, True, None)
    for frame in report["frames"]:
        assert shown_second(room.store.file(ended.id, frame["air"])) == frame["stream_s"]
        assert shown_second(room.store.file(ended.id, frame["reference"])) == frame["ref_s"]
        assert frame["ref_s"] == pytest.approx(frame["stream_s"] + 10, abs=1)
    start, middle, end = (frame["stream_s"] for frame in report["frames"])
    assert (start, end) == (ended.channel_start + 1, ended.channel_end - 2)
    assert middle == pytest.approx((start + end) / 2, abs=1)


@pytest.mark.parametrize(
    ("thumbnails", "imported", "words"), [(False, True, "features only"), (False, False, "without thumbnails")]
)
def test_a_reference_without_pictures_is_said_to_have_none(
    thumbnails: bool, imported: bool, words: str, tmp_path: Path
) -> None:
    register(tmp_path, thumbnails=thumbnails, imported=imported)
    room = Room(tmp_path)
    room.air(AIR)
    report = room.report(room.finish())
    assert report["complete"] is False
    assert words in report["note"]
    assert [(frame["air"], frame["reference"]) for frame in report["frames"]] == [
        (f"air-{at}.jpg", None) for at in ("start", "middle", "end")
    ]
    assert report["tiles"]


def test_a_channel_of_features_has_no_pictures_and_says_so(room: Room) -> None:
    blind = Frame(0, 0.0, np.zeros((1, 1, 3), np.uint8))
    room.air(PlantedStream([replace(sample, frame=blind) for sample in AIR.samples], AIR.rows))
    report = room.report(room.finish())
    assert "no picture of the channel was kept" in report["note"]
    assert {frame["air"] for frame in report["frames"]} == {None}
    assert report["tiles"]


@pytest.mark.parametrize("cut", [25, 45])
def test_after_a_restart_it_goes_on_from_what_is_on_disk(cut: int, room: Room) -> None:
    room.air(AIR, 0, cut)
    kept = room.watch.snapshot({})
    room.keeper.close()
    room.keeper, room.watch = room.begin()
    room.watch.restore(kept)
    room.air(AIR, cut)
    ended = room.finish()
    report = room.report(ended)
    start, middle, end = report["frames"]
    assert (start["stream_s"], end["stream_s"]) == (ended.channel_start + 1, ended.channel_end - 2)
    assert start["note"] is None
    assert abs(middle["stream_s"] - 34) <= 5 or "s away" in middle["note"]
    assert report["complete"] is (report["note"] is None)
    assert report["tiles"][0]["live_s"] == ended.channel_start - 6


def test_a_disk_that_fails_costs_evidence_and_never_an_alert(
    room: Room, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = tmp_path_factory.mktemp("whole")
    register(whole)
    other = Room(whole)
    other.air(AIR)
    other.finish()
    (room.folder / "evidence").write_text("not a folder")
    room.air(AIR, 0, 50)
    assert room.value("failures_total", reason="disk") >= 2
    (room.folder / "evidence").unlink()
    room.air(AIR, 50)
    ended = room.finish()
    assert room.told == other.told
    assert [frame["at"] for frame in room.report(ended)["frames"]] == ["start", "middle", "end"]


def test_a_thread_that_is_behind_lets_pictures_go_and_holds_nobody_up(room: Room) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        busy.set()
        go_on.wait()

    room.keeper._hand_over(hang)
    assert busy.wait(60)
    epoch = AIR.samples[0].epoch
    for second in range(keeper_module.MAX_WAITING + 50):
        room.keeper.picture(epoch, second, card(second))
    assert room.value("failures_total", reason="overload") == 50
    assert len(room.keeper._waiting) == keeper_module.MAX_WAITING
    go_on.set()
    room.keeper.flush()
    assert len(room.keeper._channels["ch5"].ring.pictures) == RING_S


def test_an_alert_that_lasts_for_hours_keeps_as_little_as_a_short_one(room: Room) -> None:
    rows = film_rows("swift")
    spans = {"channel_start": 0.0, "channel_end": 10.0, "reference_start": 0.0, "reference_end": 10.0}
    first = replace(_some_alert(room), id="f" * 24, **spans)  # type: ignore[arg-type]
    epoch = AIR.samples[0].epoch
    hours = 3
    for second in range(hours * 3600):
        room.keeper.picture(epoch, second, card(second))
        if second % 600 == 30:
            told = replace(first, type=STARTED if second == 30 else "alert.updated", channel_end=float(second))
            room.keeper.told(Seen(told, [(0, 0), (second, len(rows) - 1)]))
        if second % 200 == 0:
            room.keeper.flush()
    room.keeper.flush()
    channel = room.keeper._channels["ch5"]
    assert len(channel.ring.pictures) <= RING_S
    assert len(channel.albums[first.id].pictures) <= ALBUM
    assert len(channel.albums[first.id].first) == 1
    ended = replace(first, type=ENDED, channel_end=float(hours * 3600))
    room.keeper.told(Seen(ended, [(0, 0), (hours * 3600 - 1, len(rows) - 1)]))
    room.keeper.flush()
    start, middle, end = room.report(ended)["frames"]
    assert start["stream_s"] <= 6
    assert middle["stream_s"] == pytest.approx(hours * 1800, abs=hours * 3600 / ALBUM)
    assert middle["note"] is None or "s away" in middle["note"]
    assert end["stream_s"] == hours * 3600 - 2
    assert room.keeper._channels["ch5"].albums == {}


def _some_alert(room: Room) -> Alert:
    room.air(AIR)
    return room.finish()


def test_what_it_takes_stays_within_its_quota_and_confirmed_evidence_stays_longest(tmp_path: Path) -> None:
    register(tmp_path)
    room = Room(tmp_path, EvidenceSettings(quota_bytes=10**9))
    ended = _some_alert(room)
    each = room.store.usage_bytes()
    room.keeper.close()
    room.rules = Rules([], {}, {ended.id: "confirmed"})
    room.evidence = EvidenceSettings(quota_bytes=int(2.5 * each))
    room.keeper, room.watch = room.begin()
    others = [f"{n:024x}" for n in range(4)]
    for n, alert_id in enumerate(others):
        room.keeper.picture(AIR.samples[0].epoch, n, card(n))
        room.keeper.told(Seen(replace(ended, id=alert_id), [(10, 20), (59, 69)]))
        room.keeper.flush()
        assert room.store.usage_bytes() <= 2.5 * each
    assert room.store.has(ended.id)
    assert room.store.has(others[-1])
    assert room.value("bytes") == room.store.usage_bytes()
    gone = [alert_id for alert_id in others if not room.store.has(alert_id)]
    assert room.value("evicted_total", reason="quota") == len(gone)
    assert gone == others[: len(gone)]


def test_switched_off_nothing_is_kept_and_alerts_name_no_evidence(tmp_path: Path) -> None:
    register(tmp_path)
    settings = Settings(data_dir=tmp_path, evidence=EvidenceSettings(enabled=False))
    assert keeper_module.keeper_of(settings, trained_models().net, Metrics(CollectorRegistry()), Rules) is None
    with Catalog.open(tmp_path) as catalog:
        library = ActiveLibrary(ReferenceIndex.build(catalog, "planted"))
    watch = ChannelMonitor(library, trained_models(), settings, Metrics(CollectorRegistry()))
    told = [alert for outcome in outcomes_of(watch, AIR.samples, AIR.rows) for alert in outcome.alerts] + watch.finish()
    assert {alert.evidence for alert in told} == {None}
    assert not (tmp_path / "evidence").exists()


def test_rings_and_albums_are_bounded_and_a_picture_is_compressed_once() -> None:
    ring, album = Ring(), Album()
    still = card(3)
    shown = ring.push(0, still)
    assert ring.push(1, still) is shown
    assert shown.jpeg() is shown.jpeg()
    assert shown.jpeg() == encode_jpeg(still, quality=QUALITY)
    for second in range(1000):
        album.push(second, shown)
        ring.push(second, still)
    assert len(ring.pictures) == RING_S
    seconds = sorted(album.pictures)
    assert len(seconds) <= ALBUM
    assert {later - earlier for earlier, later in pairwise(seconds)} == {64}
