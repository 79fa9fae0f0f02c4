"""`copywatch licences`, `refs exclude` and `alerts review`: what they print and store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.cli import main
from monitor.rights.store import RightsStore
from reference_db.store.catalog import Catalog, ReferenceId
from tests.support.sample_alert import sample_events
from tests.support.sample_references import some_features, some_reference

ALERT, OTHER = "a" * 24, "b" * 24


def output_of(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as exit:
        main([*arguments, "--data-dir", str(folder)])
    out, err = capsys.readouterr()
    assert exit.value.code == code, err
    return out if code == 0 else err


def test_the_commands_for_licences_and_exclusions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(ReferenceId("film"), 90), some_features(90))
    window = ("--from", "2026-11-16T20:00:00+01:00", "--until", "2026-11-17T00:00:00Z")
    printed = output_of(capsys, tmp_path, "licences", "add", "--reference", "film", "--channel", "ch5", *window)
    assert printed == "L1: reference film is permitted on ch5 from 2026-11-16T19:00:00Z until 2026-11-17T00:00:00Z\n"
    (one,) = json.loads(output_of(capsys, tmp_path, "licences", "list", "--json"))
    assert (one["id"], one["from"], one["owner"]) == ("L1", "2026-11-16T19:00:00Z", None)
    assert "ch5" in output_of(capsys, tmp_path, "licences", "list")
    assert "zone" in output_of(capsys, tmp_path, "licences", "add", "--owner", "A", "--from", "2026-11-16", code=2)
    assert "name a reference" in output_of(capsys, tmp_path, "licences", "add", code=1)
    output_of(capsys, tmp_path, "licences", "rm", "L1")
    assert "no licence 'L1'" in output_of(capsys, tmp_path, "licences", "rm", "L1", code=1)

    assert "00:01:00-00:01:30 of film" in output_of(capsys, tmp_path, "refs", "exclude", "film", "1:00", "90")
    (span,) = json.loads(output_of(capsys, tmp_path, "refs", "exclusions", "film", "--json"))
    assert (span["start_s"], span["end_s"]) == (60.0, 90.0)
    assert "hours:minutes" in output_of(capsys, tmp_path, "refs", "exclude", "film", "a", "b", code=2)
    assert "no reference" in output_of(capsys, tmp_path, "refs", "exclude", "flim", "0", "5", code=1)
    output_of(capsys, tmp_path, "refs", "include", "film", str(span["id"]))
    assert json.loads(output_of(capsys, tmp_path, "refs", "exclusions", "--json")) == []


def test_the_command_for_reviews(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Outbox.open(tmp_path, ()) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events(ALERT))])
    assert f"no alert {OTHER}" in output_of(capsys, tmp_path, "alerts", "review", OTHER, "false", code=1)
    assert "confirmed, false" in output_of(capsys, tmp_path, "alerts", "review", ALERT, "perhaps", code=1)
    assert (
        output_of(capsys, tmp_path, "alerts", "review", ALERT, "confirmed", "--by", "Ann")
        == f"{ALERT}: reviewed as confirmed by Ann\n"
    )
    assert json.loads(output_of(capsys, tmp_path, "alerts", "review", ALERT, "false", "--note", "ident", "--json"))[
        "note"
    ]
    assert [review.decision for review in RightsStore(tmp_path).reviews(ALERT)] == ["confirmed", "false"]
