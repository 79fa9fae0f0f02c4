"""`copywatch purge`: lists first, removes only with --yes, and leaves no byte of a name in any file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monitor.alerting.alerts import ENDED
from monitor.alerting.outbox import History, Outbox, OutboxEntry
from monitor.alerting.webhooks import REVIEWED, Message, WebhookStore, body_of, message_of
from monitor.audit.log import Actor, AuditLog, Change
from monitor.evidence.store import EvidenceStore
from monitor.rights.store import RightsStore
from monitor.web.auth.tokens import Tokens
from monitor.web.requests.idempotency import Replies, StoredReply
from tests.support.command_result import Run
from tests.support.sample_alert import sample_alert

NAME, OTHER = "Ada.Lovelace", "bob"
ENDED_ALERT = sample_alert(type=ENDED, id="e" * 24)
OPEN_ALERT = sample_alert(id="0" * 24)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A data folder with something of every kind about a person, an alert, and others."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    rights, webhooks, log, replies = (
        RightsStore(data_dir),
        WebhookStore(data_dir),
        AuditLog(data_dir),
        Replies(data_dir),
    )
    webhooks.add("http://192.0.2.1/x")
    with Outbox.open(data_dir, ["file"]) as outbox:
        outbox.write([OutboxEntry("five", [ENDED_ALERT, OPEN_ALERT])])
    EvidenceStore(data_dir).write(ENDED_ALERT.id, {"alert": {"id": ENDED_ALERT.id}}, {"air-start.jpg": b"x"}, last=True)
    for name in (NAME, OTHER):
        Tokens(data_dir).add(name, "write")
        review = rights.review(ENDED_ALERT.id, "confirmed", name, f"note of {name}")
        body = body_of(REVIEWED, {"review": review.as_dict()})
        webhooks.enqueue([Message(f"msg_{name}", REVIEWED, ENDED_ALERT.id, body)])
        replies.store((name, f"/alerts/{ENDED_ALERT.id}/review", "key"), StoredReply("", 200, [], b"{}"))
        log.append(Change(action="alerts review", actor=Actor(name, "192.0.2.7", "api"), alerts=(ENDED_ALERT.id,)))
    webhooks.enqueue([message_of(OPEN_ALERT)])
    rights.add_licence(owner=f"{NAME} Ltd")
    return data_dir


def found(result: Any) -> dict[str, int]:
    return {one["what"]: one["n"] for one in result.json["found"]}


def names_in_files(data_dir: Path, name: str) -> list[str]:
    return [path.name for path in data_dir.rglob("*") if path.is_file() and name.encode() in path.read_bytes()]


def test_a_person_is_listed_then_removed(run: Run, stored: Path) -> None:
    assert names_in_files(stored, NAME)
    expected = {
        "tokens": 1,
        "reviews": 1,
        "webhook messages": 1,
        "stored replies": 1,
        "audit entries": 1,
        "licences": 1,
    }
    listed = run("purge", "person", NAME, "--json")
    assert found(listed) == expected
    assert "Nothing was removed; `--yes` removes it." in run("purge", "person", NAME).out
    assert found(run("purge", "person", NAME, "--json")) == expected  # listing removed nothing
    done = run("purge", "person", NAME, "--yes", "--json")
    assert (done.code, found(done)) == (0, expected)
    assert found(run("purge", "person", NAME, "--json")) == {"licences": 1}  # its owner decides
    assert run("licences", "rm", "L1").code == 0
    assert run("purge", "person", NAME).out == f"Nothing about {NAME} is stored.\n"


def test_the_name_of_a_person_leaves_every_file(run: Run, stored: Path) -> None:
    assert run("purge", "person", NAME, "--yes").code == 0
    assert names_in_files(stored, f"note of {NAME}") == []
    for file in ("tokens.json", "webhooks.sqlite", "replies.sqlite", "audit.sqlite"):
        assert NAME.encode() not in (stored / file).read_bytes(), file


def test_what_stays_when_a_person_is_removed(run: Run, stored: Path) -> None:
    assert run("purge", "person", NAME, "--yes").code == 0
    reviews = RightsStore(stored).reviews(ENDED_ALERT.id)
    assert [(one.by, one.decision, one.note) for one in reviews] == [
        ("(erased)", "confirmed", ""),
        (OTHER, "confirmed", f"note of {OTHER}"),
    ]
    assert [one.name for one in Tokens(stored).all()] == [OTHER]
    log = AuditLog(stored)
    assert log.verify().is_whole
    assert [one.as_dict()["who"] for one in log.of_alert(ENDED_ALERT.id)] == [None, OTHER]
    assert len(log.entries(action="purge person")) == 2  # what was erased in the log, and the command
    assert run("audit", "verify").code == 0


def test_an_address_is_removed_from_the_audit_log(run: Run, stored: Path) -> None:
    assert found(run("purge", "person", "192.0.2.7", "--yes", "--json")) == {"audit entries": 2}
    assert [one.as_dict()["address"] for one in AuditLog(stored).of_alert(ENDED_ALERT.id)] == [None, None]


def test_an_alert_is_listed_then_removed(run: Run, stored: Path) -> None:
    expected = {
        "evidence files": 2,
        "events": 1,
        "reviews": 2,
        "webhook messages": 2,
        "stored replies": 2,
        "audit entries": 2,
    }
    assert found(run("purge", "alert", ENDED_ALERT.id, "--json")) == expected
    assert History(stored).alert(ENDED_ALERT.id)
    done = run("purge", "alert", ENDED_ALERT.id, "--yes", "--json")
    assert (done.code, found(done)) == (0, expected)
    assert History(stored).alert(ENDED_ALERT.id) == []
    assert not EvidenceStore(stored).has(ENDED_ALERT.id)
    assert RightsStore(stored).reviews(ENDED_ALERT.id) == []
    (webhook,) = WebhookStore(stored).all()
    assert [one.alert for one in WebhookStore(stored).deliveries(webhook.id)] == [OPEN_ALERT.id]
    assert set(names_in_files(stored, ENDED_ALERT.id)) <= {"audit.sqlite"}
    assert found(run("purge", "alert", ENDED_ALERT.id, "--json")) == {"audit entries": 3}
    assert [one.alert.id for _, one in History(stored).alerts()] == [OPEN_ALERT.id]


def test_an_open_alert_is_not_removed(run: Run, stored: Path) -> None:
    done = run("purge", "alert", OPEN_ALERT.id, "--yes")
    assert (done.code, "is still open; purge it after its end." in done.err) == (1, True)
    assert History(stored).alert(OPEN_ALERT.id)


def test_an_alert_is_removed_while_a_monitor_runs(run: Run, stored: Path) -> None:
    with Outbox.open(stored, ["file"]) as outbox:
        assert len(outbox.pending("file", 0, 10)) == 2
        assert run("purge", "alert", ENDED_ALERT.id, "--yes").code == 0
        assert [one.alert.id for one in outbox.pending("file", 0, 10)] == [OPEN_ALERT.id]
        outbox.write([OutboxEntry("five", [sample_alert(id="1" * 24)])])
    assert {one.alert.id for _, one in History(stored).alerts()} == {OPEN_ALERT.id, "1" * 24}


def test_expired_data_are_listed_then_removed(run: Run, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("purge", "expired").out == "Nothing that has expired is stored.\n"
    monkeypatch.setenv("COPYWATCH_AUDIT__KEEP_DAYS", "0.0000001")
    assert found(run("purge", "expired", "--json")) == {"audit entries": 2}
    assert run("purge", "expired", "--yes").code == 0
    log = AuditLog(stored)
    assert [one.as_dict()["action"] for one in log.records()] == ["audit retention", "purge expired"]
    assert log.verify().is_whole
