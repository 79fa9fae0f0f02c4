"""The small files of the data folder: brought up to date, refused where they are newer, and never half written."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from monitor.errors import ConfigError, JobsFailed
from monitor.ops.sqlite_store import SqliteStore

FIRST = "CREATE TABLE IF NOT EXISTS word (text TEXT NOT NULL) STRICT"
SECOND = "ALTER TABLE word ADD COLUMN said_by TEXT NOT NULL DEFAULT 'nobody'"


def ledger(path: Path, *steps: str) -> SqliteStore:
    return SqliteStore(path, steps or (FIRST, SECOND), JobsFailed)


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    assert ledger(tmp_path / "new" / "file").rows("SELECT * FROM word") == []
    assert not (tmp_path / "new").exists()


def test_what_is_written_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with ledger(path).writing() as db:
        db.execute("INSERT INTO word VALUES ('yes', 'ada')")
        assert {one.stat().st_mode & 0o777 for one in path.parent.iterdir()} == {0o600}
    assert ledger(path).rows("SELECT * FROM word") == [("yes", "ada")]


@pytest.mark.parametrize("has_said_so", [True, False])
def test_an_older_file_is_brought_up_to_date(tmp_path: Path, has_said_so: bool) -> None:
    with ledger(tmp_path / "file", FIRST).writing() as db:
        db.execute("INSERT INTO word VALUES ('yes')")
        if not has_said_so:  # files of the first version did not say which they were
            db.execute("PRAGMA user_version = 0")
    assert ledger(tmp_path / "file").rows("SELECT * FROM word") == [("yes", "nobody")]


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    with ledger(tmp_path / "file").writing() as db:
        db.execute("INSERT INTO word VALUES ('yes', 'ada')")
    older = ledger(tmp_path / "file", FIRST)
    with pytest.raises(ConfigError, match="made by a newer Copywatch"):
        older.rows("SELECT * FROM word")
    with pytest.raises(ConfigError, match="made by a newer Copywatch"), older.writing() as db:
        db.execute("DELETE FROM word")
    assert ledger(tmp_path / "file").rows("SELECT * FROM word") == [("yes", "ada")]


def test_all_of_it_or_nothing(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with ledger(tmp_path / "file").writing() as db:
            db.execute("INSERT INTO word VALUES ('yes', 'ada')")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert ledger(tmp_path / "file").rows("SELECT * FROM word") == []


def test_a_disk_that_does_not_do_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no database at all, but long enough to look like one" * 100)
    with pytest.raises(JobsFailed, match="cannot be used"):
        ledger(tmp_path / "file").rows("SELECT * FROM word")
    (tmp_path / "blocked").write_text("")
    with pytest.raises(JobsFailed, match="cannot be used"), ledger(tmp_path / "blocked" / "file").writing():
        pass


def test_one_moment_for_all_that_is_read(tmp_path: Path) -> None:
    words = ledger(tmp_path / "file")
    with words.writing() as db:
        db.execute("INSERT INTO word VALUES ('yes', 'ada')")
    with words.reading() as db:
        assert db is not None
        before = list(db.execute("SELECT count(*) FROM word"))
        with words.writing() as other:
            other.execute("INSERT INTO word VALUES ('no', 'bob')")
        assert list(db.execute("SELECT count(*) FROM word")) == before
        with pytest.raises(apsw.ReadOnlyError):
            db.execute("DELETE FROM word")
    assert len(words.rows("SELECT * FROM word")) == 2
