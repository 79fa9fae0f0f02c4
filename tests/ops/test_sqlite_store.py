"""Small SQLite files of the data folder: migrated, refused where they are newer, and never half written."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import apsw
import pytest

from monitor.errors import ConfigError, JobsFailed
from monitor.ops.sqlite_store import SqliteStore

FIRST = "CREATE TABLE IF NOT EXISTS word (text TEXT NOT NULL) STRICT"
SECOND = "ALTER TABLE word ADD COLUMN author TEXT NOT NULL DEFAULT 'unknown'"


def store(path: Path, *migrations: str) -> SqliteStore:
    return SqliteStore(path, migrations or (FIRST, SECOND), JobsFailed)


def test_reading_creates_nothing(tmp_path: Path) -> None:
    assert store(tmp_path / "new" / "file").rows("SELECT * FROM word") == []
    assert not (tmp_path / "new").exists()


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with store(path).writing() as db:
        db.execute("INSERT INTO word VALUES ('yes', 'ada')")
        assert {one.stat().st_mode & 0o777 for one in path.parent.iterdir()} == {0o600}
    assert store(path).rows("SELECT * FROM word") == [("yes", "ada")]


@pytest.mark.parametrize("has_version", [True, False])
def test_an_older_file_is_migrated(tmp_path: Path, has_version: bool) -> None:
    with store(tmp_path / "file", FIRST).writing() as db:
        db.execute("INSERT INTO word VALUES ('yes')")
        if not has_version:  # files of the first version did not record it
            db.execute("PRAGMA user_version = 0")
    assert store(tmp_path / "file").rows("SELECT * FROM word") == [("yes", "unknown")]


def test_a_newer_file_is_refused_and_not_changed(tmp_path: Path) -> None:
    with store(tmp_path / "file").writing() as db:
        db.execute("INSERT INTO word VALUES ('yes', 'ada')")
    older = store(tmp_path / "file", FIRST)
    with pytest.raises(ConfigError, match="made by a newer Copywatch"):
        older.rows("SELECT * FROM word")
    with pytest.raises(ConfigError, match="made by a newer Copywatch"), older.writing() as db:
        db.execute("DELETE FROM word")
    assert store(tmp_path / "file").rows("SELECT * FROM word") == [("yes", "ada")]


def test_a_failed_transaction_writes_nothing(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with store(tmp_path / "file").writing() as db:
            db.execute("INSERT INTO word VALUES ('yes', 'ada')")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert store(tmp_path / "file").rows("SELECT * FROM word") == []


def test_a_file_that_cannot_be_used_raises_the_error_of_its_owner(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no database at all, but long enough to look like one" * 100)
    with pytest.raises(JobsFailed, match="cannot be used"):
        store(tmp_path / "file").rows("SELECT * FROM word")
    (tmp_path / "blocked").write_text("")
    with pytest.raises(JobsFailed, match="cannot be used"), store(tmp_path / "blocked" / "file").writing():
        pass


def test_a_reader_sees_the_file_as_of_one_moment(tmp_path: Path) -> None:
    words = store(tmp_path / "file")
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


def test_erased_rows_leave_no_bytes_in_any_file(tmp_path: Path) -> None:
    one, path = store(tmp_path / "file"), tmp_path / "file"
    with closing(apsw.Connection(str(path))):  # of another process: the write-ahead log stays while it is open
        with one.writing() as db:
            db.executemany("INSERT INTO word VALUES (?, 'ada lovelace')", [(str(n),) for n in range(500)])
        with one.writing(erases=True) as db:
            db.execute("DELETE FROM word")
        assert not [file.name for file in tmp_path.iterdir() if b"lovelace" in file.read_bytes()]
