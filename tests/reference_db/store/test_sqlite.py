"""SQLite files: opened in one way, changed all or not at all, errors translated."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import apsw
import pytest

from reference_db.store.sqlite import connect, errors_as, transaction


class Failed(Exception):
    pass


def test_a_new_file_has_its_permissions_a_write_ahead_log_and_full_syncs(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    with closing(connect(path, "create", mode=0o600)) as db:
        db.execute("CREATE TABLE word (text TEXT)")
        assert db.pragma("journal_mode") == "wal"
        assert db.pragma("synchronous") == 2  # FULL
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}
    with closing(connect(path, "write")) as db:
        assert (db.pragma("journal_mode"), db.pragma("synchronous")) == ("wal", 2)


@pytest.mark.parametrize("access", ["read", "write"])
def test_only_create_makes_a_file(tmp_path: Path, access: str) -> None:
    with pytest.raises(apsw.CantOpenError):
        connect(tmp_path / "file.sqlite", access)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    connect(tmp_path / "file.sqlite", "create").close()
    with closing(connect(tmp_path / "file.sqlite", "read")) as db, pytest.raises(apsw.ReadOnlyError):
        db.execute("CREATE TABLE word (text TEXT)")


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "file.sqlite", "create")) as db:
        with transaction(db):
            db.execute("CREATE TABLE word (text TEXT)")
            db.execute("INSERT INTO word VALUES ('one')")
        with pytest.raises(apsw.SQLError), transaction(db):
            db.execute("INSERT INTO word VALUES ('two'); INSERT INTO no_such_table VALUES ('three')")
        assert not db.in_transaction
        assert list(db.execute("SELECT * FROM word")) == [("one",)]


def test_an_immediate_transaction_holds_the_write_lock_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    with closing(connect(path, "create")) as db, closing(connect(path, "write")) as other:
        other.set_busy_timeout(0)
        with transaction(db, immediate=True), pytest.raises(apsw.BusyError):
            other.execute("BEGIN IMMEDIATE")
        with transaction(db), transaction(other, immediate=True):
            pass


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error", "/secret/path"), apsw.IOError("Input/output error")]
)
def test_errors_are_translated_with_their_reason(error: Exception) -> None:
    with (
        pytest.raises(Failed, match=r"^it cannot be read \(Input/output error\)$"),
        errors_as(Failed, "it cannot be read"),
    ):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), errors_as(Failed, "it cannot be read"):
        raise KeyError
