"""Retention: reviews go with their alerts, audit entries after their days, and both at the start of `serve`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import apsw
import pytest

from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.audit.log import Actor, AuditLog, Change
from monitor.config.settings import Settings
from monitor.evidence.store import EvidenceStore
from monitor.rights.store import FILE, RightsStore
from monitor.runtime.retention import Expired, Retention, run_retention
from tests.support.sample_alert import sample_alert

ALERTS = ["a" * 24, "b" * 24, "c" * 24, "d" * 24]


def settings_in(data_dir: Path, audit_days: float = 365.0) -> Settings:
    return Settings.model_validate({"data_dir": data_dir, "audit": {"keep_days": audit_days}})


@pytest.fixture
def reviewed(tmp_path: Path) -> RightsStore:
    """Four reviews: of an alert in the history, one with evidence, one that is gone, and a new one that is gone."""
    rights = RightsStore(tmp_path)
    for id in ALERTS:
        rights.review(id, "confirmed", "Ann", "seen")
    long_ago = (datetime.now(UTC) - timedelta(days=31)).replace(microsecond=0).isoformat()
    db = apsw.Connection(str(tmp_path / FILE))
    db.execute("UPDATE review SET at = ? WHERE alert_id != ?", (long_ago, ALERTS[3]))
    db.close()
    with Outbox.open(tmp_path, ()) as outbox:
        outbox.write([OutboxEntry("five", [sample_alert(id=ALERTS[0])])])
    EvidenceStore(tmp_path).write(ALERTS[1], {"alert": {"id": ALERTS[1]}}, {}, last=True)
    return rights


def test_a_review_is_deleted_once_nothing_else_of_its_alert_is_stored(tmp_path: Path, reviewed: RightsStore) -> None:
    retention = Retention(settings_in(tmp_path))
    assert retention.expired() == Expired(1, 0)
    assert [one.alert_id for one in reviewed.reviews()] == ALERTS  # nothing is deleted yet
    before = reviewed.revision()
    assert retention.apply() == Expired(1, 0)
    assert [one.alert_id for one in reviewed.reviews()] == [ALERTS[0], ALERTS[1], ALERTS[3]]
    assert reviewed.revision() > before  # monitors forget the verdict
    EvidenceStore(tmp_path).remove(ALERTS[1])
    assert retention.apply() == Expired(1, 0)
    assert retention.apply() == Expired(0, 0)


def test_audit_entries_are_deleted_after_their_days(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for _ in range(3):
        log.append(Change(action="licences add", actor=Actor("ada", "192.0.2.1", "api")))
    assert Retention(settings_in(tmp_path)).apply() == Expired(0, 0)
    assert Retention(settings_in(tmp_path, audit_days=1e-9)).apply() == Expired(0, 3)
    assert [one.as_dict()["action"] for one in log.records()] == ["audit retention"]
    assert log.verify().is_whole


def test_it_runs_at_once_and_survives_a_damaged_file(
    tmp_path: Path, reviewed: RightsStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "monitor.runtime.retention")

    async def run_until_logged(n_lines: int) -> None:
        task = asyncio.create_task(run_retention(settings_in(tmp_path)))
        for _ in range(10_000):
            if len(caplog.records) == n_lines:
                break
            await asyncio.sleep(0.01)  # the log has no event to wait for
        assert not task.done()  # it waits for the next hour
        task.cancel()

    asyncio.run(run_until_logged(1))
    assert len(reviewed.reviews()) == 3
    (tmp_path / FILE).write_bytes(b"not a database" * 1000)
    asyncio.run(run_until_logged(2))
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]
