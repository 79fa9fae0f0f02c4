"""Evidence by the real pipeline: its pictures show both sides at the same moment."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, Alert
from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.cli import main
from monitor.config.settings import Settings
from monitor.demo.films import Film
from monitor.evidence.keeper import EvidenceKeeper
from monitor.evidence.store import EvidenceStore
from monitor.ingest.sources import FileSource
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.batcher import Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.check import CallbackDelivery
from monitor.runtime.models import Models, load_models
from monitor.runtime.runner import run_stream
from reference_db.registration import register
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog
from tests.support import media

FPS = 4
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 100.0)
OTHER = Film("other", "Other", 88, ("marble", "wheel", "patchwork", "cells"), 3600.0)
LONG_S, SHORT_S = 80, 14


@dataclass(frozen=True)
class CheckedRecording:
    """A library with one film, and the alerts of a recording that shows it for long and then briefly."""

    folder: Path
    alerts: list[Alert]
    metrics: Metrics

    @property
    def store(self) -> EvidenceStore:
        return EvidenceStore(self.folder)

    def report(self, alert: Alert) -> dict[str, Any]:
        report = self.store.report(alert.id)
        assert report is not None
        return report

    def picture(self, alert: Alert, name: str) -> NDArray[np.uint8]:
        content = self.store.file(alert.id, name)
        assert content is not None, name
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def check(folder: Path, recording: Path, models: Models) -> CheckedRecording:
    settings, metrics = Settings(data_dir=folder), Metrics(CollectorRegistry())
    with Catalog.open(folder) as catalog:
        library = ActiveLibrary(ReferenceIndex.build(catalog, models.encoder.encoder_id))
    keeper = EvidenceKeeper(settings, models.net, metrics, lambda: library.rules)
    alerts: list[Alert] = []
    batcher = Batcher(models, metrics)
    monitor = ChannelMonitor(library, models, settings, metrics, keeper)
    try:
        asyncio.run(
            run_stream(
                FileSource(recording, metrics.channels.of("ch5")),
                monitor,
                CallbackDelivery(alerts.append),
                batcher,
                metrics,
            )
        )
        keeper.flush()
    finally:
        batcher.close()
        keeper.close()
    return CheckedRecording(folder, alerts, metrics)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> CheckedRecording:
    folder = tmp_path_factory.mktemp("checked")
    models = load_models(Settings(data_dir=folder))
    film = media.write_clip(folder / "film.mp4", media.pieces(FPS, (FILM, 0, 100)), fps=FPS)
    with Catalog.open(folder, write=True) as catalog:
        register(film, catalog, models.encoder)
    pieces = media.pieces(
        FPS, (OTHER, 0, 10), (FILM, 6, LONG_S), (OTHER, 100, 30), (FILM, 50, SHORT_S), (OTHER, 200, 25)
    )
    clip = media.write_clip(folder / "broadcast.ts", pieces, fps=FPS)
    checked = check(folder, clip, models)
    with Outbox.open(folder, ()) as outbox:
        outbox.write([OutboxEntry("ch5", checked.alerts)])
    return checked


def ended(checked: CheckedRecording) -> list[Alert]:
    return [alert for alert in checked.alerts if alert.type == ENDED]


def correlation(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Of two pictures, whatever their sizes."""
    small = [np.asarray(Image.fromarray(picture).resize((64, 36)), np.float64).ravel() for picture in (one, other)]
    return float(np.asarray(np.corrcoef(np.stack(small)))[0, 1])


def test_every_alert_has_its_evidence_and_says_where(checked: CheckedRecording) -> None:
    assert len(ended(checked)) == 2
    for alert in checked.alerts:
        assert alert.evidence == f"/api/v1/alerts/{alert.id}/evidence"
    for alert in ended(checked):
        report = checked.report(alert)
        assert (report["complete"], report["note"]) == (True, None)
        assert report["alert"] == alert.as_dict()
        assert [frame["at"] for frame in report["frames"]] == ["start", "middle", "end"]


def test_the_paired_frames_show_the_same_moment(checked: CheckedRecording) -> None:
    for alert in ended(checked):
        begins_s, film_s = (10, 6) if alert.channel_end - alert.channel_start > 50 else (120, 50)
        for frame in checked.report(alert)["frames"]:
            assert frame["aired_at"] is None  # a file
            assert frame["ref_s"] == pytest.approx(film_s + frame["stream_s"] - begins_s, abs=0.3), frame
            air, thumbnail = checked.picture(alert, frame["air"]), checked.picture(alert, frame["reference"])
            assert correlation(air, thumbnail) > 0.95, frame
            assert correlation(air, FILM.picture(frame["ref_s"] + 0.1)) > 0.95, frame


