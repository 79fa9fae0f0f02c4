"""The desk: what is decided is kept, by several processes at once, and nothing half right gets in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import apsw
import pytest

from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.cli import main
from monitor.errors import ConfigError, InvalidRights, RightsNotFound, RightsStoreFailed
from monitor.rights.rules import Licence, Rules
from monitor.rights.store import FILE, RightsStore
from reference_db.store.catalog import Catalog, Reference, ReferenceId
from tests.reference_db.store.test_catalog import some_features, some_reference
from tests.support.sample_alert import sample_events

ALERT, OTHER = "a" * 24, "b" * 24
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def film(owner: str = "ACME", **tags: str) -> Reference:
    return Reference(ReferenceId("film"), "Film", owner, tags, "0" * 64, 100, 0, "enc", "0" * 64, NOON)


def licence(**named: object) -> Licence:
    given = dict.fromkeys(("reference", "owner", "tag", "from_", "until")) | {"channel": "*"} | named
    return Licence("L1", note="", added_at=NOON, **given)  # type: ignore[arg-type]


def test_an_empty_folder_has_an_empty_desk_and_reading_makes_nothing(tmp_path: Path) -> None:
    desk = RightsStore(tmp_path / "none")
    assert (desk.licences(), desk.exclusions(), desk.reviews(), desk.unapplied_reviews(), desk.revision()) == (
        [],
        [],
        [],
        [],
        0,
    )
    assert desk.rules().verdicts == {}
    assert not (tmp_path / "none").exists()


def test_what_is_decided_is_kept_and_each_change_is_seen(tmp_path: Path) -> None:
    desk = RightsStore(tmp_path)
    given = desk.add_licence(reference="film", channel="ch5", from_=NOON, until=NOON + HOUR, note="deal 7")
    assert (given.id, desk.licences()) == ("L1", [given])
    assert given.as_dict()["from"] == "2026-11-16T12:00:00Z"
    seen = [desk.revision()]
    ident = desk.exclude("film", 0, 10.5, "ident")
    seen.append(desk.revision())
    first, second = desk.review(ALERT, "confirmed", "Ann"), desk.review(ALERT, "false", "Bob", "an ident")
    seen.append(desk.revision())
    assert sorted(set(seen)) == seen
    assert desk.exclusions("film") == [ident]
    assert desk.exclusions("other") == []
    assert desk.reviews(ALERT) == [first, second]
    assert desk.reviews(after=first.n) == [second]
    assert desk.latest_reviews() == {ALERT: second} == desk.latest_reviews([ALERT, OTHER])
    assert desk.latest_reviews([OTHER]) == {}
    rules = desk.rules()
    assert (rules.excluded(ReferenceId("film")), rules.is_rejected(ALERT)) == ([(0.0, 10.5)], True)
    assert [review.n for review in desk.unapplied_reviews()] == [first.n, second.n]
    desk.mark_applied([first.n, second.n])
    assert desk.unapplied_reviews() == []
    assert desk.revision() == seen[-1]
    desk.remove_licence("L1")
    desk.remove_exclusion("film", ident.id)
    assert desk.add_licence(owner="ACME").id == "L2"  # an id is never used again
    assert desk.rules().exclusions == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda desk: desk.add_licence(), "name a reference"),
        (lambda desk: desk.add_licence(tag="colour"), "key=value"),
        (lambda desk: desk.add_licence(owner="a", channel="../x"), "a name or \\*"),
        (lambda desk: desk.add_licence(owner="a", from_=datetime(2026, 1, 1)), "no zone"),
        (lambda desk: desk.add_licence(owner="a", from_=NOON, until=NOON), "later than"),
        (lambda desk: desk.add_licence(owner="a" * 1001), "1000 printable"),
        (lambda desk: desk.add_licence(owner="a\x1b[2J"), "printable"),
        (lambda desk: desk.exclude("film", 5, 5), "ends after"),
        (lambda desk: desk.exclude("film", -1, 5), "0 s or later"),
        (lambda desk: desk.exclude("film", 0, float("nan")), "ends after"),
        (lambda desk: desk.review(ALERT, "maybe", "Ann"), "confirmed, false, licensed"),
        (lambda desk: desk.review("../a", "false", "Ann"), "24 hexadecimal"),
        (lambda desk: desk.review(ALERT, "false", " "), "--by"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_kept(wrong: object, words: str, tmp_path: Path) -> None:
    desk = RightsStore(tmp_path)
    with pytest.raises(InvalidRights, match=words):
        wrong(desk)  # type: ignore[operator]
    assert desk.revision() == 0


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    desk = RightsStore(tmp_path)
    for absent in ("L1", "L0", "x", "L" + "9" * 30):
        with pytest.raises(RightsNotFound):
            desk.remove_licence(absent)
    ident = desk.exclude("film", 0, 1)
    for reference, id in (("film", ident.id + 1), ("other", ident.id), ("film", 2**70)):
        with pytest.raises(RightsNotFound):
            desk.remove_exclusion(reference, id)
    assert desk.exclusions() == [ident]


def test_a_damaged_or_newer_file_is_said_to_be_so(tmp_path: Path) -> None:
    RightsStore(tmp_path).exclude("film", 0, 1)
    apsw.Connection(str(tmp_path / FILE)).execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match="newer"):
        RightsStore(tmp_path).rules()
    for part in tmp_path.iterdir():
        part.unlink()
    (tmp_path / FILE).write_bytes(b"no database " * 1000)
    for doing in (RightsStore(tmp_path).rules, lambda: RightsStore(tmp_path).exclude("film", 0, 1)):
        with pytest.raises(RightsStoreFailed):
            doing()


BUSY = """
import os, signal, sys
from pathlib import Path
from monitor.rights.store import RightsStore
desk, name = RightsStore(Path(sys.argv[1])), sys.argv[2]
for n in range(20):
    print(desk.review("a" * 24, "confirmed", f"{name} {n}").n, flush=True)
