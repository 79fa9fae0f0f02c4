"""Evidence when something fails or an alert lasts for hours; planted features, so that hours take seconds."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass, field, replace
from datetime import datetime
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
from monitor.evidence.keeper import AlertMaterial, EvidenceKeeper
from monitor.evidence.pictures import MAX_PICTURES, QUALITY, RECENT_S
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
from tests.support.planted_channels import (
    BEGAN,
    Part,
    PlantedStream,
    alerts_of,
    film_rows,
    outcomes_of,
    plant,
    trained_models,
)

#   0 noise 10 swift from its second 20 on 60 noise 80
PARTS = [Part(10, noise=1.0), Part(50, "swift", 20, noise=0.2), Part(20, noise=1.0)]


def card(second: int) -> NDArray[np.uint8]:
    """A picture whose grey encodes its second."""
    return np.full((18, 32, 3), 40 + second * 2 % 200, np.uint8)


def shown_second(content: bytes | None) -> int:
    assert content is not None
    return round((float(np.asarray(Image.open(io.BytesIO(content))).mean()) - 40) / 2)


def with_pictures(stream: PlantedStream) -> PlantedStream:
    samples: list[Sample] = [
        replace(sample, frame=Frame(sample.second, float(sample.second), card(sample.second)))
        for sample in stream.samples
    ]
    return PlantedStream(samples, stream.rows)


STREAM = with_pictures(plant(PARTS))


@dataclass
class EvidenceRun:
    """A library with one film on disk, and a channel whose evidence is stored."""

    folder: Path
    evidence: EvidenceSettings = field(default_factory=EvidenceSettings)
    rules: Rules = field(default_factory=Rules)
    metrics: Metrics = field(default_factory=lambda: Metrics(CollectorRegistry()))
    alerts: list[Alert] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = EvidenceStore(self.folder)
        self.keeper, self.monitor = self.start()

    def start(self) -> tuple[EvidenceKeeper, ChannelMonitor]:
        """As a new process does."""
        settings = Settings(data_dir=self.folder, evidence=self.evidence)
        with Catalog.open(self.folder) as catalog:
            library = ActiveLibrary(ReferenceIndex.build(catalog, "planted"))
        keeper = EvidenceKeeper(settings, trained_models().net, self.metrics, lambda: self.rules)
        return keeper, ChannelMonitor(library, trained_models(), settings, self.metrics, keeper)

    def push(self, stream: PlantedStream, begin: int = 0, end: int | None = None) -> None:
        for outcome in outcomes_of(self.monitor, stream.samples[begin:end], stream.rows[begin:end]):
            self.alerts += outcome.alerts
        self.keeper.flush()

    def finish(self) -> Alert:
        self.alerts += self.monitor.finish()
        self.keeper.flush()
        return self.alerts[-1]

    def report(self, alert: Alert) -> dict[str, Any]:
        report = self.store.stored_report(alert.id)
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
def run(tmp_path: Path) -> EvidenceRun:
    register(tmp_path)
    return EvidenceRun(tmp_path)


def test_evidence_of_an_open_alert_says_so_and_its_pairs_belong_together(run: EvidenceRun) -> None:
    run.push(STREAM, 0, 40)
    started = run.alerts[0]
    report = run.report(started)
    assert (report["complete"], report["note"]) == (False, "the alert is still open")
    assert run.value("failures_total", reason="failed") == 0
    run.push(STREAM, 40)
    ended = run.finish()
    report = run.report(ended)
    assert (ended.type, report["complete"], report["note"]) == (ENDED, True, None)
    third = (ended.channel_end - ended.channel_start) / 3
    for number, frame in enumerate(report["frames"]):
        assert shown_second(run.store.file(ended.id, frame["air"])) + 0.5 == frame["stream_s"]
        assert shown_second(run.store.file(ended.id, frame["reference"])) + 0.5 == frame["ref_s"]
        assert frame["ref_s"] == frame["stream_s"] + 10
        assert frame["at"] == ("start", "middle", "end")[number]
        assert 0 <= frame["stream_s"] - ended.channel_start - number * third < third
        began = datetime.fromisoformat(str(ended.started_at))
        aired = datetime.fromisoformat(frame["aired_at"]) - began
        assert aired.total_seconds() == pytest.approx(frame["stream_s"] - ended.channel_start, abs=1)
    assert len(report["frames"]) == 3


@pytest.mark.parametrize(
    ("thumbnails", "imported", "note"), [(False, True, "features only"), (False, False, "without thumbnails")]
)
def test_a_note_says_why_a_reference_has_no_pictures(
    thumbnails: bool, imported: bool, note: str, tmp_path: Path
) -> None:
    register(tmp_path, thumbnails=thumbnails, imported=imported)
    run = EvidenceRun(tmp_path)
    run.push(STREAM)
    report = run.report(run.finish())
    assert report["complete"] is False
    assert note in report["note"]
    assert [(frame["air"], frame["reference"]) for frame in report["frames"]] == [
        (f"air-{at}.jpg", None) for at in ("start", "middle", "end")
    ]
    assert report["tiles"]


def test_a_note_says_that_a_channel_of_features_has_no_pictures(run: EvidenceRun) -> None:
    no_picture = Frame(0, 0.0, np.zeros((1, 1, 3), np.uint8))
    run.push(PlantedStream([replace(sample, frame=no_picture) for sample in STREAM.samples], STREAM.rows))
    report = run.report(run.finish())
    assert "there is no picture of the channel" in report["note"]
    assert {frame["air"] for frame in report["frames"]} == {None}
    assert report["tiles"]


@pytest.mark.parametrize("cut", [25, 45])
def test_after_a_restart_it_resumes_from_the_files_on_disk(cut: int, run: EvidenceRun) -> None:
    run.push(STREAM, 0, cut)
    snapshot = run.monitor.snapshot({})
    run.keeper.close()
    run.keeper, run.monitor = run.start()
    run.monitor.restore(snapshot)
    run.push(STREAM, cut)
    ended = run.finish()
    report = run.report(ended)
    assert report["frames"][0]["at"] == "start"  # a picture that the first run stored
    assert report["frames"][-1]["at"] == "end"
    assert all(frame["ref_s"] == frame["stream_s"] + 10 for frame in report["frames"])
    assert (report["complete"], report["note"]) == (True, None)
    assert report["tiles"][0]["live_s"] == ended.channel_start - 6


def test_a_disk_failure_costs_evidence_and_never_an_alert(
    run: EvidenceRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    healthy = tmp_path_factory.mktemp("healthy")
    register(healthy)
    other = EvidenceRun(healthy)
    other.push(STREAM)
    other.finish()
    (run.folder / "evidence").write_text("not a folder")
    run.push(STREAM, 0, 50)
    assert run.value("failures_total", reason="disk") >= 2
    (run.folder / "evidence").unlink()
    run.push(STREAM, 50)
    ended = run.finish()
    assert run.alerts == other.alerts
    assert [frame["at"] for frame in run.report(ended)["frames"]] == ["start", "middle", "end"]


def test_a_thread_that_is_behind_drops_pictures_and_blocks_no_channel(run: EvidenceRun) -> None:
    busy, release = threading.Event(), threading.Event()

    def hang() -> None:
        busy.set()
        release.wait()

    run.keeper._enqueue(hang)
    assert busy.wait(60)
    epoch = STREAM.samples[0].epoch
    for second in range(keeper_module.MAX_WAITING + 50):
        run.keeper.add_picture(epoch, second, card(second))
    assert run.value("failures_total", reason="overload") == 50
    assert len(run.keeper._waiting) == keeper_module.MAX_WAITING
    release.set()
    run.keeper.flush()
    assert len(run.keeper._channels["ch5"].recent.pictures) == RECENT_S


def test_an_alert_that_lasts_for_hours_takes_as_little_as_a_short_one(run: EvidenceRun) -> None:
    rows = film_rows("swift")
    spans = {"channel_start": 0.0, "channel_end": 10.0, "reference_start": 0.0, "reference_end": 10.0}
    first = replace(some_alert(run), id="f" * 24, **spans)  # type: ignore[arg-type]
    epoch = STREAM.samples[0].epoch
    hours = 3
    for second in range(hours * 3600):
        run.keeper.add_picture(epoch, second, card(second))
        if second % 600 == 30:
            alert = replace(first, type=STARTED if second == 30 else "alert.updated", channel_end=float(second))
            run.keeper.add_alert(AlertMaterial(alert, [(0, 0), (second, len(rows) - 1)]))
        if second % 200 == 0:
            run.keeper.flush()
    run.keeper.flush()
    channel = run.keeper._channels["ch5"]
    assert len(channel.recent.pictures) <= RECENT_S
    assert len(channel.open_alerts[first.id].pictures) <= MAX_PICTURES
    ended = replace(first, type=ENDED, channel_end=float(hours * 3600))
    run.keeper.add_alert(AlertMaterial(ended, [(0, 0), (hours * 3600 - 1, len(rows) - 1)]))
    run.keeper.flush()
    assert run.report(ended)["frames"]
    assert run.keeper._channels["ch5"].open_alerts == {}


def some_alert(run: EvidenceRun) -> Alert:
    run.push(STREAM)
    return run.finish()


def used_bytes(run: EvidenceRun) -> int:
    return sum(one.size_bytes for one in run.store.entries())


def test_evidence_stays_within_its_quota_and_confirmed_evidence_stays_longest(tmp_path: Path) -> None:
    register(tmp_path)
    run = EvidenceRun(tmp_path, EvidenceSettings(quota_bytes=10**9))
    ended = some_alert(run)
    each = used_bytes(run)
    run.keeper.close()
    run.rules = Rules([], {}, {ended.id: "confirmed"})
    run.evidence = EvidenceSettings(quota_bytes=int(2.5 * each))
    run.keeper, run.monitor = run.start()
    others = [f"{n:024x}" for n in range(4)]
    for n, alert_id in enumerate(others):
        run.keeper.add_picture(STREAM.samples[0].epoch, n, card(n))
        run.keeper.add_alert(AlertMaterial(replace(ended, id=alert_id), [(10, 20), (59, 69)]))
        run.keeper.flush()
        assert used_bytes(run) <= 2.5 * each
    assert run.store.has(ended.id)
    assert run.store.has(others[-1])
    assert run.value("bytes") == used_bytes(run)
    evicted = [alert_id for alert_id in others if not run.store.has(alert_id)]
    assert run.value("evicted_total", reason="quota") == len(evicted)
    assert evicted == others[: len(evicted)]


def test_disabled_nothing_is_stored_and_alerts_name_no_evidence(tmp_path: Path) -> None:
    register(tmp_path)
    settings = Settings(data_dir=tmp_path, evidence=EvidenceSettings(enabled=False))
    assert keeper_module.create_keeper(settings, trained_models().net, Metrics(CollectorRegistry()), Rules) is None
    with Catalog.open(tmp_path) as catalog:
        library = ActiveLibrary(ReferenceIndex.build(catalog, "planted"))
    monitor = ChannelMonitor(library, trained_models(), settings, Metrics(CollectorRegistry()))
    alerts = alerts_of(monitor, STREAM) + monitor.finish()
    assert {alert.evidence for alert in alerts} == {None}
    assert not (tmp_path / "evidence").exists()
