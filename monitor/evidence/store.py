"""Evidence on disk: a folder per alert with its report and pictures, limited by a quota and by age.

    evidence/0f/0f3c.../report.json           the frames, the tiles with their numbers, notes
                        air-start.jpg ...     paired frames: air and ref, up to three
                        tile-start.png ...    similarity with mask and path drawn on it

Each file is written atomically, the report last, so a reader never sees half of one. Beyond the quota the oldest is
deleted first, and what a reviewer confirmed last. Any process may read, and several may write. `check` writes the same
folders, one per alert, directly into a folder that the user names, with the other files of an archive beside them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from monitor import __version__
from monitor.alerting.alerts import ENDED, RETRACTED, Alert
from monitor.alerting.outbox import History
from monitor.audit.log import AuditLog
from monitor.ops.timestamps import rfc3339
from monitor.rights.store import ALERT_ID, RightsStore
from reference_db.store.disk import PRIVATE_FILE, atomic_file, create_private_folder, sync_directory, write_file

logger = logging.getLogger(__name__)

FOLDER = "evidence"
REPORT, MANIFEST = "report.json", "manifest.json"
NAMES = re.compile(r"(air|ref)-(start|middle|end)\.jpg|tile-(start|end)\.png|report\.json")
UNFINISHED = "the monitor stopped before the alert ended, so evidence of its end is missing"


@dataclass(frozen=True, slots=True)
class StoredEvidence:
    """One alert's evidence on disk."""

    alert_id: str
    written_at: float  # of its report, seconds of the epoch
    size_bytes: int


class EvidenceStore:
    """The evidence of one data folder. Ids and names are checked before they become part of a path.

    With `case_dir` the folders of the alerts lie in that folder instead, which belongs to the user.
    """

    def __init__(self, data_dir: Path, case_dir: Path | None = None) -> None:
        self.data_dir = data_dir
        self.case_dir = case_dir
        self._root = data_dir / FOLDER if case_dir is None else case_dir

    # --- reading -----------------------------------------------------------------------------------------------------

    def address(self, alert_id: str) -> str:
        """Where users find the evidence of an alert: its API address, or its folder in `case_dir`."""
        return f"/api/v1/alerts/{alert_id}/evidence" if self.case_dir is None else str(self._folder(alert_id))

    def has(self, alert_id: str) -> bool:
        """Whether there is evidence of this alert."""
        return bool(ALERT_ID.fullmatch(alert_id)) and (self._folder(alert_id) / REPORT).exists()

    def report(self, alert_id: str) -> dict[str, Any] | None:
        """The report of an alert, with its newest event; None if there is no evidence of it."""
        report = self.stored_report(alert_id)
        if report is None:
            return None
        events = History(self.data_dir).alert(alert_id)
        was_final = report["alert"]["type"] in (ENDED, RETRACTED)
        if events:
            if not was_final and events[-1].alert.type in (ENDED, RETRACTED):
                report |= {"complete": False, "note": UNFINISHED}
            report["alert"] = events[-1].alert.as_dict()
        return report

    def file(self, alert_id: str, name: str) -> bytes | None:
        """One file's bytes; None if there is no such file, whatever the name."""
        if not ALERT_ID.fullmatch(alert_id) or not NAMES.fullmatch(name):
            return None
        try:
            return (self._folder(alert_id) / name).read_bytes()
        except OSError:
            return None

    def paths(self, alert_id: str) -> list[Path]:
        """The files of an alert."""
        if not self.has(alert_id):
            return []
        return sorted(path for path in self._folder(alert_id).iterdir() if NAMES.fullmatch(path.name))

    def zip(self, alert_id: str, viewer: ZoneInfo | None = None) -> bytes | None:
        """One archive with everything about an alert, and the SHA-256 of each file in `manifest.json`.

        It has evidence, events, reviews and the entries of the audit log; None if there is no such alert. Times are in
        UTC, and the manifest says so; with `viewer` it also has start and end in that time zone.
        """
        if not ALERT_ID.fullmatch(alert_id):
            return None
        events = History(self.data_dir).alert(alert_id)
        now = datetime.now(UTC)
        files = self._archive_files(alert_id, [event.as_dict() for event in events], self.report(alert_id), now, viewer)
        if files is None:
            return None
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
            for name, content in files.items():
                entry = zipfile.ZipInfo(f"{alert_id}/{name}", now.timetuple()[:6])
                entry.compress_type = zipfile.ZIP_DEFLATED
                out.writestr(entry, content)
        return archive.getvalue()

    def _archive_files(
        self,
        alert_id: str,
        events: list[dict[str, Any]],
        report: dict[str, Any] | None,
        now: datetime,
        viewer: ZoneInfo | None = None,
    ) -> dict[str, bytes] | None:
        """The files of an archive by name, the manifest first; None if there is nothing about this alert."""
        files = {path.name: path.read_bytes() for path in self.paths(alert_id)}
        if not events and not files:
            return None
        if report is not None:
            files[REPORT] = _json(report)
        reviews = RightsStore(self.data_dir).reviews(alert_id)
        files["events.json"] = _json(events)
        files["audit.json"] = _json(_audit_entries(self.data_dir, alert_id))
        files["reviews.json"] = _json([review.as_dict() for review in reviews])
        manifest: dict[str, Any] = {
            "alert": alert_id,
            "made_at": rfc3339(now),
            "time_zone": "UTC",
            "copywatch": __version__,
            "files": [
                {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in sorted(files.items())
            ],
        }
        if viewer is not None:
            manifest["viewer"] = {"time_zone": viewer.key} | (_local_times(viewer, events[-1]) if events else {})
        return {MANIFEST: _json(manifest)} | dict(sorted(files.items()))

    def stored_report(self, alert_id: str) -> dict[str, Any] | None:
        """The report as it was written."""
        content = self.file(alert_id, REPORT)
        if content is None:
            return None
        try:
            report = dict(json.loads(content))
            if report["alert"]["id"] == alert_id:
                return report
        except (ValueError, TypeError, KeyError):
            pass
        logger.error("the evidence of alert %s is damaged on disk and is ignored", alert_id)
        return None

    def entries(self) -> Iterator[StoredEvidence]:
        """The evidence of every alert, in no order."""
        for folder in self._root.glob("[0-9a-f][0-9a-f]/*"):
            if not ALERT_ID.fullmatch(folder.name):
                continue
            try:
                sizes = {entry.name: entry.stat() for entry in os.scandir(folder)}
            except OSError:
                continue  # just removed
            newest = max((one.st_mtime for one in sizes.values()), default=0.0)
            yield StoredEvidence(folder.name, newest, sum(one.st_size for one in sizes.values()))

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, alert_id: str, report: Mapping[str, Any], pictures: Mapping[str, bytes], *, last: bool) -> int:
        """Stores the report and these pictures beside the existing ones; returns the size of the alert's folder.

        Paired pictures that the report no longer names are deleted. With `last`, all of it is synced to disk on
        return. Raises OSError.
        """
        folder = self._folder(alert_id)
        create_private_folder(folder)
        for name, content in (*pictures.items(), (REPORT, _json(report))):
            if not NAMES.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an evidence file")
            with atomic_file(folder / name, mode=PRIVATE_FILE, sync=last) as file:
                file.write(content)
        shown = {frame[side] for frame in report.get("frames", ()) for side in ("air", "reference")}
        for path in folder.glob("*.jpg"):
            if path.name not in shown and path.name not in pictures:
                path.unlink(missing_ok=True)
        if last:
            sync_directory(folder)
        return sum(entry.stat().st_size for entry in os.scandir(folder))

    def complete_case(self, alert_id: str, events: Iterable[Alert]) -> None:
        """Writes the other files of an archive beside the evidence in `case_dir`: events, reviews and manifest.

        Raises OSError.
        """
        folder = self._folder(alert_id)
        files = self._archive_files(alert_id, [event.as_dict() for event in events], None, datetime.now(UTC))
        for name, content in (files or {}).items():
            if not NAMES.fullmatch(name):
                write_file(folder / name, content, mode=PRIVATE_FILE)

    def remove(self, alert_id: str) -> None:
        """Removes all of an alert's evidence, the report first."""
        folder = self._folder(alert_id)
        (folder / REPORT).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, alert_id: str) -> Path:
        if not ALERT_ID.fullmatch(alert_id):
            raise ValueError(f"{alert_id!r} is not an alert id")
        return self._root / alert_id if self.case_dir is not None else self._root / alert_id[:2] / alert_id


