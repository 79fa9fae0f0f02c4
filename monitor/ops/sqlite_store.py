"""A small SQLite file of the data folder that is written to now and then: desk, webhooks, jobs, replies.

Every call opens it for itself, and what was written is on disk when the call returns; any thread and any process may.
It is readable by its owner alone. `steps` are the changes of its format, one after another; the file says how many it
has had, gets the others when it is next used, and is refused if it has had more than this version knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import apsw

from monitor.errors import ConfigError, MonitorError
from reference_db.store.sqlite import connect, errors_as, transaction


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
        with self._opened("read") as db:
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
        with self._opened("create") as db, transaction(db, immediate=True):
            if missing := self._steps[self._n_steps(db) :]:
                for step in missing:
                    db.execute(step)
                db.pragma("user_version", len(self._steps))
            yield db

    @contextmanager
    def _opened(self, access: Literal["read", "create"]) -> Iterator[apsw.Connection]:
        with errors_as(self._failed, f"{self._path} cannot be used"):
            if access == "create":
                self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(connect(self._path, access, mode=0o600)) as db:
                yield db

    def _n_steps(self, db: apsw.Connection) -> int:
        had = int(db.pragma("user_version"))
        if had > len(self._steps):
            raise ConfigError(f"{self._path} was made by a newer Copywatch (format {had}); use that version.")
        return had
