"""A small SQLite file of the data folder that is written now and then: rights, webhooks, jobs, stored replies.

Every call opens the file; a write is on disk when the call returns. Any thread of any process may call. Only the owner
can read the file. `migrations` are SQL statements in order; the file records how many were applied, the missing ones
are applied at the next use, and a file with more of them than this version knows is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import apsw

from monitor.errors import ConfigError, MonitorError
from reference_db.store.disk import create_private_folder
from reference_db.store.sqlite import BUSY_TIMEOUT_MS, connect, errors_as, transaction


class SqliteStore:
    """The file at `path`; raises `failed` where the disk or SQLite fails, or other writers take too long."""

    def __init__(
        self,
        path: Path,
        migrations: Sequence[str],
        failed: type[MonitorError],
        *,
        busy_timeout_ms: int = BUSY_TIMEOUT_MS,
    ) -> None:
        self._path, self._migrations, self._failed = path, migrations, failed
        self._busy_timeout_ms = busy_timeout_ms

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query; none while there is no file."""
        with self.reading() as db:
            return [] if db is None else list(db.execute(sql, values))

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection | None]:
        """A read-only connection that sees the file as of one moment; None while there is no file."""
        if not self._path.exists():
            yield None
            return
        with self._connect("read") as db:
            is_current = self._n_applied(db) == len(self._migrations)
            if is_current:
                db.execute("BEGIN")
                yield db
        if not is_current:
            with self.writing() as db:
                yield db

    @contextmanager
    def writing(self, *, erases: bool = False) -> Iterator[apsw.Connection]:
        """A connection in one transaction: all of it is on disk at its end, or nothing. Creates the file.

        With `erases`, the bytes of deleted rows are overwritten, in the write-ahead log too unless a reader needs it.
        """
        with self._connect("create") as db:
            if erases:
                db.pragma("secure_delete", True)
            with transaction(db, immediate=True):
                if missing := self._migrations[self._n_applied(db) :]:
                    for migration in missing:
                        db.execute(migration)
                    db.pragma("user_version", len(self._migrations))
                yield db
            if erases:
                with suppress(apsw.BusyError):
                    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    @contextmanager
    def _connect(self, access: Literal["read", "create"]) -> Iterator[apsw.Connection]:
        with errors_as(self._failed, f"{self._path} cannot be used"):
            if access == "create":
                create_private_folder(self._path.parent)
            with closing(connect(self._path, access)) as db:
                db.set_busy_timeout(self._busy_timeout_ms)
                yield db

    def _n_applied(self, db: apsw.Connection) -> int:
        n_applied = int(db.pragma("user_version"))
        if n_applied > len(self._migrations):
            raise ConfigError(f"{self._path} was made by a newer Copywatch (format {n_applied}); use that version.")
        return n_applied
