"""The audit log and the command line: every command that changes something is recorded; list, export and verify."""

from __future__ import annotations

import io
import json
import os
import pwd
import zipfile
from pathlib import Path
from typing import Any

import apsw
import pytest
from typer.main import get_command

from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.alerting.webhooks import WebhookStore
from monitor.audit.chain import record_of, verify_chain
from monitor.audit.log import FILE, AuditLog
from monitor.cli import app
from tests.support.command_result import Run
from tests.support.sample_alert import sample_alert

# Commands that change nothing that is stored.
READING = {
    "ingest", "match", "check", "serve", "demo", "init", "doctor", "version", "refs list", "refs show", "refs verify",
    "refs reindex", "refs export", "refs exclusions", "channels list", "channels test", "alerts list", "alerts show",
    "alerts export", "alerts tail", "licences list", "tokens list", "webhooks list", "webhooks deliveries",
    "audit list", "audit export", "audit verify", "config check", "config show", "config schema",
}  # fmt: skip
# The others, in an order in which they succeed, and the object of each entry.
CHANGES = [
    ("refs add FILMS/one.mp4 --id film", "film"),
    ("refs exclude film 0 2", "film/1"),
    ("refs include film 1", "film/1"),
    ("refs rm film", "film"),
    ("refs import film.copywatch --id copy", "copy"),
    ("channels add five http://user:pa55@192.0.2.1/x", "five"),
    ("channels rm five", "five"),
    ("alerts review ALERT confirmed --by Ann", "ALERT"),
    ("licences add --owner ACME --note hidden", "L1"),
    ("licences rm L1", "L1"),
    ("tokens add ada --scope write", None),
    ("tokens rm ada", None),
    ("webhooks add https://user:pa55@192.0.2.1/x", "WEBHOOK"),
    ("webhooks rotate WEBHOOK", "WEBHOOK"),
    ("webhooks enable WEBHOOK", "WEBHOOK"),
    ("webhooks replay WEBHOOK 1", "WEBHOOK/1"),
    ("webhooks rm WEBHOOK", "WEBHOOK"),
]
PURGES = {"purge person", "purge alert", "purge expired"}  # see test_purge.py
MAY_FAIL = {"webhooks test"}  # nothing answers


def leaves(command: object, path: tuple[str, ...] = ()) -> list[str]:
    subcommands: dict[str, object] = getattr(command, "commands", {})
    return [leaf for name, one in subcommands.items() for leaf in leaves(one, (*path, name))] or [" ".join(path)]


def user() -> str:
    return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name


def entries(data_dir: Path) -> list[dict[str, Any]]:
    log = AuditLog(data_dir)
    assert log.verify().is_whole
    return [one.as_dict() for one in log.records()]


