"""Writing to the library's disk so that it stays, and saying in a sentence what is wrong with it where it fails."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from reference_db.errors import CatalogLocked, StorageError

REPAIR = "run `copywatch refs verify --repair`, which makes it again from the feature files"


def write_file(path: Path, content: bytes) -> None:
    """Writes the file so that it is there whole or not at all, and stays."""
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directories(data_dir: Path) -> None:
    """Makes the library's directories, so that they stay."""
    missing = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
    for path in [*reversed(missing), data_dir / "features", data_dir / "thumbnails"]:
        if not path.is_dir():
            path.mkdir(exist_ok=True)
            sync_directory(path.parent)


def locked(data_dir: Path) -> int:
    """The writer's lock, as a file handle; the system lets go of it when the process ends, however that happens."""
    handle = os.open(data_dir / "writer.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CatalogLocked(
            f"Another process is changing the library in {data_dir}; try again when it is done."
        ) from None
    return handle


@contextmanager
def told(data_dir: Path) -> Iterator[None]:
    """Turns errors of disk and database into a sentence that says what to do."""
    try:
        yield
    except (OSError, apsw.Error) as error:
        if isinstance(error, apsw.FullError) or getattr(error, "errno", None) == errno.ENOSPC:
            raise StorageError(f"The disk of {data_dir} is full; free some space and try again.") from error
        if isinstance(error, apsw.CorruptError | apsw.NotADBError | apsw.SQLError | apsw.FormatError):
            name = data_dir / "catalog.sqlite"
            raise StorageError(f"{name} is damaged; {REPAIR}.") from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StorageError(
            f"The library in {data_dir} cannot be used ({reason}); check the path and its permissions, or set data_dir."
        ) from error
