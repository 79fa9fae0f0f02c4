"""Evidence on disk: it is read as it was written, from its own folder only, and stays within its quota."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from datetime import timedelta
from pathlib import Path

import pytest

from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.evidence.store import UNFINISHED, EvidenceStore, evidence_to_evict
from monitor.rights.store import RightsStore
from tests.support.sample_alert import sample_events

ALERT, OTHER, THIRD = "a" * 24, "b" * 24, "c" * 24
DAYS = timedelta(days=30)


def write_evidence(
    folder: Path, alert_id: str = ALERT, size: int = 1000, age_s: float = 0.0, *, last: bool = True
) -> None:
    store, event = EvidenceStore(folder), sample_events(alert_id)[2 if last else 0]
    report = {"alert": event.as_dict(), "frames": [], "tiles": [], "complete": True, "note": None}
    store.write(alert_id, report, {"air-start.jpg": b"j" * size}, last=last)
    for path in store.paths(alert_id):
        seconds = path.stat().st_mtime - age_s
        os.utime(path, (seconds, seconds))


def write_events(folder: Path, *alert_ids: str) -> None:
    with Outbox.open(folder, ()) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events(alert_id)) for alert_id in alert_ids])


def test_written_evidence_is_read_back(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    assert (store.has(ALERT), store.report(ALERT), store.file(ALERT, "air-start.jpg")) == (False, None, None)
    write_evidence(tmp_path)
    assert store.has(ALERT)
    assert store.file(ALERT, "air-start.jpg") == b"j" * 1000
    assert store.file(ALERT, "air-end.jpg") is None
    report = store.report(ALERT)
    assert report is not None
    assert (report["complete"], report["alert"]["type"]) == (True, "alert.ended")
    assert [one.size_bytes for one in store.entries()] == [sum(path.stat().st_size for path in store.paths(ALERT))]


def test_evidence_of_an_alert_that_ended_in_a_later_run_says_so(tmp_path: Path) -> None:
    write_evidence(tmp_path, last=False)
    write_events(tmp_path, ALERT)
    report = EvidenceStore(tmp_path).report(ALERT)
    assert report is not None
    assert (report["complete"], report["note"], report["alert"]["type"]) == (False, UNFINISHED, "alert.ended")


@pytest.mark.parametrize("id", ["../" + ALERT, "..", "", "A" * 24, ALERT + "\n", ALERT + "/..", "a" * 23])
@pytest.mark.parametrize("name", ["report.json", "../../x", "/etc/passwd", "air-start.jpg\n", "air-start.jpg.tmp"])
def test_no_other_file_can_be_read(id: str, name: str, tmp_path: Path) -> None:
    write_evidence(tmp_path)
    (tmp_path / "x").write_text("secret")
    store = EvidenceStore(tmp_path)
    assert store.file(id, name) is None
    assert name == "report.json" or store.file(ALERT, name) is None
    assert (store.has(id), store.report(id), store.zip(id), store.paths(id)) == (False, None, None, [])


def test_a_damaged_report_is_ignored(tmp_path: Path) -> None:
    write_evidence(tmp_path)
    report = next(path for path in EvidenceStore(tmp_path).paths(ALERT) if path.name == "report.json")
    report.write_bytes(report.read_bytes()[:50])
    assert EvidenceStore(tmp_path).report(ALERT) is None


def test_the_archive_has_the_hash_of_each_file_and_names_its_time_zone(tmp_path: Path) -> None:
    write_evidence(tmp_path)
    write_events(tmp_path, ALERT)
    RightsStore(tmp_path).review(ALERT, "confirmed", "Ann", "seen")
    content = EvidenceStore(tmp_path).zip(ALERT)
    assert content is not None
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {name.removeprefix(f"{ALERT}/"): archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files.pop("manifest.json"))
    assert {one["name"]: one["sha256"] for one in manifest["files"]} == {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items()
    }
    assert set(files) == {"report.json", "air-start.jpg", "events.json", "reviews.json", "audit.json"}
    assert (manifest["time_zone"], manifest["alert"], manifest["made_at"][-1]) == ("UTC", ALERT, "Z")
    assert [event["seq"] for event in json.loads(files["events.json"])] == [1, 2, 3]
    assert json.loads(files["reviews.json"])[0]["by"] == "Ann"


def test_an_alert_without_evidence_can_be_archived_and_an_unknown_one_cannot(tmp_path: Path) -> None:
    write_events(tmp_path, ALERT)
    store = EvidenceStore(tmp_path)
    assert store.zip(ALERT) is not None
    assert store.zip(OTHER) is None


def evicted(folder: Path, quota_bytes: int, *pinned: str) -> dict[str, str]:
    return evidence_to_evict(EvidenceStore(folder).entries(), quota_bytes, DAYS, pinned)


def test_the_oldest_is_evicted_first_and_confirmed_evidence_last(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    for alert_id, age_s in ((ALERT, 300), (OTHER, 200), (THIRD, 100)):
        write_evidence(tmp_path, alert_id, 10_000, age_s)
    each = next(store.entries()).size_bytes
    assert evicted(tmp_path, 3 * each) == {}
    assert evicted(tmp_path, 3 * each - 1) == {ALERT: "quota"}
    assert evicted(tmp_path, 2 * each, ALERT) == {OTHER: "quota"}
    assert evicted(tmp_path, each, ALERT) == {OTHER: "quota", THIRD: "quota"}
    assert list(evicted(tmp_path, each - 1, ALERT)) == [OTHER, THIRD, ALERT]
    store.remove(ALERT)
    assert not store.has(ALERT)
    assert [one.size_bytes for one in store.entries()] == [each, each]


def test_old_evidence_is_evicted_unless_it_was_confirmed(tmp_path: Path) -> None:
    for alert_id, age_s in ((ALERT, 40 * 86400), (OTHER, 31 * 86400), (THIRD, 29 * 86400)):
        write_evidence(tmp_path, alert_id, age_s=age_s)
    assert evicted(tmp_path, 10**9, ALERT) == {OTHER: "age"}