def evidence_to_evict(
    stored: Iterable[StoredEvidence],
    quota_bytes: int,
    max_age: timedelta,
    pinned: Collection[str],
    now: float | None = None,
) -> dict[str, str]:
    """The alerts whose evidence must be deleted, each with the reason: `age` or `quota`.

    First what is older than `max_age` and not pinned; then the oldest until the rest fits, pinned ones last.
    """
    oldest = (time.time() if now is None else now) - max_age.total_seconds()
    ordered = sorted(stored, key=lambda one: (one.alert_id in pinned, one.written_at, one.alert_id))
    total, evicted = sum(one.size_bytes for one in ordered), {}
    for one in ordered:
        is_old = one.written_at < oldest and one.alert_id not in pinned
        if is_old or total > quota_bytes:
            total -= one.size_bytes
            evicted[one.alert_id] = "age" if is_old else "quota"
    return evicted


def find_time_zone(name: str) -> ZoneInfo | None:
    """The time zone of this name; None if there is none."""
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        return None


def _audit_entries(data_dir: Path, alert_id: str) -> list[dict[str, Any]]:
    """The entries of the audit log that concern the alert, without network addresses: those are for admins."""
    entries = [record.as_dict() for record in AuditLog(data_dir).of_alert(alert_id)]
    return [{name: value for name, value in entry.items() if name != "address"} for entry in entries]


def _local_times(zone: ZoneInfo, alert: Mapping[str, Any]) -> dict[str, str | None]:
    """Start and end of an alert in a time zone."""
    times = {name: alert[name] for name in ("started_at", "ended_at")}
    return {
        name: None if utc is None else datetime.fromisoformat(utc).astimezone(zone).isoformat()
        for name, utc in times.items()
    }


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
