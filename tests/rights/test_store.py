"""The rights store: several processes write at once, invalid requests change nothing, old files are renamed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import apsw
import pytest

from monitor.alerting.outbox import Outbox
from monitor.errors import ConfigError, InvalidRights, RightsNotFound, RightsStoreFailed
from monitor.ops import data_dir_lock
from monitor.rights.store import FILE, FORMER_FILE, RightsStore
from reference_db.store.catalog import ReferenceId

ALERT, OTHER = "a" * 24, "b" * 24
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def test_an_empty_folder_has_no_rights_and_reading_creates_no_file(tmp_path: Path) -> None:
    rights = RightsStore(tmp_path / "none")
    assert (
        rights.licences(),
        rights.exclusions(),
        rights.reviews(),
        rights.unapplied_reviews(),
        rights.revision(),
    ) == (
        [],
        [],
        [],
        [],
        0,
    )
    assert rights.rules().verdicts == {}
    assert not (tmp_path / "none").exists()


def test_licences_exclusions_and_reviews_are_stored_and_every_change_raises_the_revision(tmp_path: Path) -> None:
    rights = RightsStore(tmp_path)
    licence = rights.add_licence(reference="film", channel="ch5", from_=NOON, until=NOON + HOUR, note="deal 7")
    assert (licence.id, rights.licences()) == ("L1", [licence])
    assert licence.as_dict()["from"] == "2026-11-16T12:00:00Z"
    revisions = [rights.revision()]
    ident = rights.exclude("film", 0, 10.5, "ident")
    revisions.append(rights.revision())
    first, second = rights.review(ALERT, "confirmed", "Ann"), rights.review(ALERT, "false", "Bob", "an ident")
    revisions.append(rights.revision())
    assert sorted(set(revisions)) == revisions
    assert rights.exclusions("film") == [ident]
    assert rights.exclusions("other") == []
    assert rights.reviews(ALERT) == [first, second]
    assert rights.reviews(after=first.n) == [second]
    assert rights.latest_reviews() == {ALERT: second} == rights.latest_reviews([ALERT, OTHER])
    assert rights.latest_reviews([OTHER]) == {}
    rules = rights.rules()
    assert (rules.excluded(ReferenceId("film")), rules.is_rejected(ALERT)) == ([(0.0, 10.5)], True)
    assert [review.n for review in rights.unapplied_reviews()] == [first.n, second.n]
    rights.mark_applied([first.n, second.n])
    assert rights.unapplied_reviews() == []
    assert rights.revision() == revisions[-1]
    rights.remove_licence("L1")
    rights.remove_exclusion("film", ident.id)
    assert rights.add_licence(owner="ACME").id == "L2"  # an id is never reused
    assert rights.rules().exclusions == {}


@pytest.mark.parametrize(
    ("request_invalid", "message"),
    [
        (lambda rights: rights.add_licence(), "name a reference"),
        (lambda rights: rights.add_licence(tag="colour"), "key=value"),
        (lambda rights: rights.add_licence(owner="a", channel="../x"), "a name or \\*"),
        (lambda rights: rights.add_licence(owner="a", from_=datetime(2026, 1, 1)), "no time zone"),
        (lambda rights: rights.add_licence(owner="a", from_=NOON, until=NOON), "later than"),
        (lambda rights: rights.add_licence(owner="a" * 1001), "1000 printable"),
        (lambda rights: rights.add_licence(owner="a\x1b[2J"), "printable"),
        (lambda rights: rights.review(ALERT, "false", "Ann", "left \u202e right"), "printable"),
        (lambda rights: rights.exclude("film", 5, 5), "end after"),
        (lambda rights: rights.exclude("film", -1, 5), "0 s or later"),
        (lambda rights: rights.exclude("film", 0, float("nan")), "end after"),
        (lambda rights: rights.review(ALERT, "maybe", "Ann"), "confirmed, false, licensed"),
        (lambda rights: rights.review("../a", "false", "Ann"), "24 hexadecimal"),
        (lambda rights: rights.review(ALERT, "false", " "), "--by"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(
    request_invalid: Callable[[RightsStore], object], message: str, tmp_path: Path
) -> None:
    rights = RightsStore(tmp_path)
    with pytest.raises(InvalidRights, match=message):
        request_invalid(rights)
    assert rights.revision() == 0


def test_removing_an_unknown_licence_or_exclusion_is_refused(tmp_path: Path) -> None:
    rights = RightsStore(tmp_path)
    for absent in ("L1", "L0", "x", "L" + "9" * 30):
        with pytest.raises(RightsNotFound):
            rights.remove_licence(absent)
    ident = rights.exclude("film", 0, 1)
    for reference, id in (("film", ident.id + 1), ("other", ident.id), ("film", 2**70)):
        with pytest.raises(RightsNotFound):
            rights.remove_exclusion(reference, id)
    assert rights.exclusions() == [ident]


def test_a_damaged_or_newer_file_is_refused(tmp_path: Path) -> None:
    RightsStore(tmp_path).exclude("film", 0, 1)
    apsw.Connection(str(tmp_path / FILE)).execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match="newer"):
        RightsStore(tmp_path).rules()
    for part in tmp_path.iterdir():
        part.unlink()
    (tmp_path / FILE).write_bytes(b"not a database " * 1000)
    for call in (RightsStore(tmp_path).rules, lambda: RightsStore(tmp_path).exclude("film", 0, 1)):
        with pytest.raises(RightsStoreFailed):
            call()


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from monitor.rights.store import RightsStore
rights, name = RightsStore(Path(sys.argv[1])), sys.argv[2]
for n in range(20):
    print(rights.review("a" * 24, "confirmed", f"{name} {n}").n, flush=True)
os.kill(os.getpid(), signal.SIGKILL)  # right after the last acknowledgement
"""