def test_every_command_that_changes_something_is_recorded(
    run: Run, films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = {" ".join(line.split()[:2]) for line, _ in CHANGES} | MAY_FAIL
    missing = set(leaves(get_command(app))) - READING - changing - PURGES
    assert missing == set(), "record these commands with `audited`, or add them to READING"
    data_dir, alert = tmp_path / "data", sample_alert()
    (tmp_path / "copywatch.yaml").write_text("channels: []\n")
    monkeypatch.setenv("COPYWATCH_CONFIG", str(tmp_path / "copywatch.yaml"))
    with Outbox.open(data_dir, ()) as outbox:
        outbox.write([OutboxEntry("ch5", [alert])])
    names = {"FILMS": str(films), "ALERT": alert.id}
    for line, _ in CHANGES:
        if line.startswith("refs rm"):
            assert run("refs", "export", "film").code == 0
        if line.startswith("webhooks replay"):
            assert run("webhooks", "test", names["WEBHOOK"]).code == 1
        for name, value in names.items():
            line = line.replace(name, value)
        done = run(*line.split())
        assert done.code == 0, (line, done.err)
        if line.startswith("webhooks add"):
            names["WEBHOOK"] = WebhookStore(data_dir).all()[0].id
    found = [one for one in entries(data_dir) if one["action"] != "webhooks test"]
    for entry, (line, object) in zip(found, CHANGES, strict=True):
        for name, value in names.items():
            object = None if object is None else object.replace(name, value)
        assert entry["action"] == " ".join(line.split()[:2])
        assert entry["object"] == object, line
        assert (entry["who"], entry["address"], entry["via"], entry["result"]) == (user(), "local", "cli", "done")
    text = json.dumps(found)
    assert "pa55" not in text
    assert "hidden" not in text
    assert [one["about"] for one in found if one["action"].startswith("tokens")] == ["ada", "ada"]
    (review,) = [one for one in found if one["action"] == "alerts review"]
    assert (review["about"], review["alerts"], review["details"]) == ("Ann", [alert.id], {"decision": "confirmed"})


def test_a_failed_command_is_recorded_as_failed(run: Run, tmp_path: Path) -> None:
    assert run("licences", "rm", "L9").code == 1
    assert run("refs", "add", "none.mp4").code == 1
    found = [(one["action"], one["object"], one["result"]) for one in entries(tmp_path / "data")]
    assert found == [("licences rm", "L9", "failed"), ("refs add", None, "failed")]


def test_nothing_is_changed_while_the_log_cannot_be_written(run: Run, tmp_path: Path) -> None:
    assert run("licences", "add", "--owner", "x").code == 0
    blocking = apsw.Connection(str(tmp_path / "data" / FILE))
    blocking.execute("CREATE TRIGGER full BEFORE INSERT ON pending BEGIN SELECT raise(ABORT, 'disk full'); END")
    blocking.close()
    done = run("licences", "rm", "L1")
    assert (done.code, "audit.sqlite cannot be used" in done.err) == (1, True)
    assert "L1" in run("licences", "list").out


def test_list_export_and_verify(run: Run, tmp_path: Path) -> None:
    for owner in ("one", "two", "three"):
        assert run("licences", "add", "--owner", owner).code == 0
    listed = run("audit", "list", "--limit", "2", "--json").json
    assert isinstance(listed, list)
    assert [one["object"] for one in listed] == ["L3", "L2"]
    assert "licences add" in run("audit", "list", "--who", user(), "--action", "licences").out
    assert run("audit", "list", "--result", "refused", "--json").json == []
    lines = run("audit", "export").out.splitlines()
    assert verify_chain(map(record_of, lines)).n_entries == 3
    assert run("audit", "export", "-o", "audit.jsonl").out == "audit.jsonl\n"
    done = run("audit", "verify", "audit.jsonl")
    head = done.out.splitlines()[-1]
    assert (done.code, done.out.startswith("OK: 3 entries, 0 with erased names")) == (0, True)
    assert run("licences", "rm", "L1").code == 0
    assert run("audit", "verify", "--expect", head).code == 0
    assert run("audit", "verify", "audit.jsonl", "--json").code == 0


def test_verify_finds_a_removed_entry_a_replaced_log_and_a_changed_export(run: Run, tmp_path: Path) -> None:
    for owner in ("one", "two", "three"):
        assert run("licences", "add", "--owner", owner).code == 0
    head = run("audit", "verify").out.splitlines()[-1]
    assert run("audit", "export", "-o", "audit.jsonl").code == 0
    export = tmp_path / "audit.jsonl"
    export.write_text(export.read_text().replace('"owner":"two"', '"owner":"six"'))
    done = run("audit", "verify", "audit.jsonl")
    assert (done.code, "audit.jsonl: entry 2 was changed" in done.out) == (1, True)
    export.write_text("not an export")
    assert run("audit", "verify", "audit.jsonl").code == 2
    db = apsw.Connection(str(tmp_path / "data" / FILE))
    db.execute("DROP TRIGGER entry_stays; DELETE FROM entry WHERE n = 2")
    db.close()
    done = run("audit", "verify")
    assert (done.code, "fault: entries 2 to 2 are missing\n" in done.out) == (1, True)
    for file in (tmp_path / "data").glob(f"{FILE}*"):
        file.unlink()
    for owner in ("one", "two", "three"):
        assert run("licences", "add", "--owner", owner).code == 0
    assert run("audit", "verify").code == 0  # a whole chain, but another one
    done = run("audit", "verify", "--expect", head)
    assert (done.code, "entry 3 is not the expected one" in done.out) == (1, True)
    assert run("audit", "verify", "--expect", "x").code == 2


def test_the_archive_of_an_alert_has_its_entries_without_addresses(run: Run, tmp_path: Path) -> None:
    alert = sample_alert()
    with Outbox.open(tmp_path / "data", ()) as outbox:
        outbox.write([OutboxEntry("ch5", [alert])])
    assert run("alerts", "review", alert.id, "confirmed", "--by", "Ann").code == 0
    assert run("licences", "add", "--owner", "x").code == 0
    assert run("alerts", "export", alert.id, "-o", "case.zip").code == 0
    with zipfile.ZipFile(io.BytesIO((tmp_path / "case.zip").read_bytes())) as archive:
        (entry,) = json.loads(archive.read(f"{alert.id}/audit.json"))
        manifest = json.loads(archive.read(f"{alert.id}/manifest.json"))
    assert (entry["action"], entry["who"], entry["about"]) == ("alerts review", user(), "Ann")
    assert "address" not in entry
    assert "audit.json" in [file["name"] for file in manifest["files"]]
    listed = run("audit", "list", "--alert", alert.id, "--json").json
    assert isinstance(listed, list)
    assert [one["n"] for one in listed] == [entry["n"]]
