"""SQLite files: the one way to open them, to run a transaction and to translate errors.

A writer's transaction is on disk when it ends. It does not use apsw's own `with connection`, which holds Python's
global lock while the disk syncs: on a slow disk every other thread, the event loop among them, would stop for as long.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import apsw

BUSY_TIMEOUT_MS = 5000  # how long a statement waits for another connection's lock
_FLAGS = {
    "read": apsw.SQLITE_OPEN_READONLY,
    "write": apsw.SQLITE_OPEN_READWRITE,
    "create": apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE,
}


def connect(path: Path, access: Literal["read", "write", "create"], *, mode: int = 0o600) -> apsw.Connection:
    """A connection to the file; `write` needs an existing file, `create` makes one and switches its write-ahead log on.

    `mode` is the permissions of a file that is created. Raises apsw.Error or OSError.
    """
    if access == "create":
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, mode))  # SQLite gives its other files the same permissions
    db = apsw.Connection(str(path), flags=_FLAGS[access])
    try:
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        if access == "create":
            db.pragma("journal_mode", "wal")
        if access != "read":
            db.pragma("synchronous", "full")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def transaction(db: apsw.Connection, *, immediate: bool = False) -> Iterator[apsw.Connection]:
    """All statements of the block are on disk when it ends, or none of them.

    `immediate` takes the write lock at once, so that what the block reads stays true until it writes.
    """
    db.execute("BEGIN IMMEDIATE" if immediate else "BEGIN")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        with suppress(apsw.Error):  # the caller needs the first error, not this one
            if db.in_transaction:
                db.execute("ROLLBACK")
        raise


@contextmanager
def errors_as(error_class: type[Exception], message: str) -> Iterator[None]:
    """Raises `error_class("MESSAGE (REASON)")` in place of an error of the disk or of SQLite."""
    try:
        yield
    except (OSError, apsw.Error) as error:
        raise error_class(f"{message} ({reason_of(error)})") from error


def reason_of(error: OSError | apsw.Error) -> str:
    """What the system or SQLite says about the error, without error numbers and paths."""
    return str(error.strerror) if isinstance(error, OSError) else str(error)