def test_several_processes_write_at_once_and_kill_9_loses_nothing_acknowledged(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE_AND_DIE, str(tmp_path), f"w{n}"], stdout=subprocess.PIPE, text=True
        )
        for n in range(3)
    ]
    acknowledged = [int(line) for writer in writers for line in (writer.communicate(timeout=120)[0]).split()]
    assert [writer.returncode for writer in writers] == [-signal.SIGKILL] * 3
    stored = RightsStore(tmp_path).reviews(ALERT)
    assert [review.n for review in stored] == sorted(acknowledged)
    assert {review.by for review in stored} == {f"w{w} {n}" for w in range(3) for n in range(20)}


# --- a file under its former name -------------------------------------------------------------------------------------

WRITE_WITHOUT_CHECKPOINT = """
import os, signal, sys
from pathlib import Path
import apsw
from monitor.rights.store import FILE, RightsStore
rights = RightsStore(Path(sys.argv[1]))
rights.exclude("film", 0, 1)
reader = apsw.Connection(str(Path(sys.argv[1]) / FILE))
reader.execute("BEGIN; SELECT * FROM exclusion").fetchall()
for n in range(20):
    rights.review("a" * 24, "confirmed", f"reviewer {n}")
os.kill(os.getpid(), signal.SIGKILL)
"""
COUNT_REVIEWS = """
import sys
from pathlib import Path
from monitor.rights.store import RightsStore
print(len(RightsStore(Path(sys.argv[1])).reviews()))
"""


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A folder as version 0.1 leaves it after a crash: the newest reviews are in the write-ahead log only."""
    subprocess.run([sys.executable, "-c", WRITE_WITHOUT_CHECKPOINT, str(tmp_path)])
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / (FILE + suffix)).rename(tmp_path / (FORMER_FILE + suffix))
    assert (tmp_path / (FORMER_FILE + "-wal")).stat().st_size > 0
    return tmp_path


def assert_complete(data_dir: Path) -> None:
    rights = RightsStore(data_dir)
    assert [review.by for review in rights.reviews()] == [f"reviewer {n}" for n in range(20)]
    assert [span.end_s for span in rights.exclusions()] == [1.0]
    assert not list(data_dir.glob(f"{FORMER_FILE}*"))


def test_a_file_under_its_former_name_is_renamed_when_it_is_opened(former: Path) -> None:
    assert_complete(former)
    assert (former / FILE).stat().st_mode & 0o777 == 0o600
    assert RightsStore(former).review(ALERT, "false", "Ann").n == 21


def test_processes_that_open_it_at_once_rename_it_once_and_all_read_it(former: Path) -> None:
    readers = [
        subprocess.Popen([sys.executable, "-c", COUNT_REVIEWS, str(former)], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    assert [reader.communicate(timeout=120)[0] for reader in readers] == ["20\n"] * 6
    assert_complete(former)


@pytest.mark.system
@pytest.mark.parametrize(
    ("call", "nth"),
    [
        *(("pwrite64", 1), ("pwrite64", 2), ("fdatasync", 1), ("fdatasync", 2)),  # the log is merged
        *(("unlink", 1), ("unlink", 2), ("rename", 1), ("fsync", 1)),  # the log is deleted, the file renamed
    ],
)
def test_a_crash_during_the_rename_loses_nothing(former: Path, call: str, nth: int) -> None:
    strace = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={nth}"]
    for name in ("", FORMER_FILE, FORMER_FILE + "-wal", FORMER_FILE + "-shm", FORMER_FILE + "-journal"):
        strace += ["-P", str(former / name)]
    run = subprocess.run([*strace, sys.executable, "-c", COUNT_REVIEWS, str(former)], stdout=subprocess.PIPE)
    assert run.returncode == -signal.SIGKILL
    assert_complete(former)


def test_while_an_older_monitor_runs_its_file_is_left_alone(former: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_dir_lock, "UPGRADE_S", 0.1)
    with Outbox.open(former, ()), pytest.raises(ConfigError, match="older Copywatch is running"):
        RightsStore(former).rules()
    assert_complete(former)


def test_the_number_of_rules_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monitor.rights.store.MAX_ROWS", 2)
    rights = RightsStore(tmp_path)
    for n in range(2):
        rights.add_licence(owner=f"owner {n}")
        rights.exclude("film", n, n + 1)
    with pytest.raises(InvalidRights, match="limit of 2 licences"):
        rights.add_licence(owner="one more")
    with pytest.raises(InvalidRights, match="limit of 2 exclusions"):
        rights.exclude("film", 5, 6)
    assert (len(rights.licences()), len(rights.exclusions())) == (2, 2)
