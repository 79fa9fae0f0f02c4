"""Files and folders written so that they survive a crash, the writer's lock, and disk errors as StorageError."""

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import apsw

from reference_db.errors import CatalogLocked, StorageError
from reference_db.store.sqlite import reason_of

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # permissions of what the data folder contains
LOCK_TIMEOUT_S = 10.0  # a change under a lock takes milliseconds; whoever holds it for longer is stuck or hostile
LOCK_RETRY_S = 0.02
REPAIR = "run `copywatch refs verify --repair`, which rebuilds it from the feature files"


@contextmanager
def atomic_file(path: Path, *, mode: int | None = None, sync: bool = True) -> Iterator[BinaryIO]:
    """A new file beside `path` that replaces it when the block ends; if the block raises, `path` stays as it was.

    One writer of a path at a time. `mode` is the file's permissions, set before anything is written. `sync` has the
    content on disk before the rename; the name itself is there after `sync_directory`.
    """
    temporary = path.with_name(path.name + ".part")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666 if mode is None else mode)

    try:
        with open(temporary, "wb", opener=opener) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # the umask may have narrowed it, a leftover may have another
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Writes the file whole or not at all; when this returns, it survives a power cut."""
    with atomic_file(path, mode=mode) as file:
        file.write(content)
    sync_directory(path.parent)


def write_pieces(path: Path, pieces: Iterable[bytes], sha256: str) -> None:
    """Writes the file whole or not at all, as `write_file`; StorageError if the pieces do not have this hash.

    They are read a second time here, and may come from a file that somebody has changed meanwhile.
    """
    digest = hashlib.sha256()
    with atomic_file(path, mode=PRIVATE_FILE) as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        if digest.hexdigest() != sha256:
            raise StorageError(f"The content of {path.name} changed while it was written; try again.")
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Has the names in this folder on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def create_private_folder(path: Path) -> None:
    """Creates the folder and its missing parents; only their owner can enter them."""
    for missing in reversed([one for one in (path, *path.parents) if not one.exists()]):
        missing.mkdir(PRIVATE_FOLDER, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises if a file is in the way


def create_directories(data_dir: Path) -> None:
    """Creates the library's directories; when this returns, they survive a power cut."""
    missing = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
    for path in [*reversed(missing), data_dir / "features", data_dir / "thumbnails"]:
        if not path.is_dir():
            path.mkdir(PRIVATE_FOLDER if path.is_relative_to(data_dir) else 0o777, exist_ok=True)
            sync_directory(path.parent)


def lock_for_writing(data_dir: Path) -> int:
    """The writer's lock, as a file handle; the kernel releases it when the process ends, however it ends."""
    handle = try_lock(data_dir / "writer.lock")
    if handle is None:
        raise CatalogLocked(f"Another process is changing the library in {data_dir}; try again when it is done.")
    return handle


def try_lock(path: Path) -> int | None:
    """An open descriptor that holds the lock of this file until it is closed; None if another has it. Raises OSError.

    Only the owner can open the file: every user who can may hold its lock.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        status = os.fstat(handle)
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():  # of an earlier version
            os.fchmod(handle, PRIVATE_FILE)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle


def wait_for_lock(handle: int) -> None:
    """Takes the lock of an open file or folder; raises TimeoutError if another process holds it for too long."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, f"locked by another process for {LOCK_TIMEOUT_S:.0f} s") from None
        time.sleep(LOCK_RETRY_S)


@contextmanager
def storage_errors(data_dir: Path) -> Iterator[None]:
    """Raises StorageError, a sentence with the remedy, in place of errors of disk and database."""
    try:
        yield
    except (OSError, apsw.Error) as error:
        if isinstance(error, apsw.FullError) or getattr(error, "errno", None) == errno.ENOSPC:
            raise StorageError(f"The disk of {data_dir} is full; free some space and try again.") from error
        if isinstance(error, apsw.CorruptError | apsw.NotADBError | apsw.SQLError | apsw.FormatError):
            name = data_dir / "catalog.sqlite"
            raise StorageError(f"{name} is damaged; {REPAIR}.") from error
        raise StorageError(
            f"The library in {data_dir} cannot be used ({reason_of(error)}); "
            "check the path and its permissions, or set data_dir."
        ) from error