def test_the_tiles_have_the_path_where_similarity_and_mask_are_high(checked: CheckedRecording) -> None:
    long, short = (checked.report(alert)["tiles"] for alert in ended(checked))
    assert [tile["name"] for tile in long] == ["tile-start", "tile-end"]
    assert [tile["name"] for tile in short] == ["tile-start"]  # it is whole in one
    for alert, tiles in zip(ended(checked), (long, short), strict=True):
        for tile in tiles:
            similarity, mask = np.array(tile["similarity"]), np.array(tile["mask"])
            assert similarity.shape == mask.shape == (tile["rows"], tile["columns"])
            rows, columns = np.array(tile["path"]).T
            assert similarity[rows, columns].mean() > 0.6 > 2 * similarity.mean()
            assert mask[rows, columns].mean() > 0.5 > 2 * mask.mean()
            offsets = (tile["ref_s"] + columns) - (tile["live_s"] + rows)
            assert np.abs(offsets - (alert.reference_start - alert.channel_start)).max() <= 2
    assert long[0]["live_s"] < ended(checked)[0].channel_start
    assert long[1]["live_s"] + long[1]["rows"] > ended(checked)[0].channel_end


def test_the_drawn_tile_has_heat_mask_path_and_seconds(checked: CheckedRecording) -> None:
    for name in ("tile-start.png", "tile-end.png"):
        drawn = checked.picture(ended(checked)[0], name).astype(int)
        assert min(drawn.shape[:2]) > 300
        green = (drawn[..., 1] > 200) & (drawn[..., 0] < 120) & (drawn[..., 2] < 180)
        cyan = (drawn[..., 2] > 200) & (drawn[..., 1] > 180) & (drawn[..., 0] < 150)
        ink = drawn[:, :50].max(axis=2) < 120
        assert green.sum() > 200
        assert cyan.sum() > 200
        assert ink.sum() > 100


def test_its_size_is_exported_and_small(checked: CheckedRecording) -> None:
    value = checked.metrics.registry.get_sample_value
    assert value("copywatch_evidence_bytes") == sum(one.size_bytes for one in checked.store.entries())
    assert value("copywatch_evidence_quota_bytes") == 2_000_000_000
    assert value("copywatch_evidence_failures_total", {"reason": "failed"}) is None
    for alert in ended(checked):
        assert sum(path.stat().st_size for path in checked.store.paths(alert.id)) < 300_000


def output_of(capsys: pytest.CaptureFixture[str], checked: CheckedRecording, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["alerts", *arguments, "--data-dir", str(checked.folder)])
    out, err = capsys.readouterr()
    assert exit_.value.code == code, err
    return out if code == 0 else err


def test_alerts_show_prints_the_files_and_numbers(
    checked: CheckedRecording, capsys: pytest.CaptureFixture[str]
) -> None:
    alert = ended(checked)[0]
    output = output_of(capsys, checked, "show", alert.id)
    assert "complete; times in UTC" in output
    assert "min_confidence 0.7" in output
    paths = [Path(line) for line in output.splitlines() if line.startswith("/")]
    assert sorted(path.name for path in paths) == sorted(
        [f"{side}-{at}.jpg" for side in ("air", "ref") for at in ("start", "middle", "end")]
        + ["tile-start.png", "tile-end.png", "report.json"]
    )
    assert all(path.exists() for path in paths)
    whole = json.loads(output_of(capsys, checked, "show", alert.id, "--json"))
    assert whole["evidence"] == json.loads(json.dumps(checked.report(alert)))


def test_alerts_export_writes_one_archive_with_valid_hashes(
    checked: CheckedRecording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alert = ended(checked)[0]
    output_of(capsys, checked, "export", alert.id, "--output", str(tmp_path / "case.zip"), "--time-zone", "Asia/Tokyo")
    assert [path.name for path in tmp_path.iterdir()] == ["case.zip"]
    with zipfile.ZipFile(tmp_path / "case.zip") as archive:
        assert archive.testzip() is None
        manifest = json.loads(archive.read(f"{alert.id}/manifest.json"))
        for file in manifest["files"]:
            content = archive.read(f"{alert.id}/{file['name']}")
            assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
    assert len(manifest["files"]) == 9 + 3
    assert (manifest["time_zone"], manifest["viewer"]["time_zone"]) == ("UTC", "Asia/Tokyo")
    assert "unknown time zone" in output_of(capsys, checked, "export", alert.id, "--time-zone", "Mars/Olympus", code=2)
    assert "no alert" in output_of(capsys, checked, "export", "f" * 24, "-o", str(tmp_path / "no.zip"), code=1)
    assert "No such file" in output_of(
        capsys, checked, "export", alert.id, "-o", str(tmp_path / "no" / "no.zip"), code=1
    )
    assert len(list(tmp_path.iterdir())) == 1