os.kill(os.getpid(), signal.SIGKILL)  # right after the last was acknowledged
"""


def test_several_processes_write_at_once_and_nothing_acknowledged_is_lost_to_kill_9(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path), f"w{n}"], stdout=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    acknowledged = [int(line) for writer in writers for line in (writer.communicate(timeout=120)[0]).split()]
    assert [writer.returncode for writer in writers] == [-signal.SIGKILL] * 3
    kept = RightsStore(tmp_path).reviews(ALERT)
    assert [review.n for review in kept] == sorted(acknowledged)
    assert {review.by for review in kept} == {f"w{w} {n}" for w in range(3) for n in range(20)}


@pytest.mark.parametrize(
    ("given", "covers"),
    [
        (licence(reference="film"), True),
        (licence(reference="other"), False),
        (licence(owner="ACME"), True),
        (licence(owner="acme"), False),
        (licence(tag="territory=EU"), True),
        (licence(tag="territory=US"), False),
        (licence(owner="ACME", tag="territory=US"), False),
        (licence(reference="film", channel="ch5"), True),
        (licence(reference="film", channel="ch6"), False),
        (licence(reference="film", from_=NOON), True),
        (licence(reference="film", from_=NOON + HOUR), False),
        (licence(reference="film", until=NOON + HOUR), True),
        (licence(reference="film", from_=NOON - HOUR, until=NOON + HOUR / 4), False),  # the play outlasts it
        (licence(reference="film", until=NOON - HOUR), False),
        (licence(reference="film", from_=NOON + timedelta(seconds=40)), True),  # ends are known to some seconds
    ],
)
def test_a_licence_covers_what_it_names(given: Licence, covers: bool) -> None:
    assert given.covers(film(territory="EU"), "ch5", NOON, NOON + HOUR / 2) is covers


def test_air_without_a_wall_clock_fits_no_window_and_the_oldest_licence_counts() -> None:
    assert not licence(reference="film", from_=NOON).covers(film(), "ch5", None, None)
    both = Rules([licence(owner="ACME"), licence(reference="film")], {}, {ALERT: "licensed", OTHER: "false"})
    assert both.licence(ALERT, film(), "ch5", None, None) == "L1"
    assert both.licence(ALERT, film("Other"), "ch5", None, None) == "L1"
    assert Rules([], {}, both.verdicts).licence(ALERT, film(), "ch5", None, None) == "reviewed"
    assert Rules([], {}, both.verdicts).licence(OTHER, film(), "ch5", None, None) is None


def said(capsys: pytest.CaptureFixture[str], folder: Path, *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main([*words, "--data-dir", str(folder)])
    out, err = capsys.readouterr()
    assert left.value.code == code, err
    return out if code == 0 else err


def test_licences_and_exclusions_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(ReferenceId("film"), 90), some_features(90))
    window = ("--from", "2026-11-16T20:00:00+01:00", "--until", "2026-11-17T00:00:00Z")
    told = said(capsys, tmp_path, "licences", "add", "--reference", "film", "--channel", "ch5", *window)
    assert told == "L1: reference film is permitted on ch5 from 2026-11-16T19:00:00Z until 2026-11-17T00:00:00Z\n"
    (one,) = json.loads(said(capsys, tmp_path, "licences", "list", "--json"))
    assert (one["id"], one["from"], one["owner"]) == ("L1", "2026-11-16T19:00:00Z", None)
    assert "ch5" in said(capsys, tmp_path, "licences", "list")
    assert "zone" in said(capsys, tmp_path, "licences", "add", "--owner", "A", "--from", "2026-11-16", code=2)
    assert "name a reference" in said(capsys, tmp_path, "licences", "add", code=1)
    said(capsys, tmp_path, "licences", "rm", "L1")
    assert "no licence 'L1'" in said(capsys, tmp_path, "licences", "rm", "L1", code=1)

    assert "00:01:00-00:01:30 of film" in said(capsys, tmp_path, "refs", "exclude", "film", "1:00", "90")
    (span,) = json.loads(said(capsys, tmp_path, "refs", "exclusions", "film", "--json"))
    assert (span["start_s"], span["end_s"]) == (60.0, 90.0)
    assert "hours:minutes" in said(capsys, tmp_path, "refs", "exclude", "film", "a", "b", code=2)
    assert "no reference" in said(capsys, tmp_path, "refs", "exclude", "flim", "0", "5", code=1)
    said(capsys, tmp_path, "refs", "include", "film", str(span["id"]))
    assert json.loads(said(capsys, tmp_path, "refs", "exclusions", "--json")) == []


def test_reviews_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Outbox.open(tmp_path, ()) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events(ALERT))])
    assert f"no alert {OTHER}" in said(capsys, tmp_path, "alerts", "review", OTHER, "false", code=1)
    assert "confirmed, false" in said(capsys, tmp_path, "alerts", "review", ALERT, "perhaps", code=1)
    assert (
        said(capsys, tmp_path, "alerts", "review", ALERT, "confirmed", "--by", "Ann")
        == f"{ALERT}: reviewed as confirmed by Ann\n"
    )
    assert json.loads(said(capsys, tmp_path, "alerts", "review", ALERT, "false", "--note", "ident", "--json"))["note"]
    assert [review.decision for review in RightsStore(tmp_path).reviews(ALERT)] == ["confirmed", "false"]
