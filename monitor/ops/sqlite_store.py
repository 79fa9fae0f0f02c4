"""A small SQLite file of the data folder that is written to now and then: desk, webhooks, jobs, replies.

Every call opens it for itself, and what was written is on disk when the call returns; any thread and any process may.
It is readable by its owner alone. `steps` are the changes of its format, one after another; the file says how many it
has had, gets the others when it is next used, and is refused if it has had more than this version knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from monitor.errors import ConfigError, MonitorError

BUSY_TIMEOUT_MS = 5000


class SqliteStore:
    """The file at `path`; `failed` is raised where the disk does not do it."""

    def __init__(self, path: Path, steps: Sequence[str], failed: type[MonitorError]) -> None:
        self._path, self._steps, self._failed = path, steps, failed

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """What is found; nothing while there is no file."""
        with self.reading() as db:
            return [] if db is None else list(db.execute(sql, values))

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection | None]:
        """The file as of one moment; None while there is none."""
        if not self._path.exists():
            yield None
            return
        with self._opened(apsw.SQLITE_OPEN_READONLY) as db:
            is_new = self._n_steps(db) == len(self._steps)
            if is_new:
                db.execute("BEGIN")
                yield db
        if not is_new:
            with self.writing() as db:
                yield db

    @contextmanager
    def writing(self) -> Iterator[apsw.Connection]:
        """The file in one transaction: all of it is on disk when it ends, or nothing of it."""
        with self._opened(apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE) as db:
            db.pragma("journal_mode", "wal")
            db.pragma("synchronous", "full")
            db.execute("BEGIN IMMEDIATE")  # the one writer from here on, and what is read is what is changed
            try:
                if missing := self._steps[self._n_steps(db) :]:
                    for step in missing:
                        db.execute(step)
                    db.pragma("user_version", len(self._steps))
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _opened(self, flags: int) -> Iterator[apsw.Connection]:
        try:
            if flags & apsw.SQLITE_OPEN_CREATE:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite's other files follow it
            db = apsw.Connection(str(self._path), flags=flags)
            try:
                db.set_busy_timeout(BUSY_TIMEOUT_MS)
                yield db
            finally:
                db.close()
        except OSError as error:
            raise self._failed(f"{self._path} cannot be used ({error.strerror})") from error
        except apsw.Error as error:
            raise self._failed(f"{self._path} cannot be used ({error})") from error

    def _n_steps(self, db: apsw.Connection) -> int:
        had = int(db.pragma("user_version"))
        if had > len(self._steps):
            raise ConfigError(f"{self._path} was made by a newer Copywatch (format {had}); use that version.")
        return had
