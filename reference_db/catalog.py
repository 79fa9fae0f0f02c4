"""The library on disk: which references there are, and the features and thumbnails of each.

    catalog.sqlite                            one row per reference, and the generation, which grows with every change
    features/ID.HASH.safetensors              rows and informative seconds, whose SHA-256 is in the row
    thumbnails/ID.HASH.jpegs                  one small JPEG per second
    writer.lock                               held by the one process that may write

A reference is there once its row is: the files are written aside, synced and renamed before it, and files without a
row are cleared away when the next writer opens the library. So whenever the power fails, a reference that was
acknowledged is whole, and one that was not is not there. Every row and file carries a hash, and bytes that do not
fit theirs raise DamagedReference.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NewType, Self

import apsw
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from reference_db.errors import CatalogError, CatalogLocked, DamagedReference, ReferenceExists, UnknownReference

logger = logging.getLogger(__name__)

FEATURE_SIZE = 512
ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
BUSY_TIMEOUT_MS = 5000
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE reference (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, owner TEXT NOT NULL, tags TEXT NOT NULL, content_sha256 TEXT NOT NULL,
    n_seconds INTEGER NOT NULL, n_uninformative INTEGER NOT NULL, encoder_id TEXT NOT NULL,
    features_sha256 TEXT NOT NULL, added_at TEXT NOT NULL, has_thumbnails INTEGER NOT NULL, row_sha256 TEXT NOT NULL
) STRICT;
CREATE INDEX reference_by_content ON reference (content_sha256);
CREATE TABLE library (generation INTEGER NOT NULL) STRICT;
INSERT INTO library VALUES (0);
PRAGMA user_version = 1;
"""
THUMBNAIL = struct.Struct("<QII")  # offset, length and CRC-32 of one second's JPEG; length 0 where there is none

ReferenceId = NewType("ReferenceId", str)
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A registered video."""

    id: ReferenceId
    title: str
    owner: str
    tags: dict[str, str]
    content_sha256: str  # of the file it was made from
    n_seconds: int
    n_uninformative: int  # seconds that nothing can be recognised by: black, flat, or missing
    encoder_id: str
    features_sha256: str  # of its feature file; set by Catalog.add
    added_at: datetime  # aware UTC


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceFeatures:
    """One feature row per second of a reference; a second that was not seen has zeros and is uninformative."""

    rows: NDArray[np.float16]  # [seconds, 512]
    informative: NDArray[np.bool_]  # [seconds]

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape[1] != FEATURE_SIZE or self.rows.dtype != np.float16:
            raise ValueError(f"rows must be float16 [n, {FEATURE_SIZE}], got {self.rows.dtype} {self.rows.shape}")
        if self.informative.shape != self.rows.shape[:1] or self.informative.dtype != np.bool_:
            raise ValueError(f"informative must be bool [{len(self.rows)}], got {self.informative.shape}")
        if not np.isfinite(self.rows).all():
            raise ValueError("rows must be finite numbers")
        self.rows.flags.writeable = False
        self.informative.flags.writeable = False


class Catalog:
    """The library in one directory; use `Catalog.open`, in one thread at a time.

    A reader sees each change as soon as it is committed, and an empty library where there is none yet.
    """

    def __init__(self, data_dir: Path, lock: int | None) -> None:
        self.data_dir = data_dir
        self._lock = lock
        self._connection: apsw.Connection | None = None

    @classmethod
    def open(cls, data_dir: Path, *, write: bool = False) -> Self:
        """The library in `data_dir`; only one process at a time may have it open to write (CatalogLocked)."""
        if not write:
            return cls(data_dir, None)
        with _told(data_dir):
            for directory in (data_dir, data_dir / "features", data_dir / "thumbnails"):
                directory.mkdir(parents=True, exist_ok=True)
            catalog = cls(data_dir, _locked(data_dir))
        try:
            with _told(data_dir):
                catalog._create()
                catalog._clear_away_garbage()
        except BaseException:
            catalog.close()
            raise
        return catalog

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the library; a writer's lock is free again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def generation(self) -> int:
        """A number that grows with every add and remove."""
        rows = self._select("SELECT generation FROM library")
        return int(rows[0][0]) if rows else 0

    def references(self) -> tuple[Reference, ...]:
        """All references, sorted by id."""
        return tuple(_reference(row) for row in self._select("SELECT * FROM reference ORDER BY id"))

    def get(self, id: ReferenceId) -> Reference:
        """The reference of this id, or UnknownReference."""
        return _reference(self._row(id))

    def by_content(self, sha256: str) -> Reference | None:
        """The reference made from a file with these bytes."""
        rows = self._select("SELECT * FROM reference WHERE content_sha256 = ? ORDER BY id", sha256)
        return _reference(rows[0]) if rows else None

    def features(self, id: ReferenceId) -> ReferenceFeatures:
        """The reference's features, as they were written, or DamagedReference."""
        reference = self.get(id)
        try:
            content = self._features_path(reference).read_bytes()
        except OSError as error:
            self.get(id)  # removed meanwhile: unknown, not damaged
            raise _damaged(id, f"its feature file cannot be read ({error.strerror})") from error
        if hashlib.sha256(content).hexdigest() != reference.features_sha256:
            raise _damaged(id, "its feature file has changed on disk")
        arrays = load(content)
        return ReferenceFeatures(arrays["rows"], arrays["informative"])

    def thumbnail(self, id: ReferenceId, second: int) -> bytes | None:
        """The JPEG that shows this second, or None where none was kept."""
        row = self._row(id)
        reference = _reference(row)
        if not row[-2] or not 0 <= second < reference.n_seconds:
            return None
        try:
            with self._thumbnails_path(reference).open("rb") as pack:
                pack.seek(second * THUMBNAIL.size)
                offset, length, checksum = THUMBNAIL.unpack(pack.read(THUMBNAIL.size))
                pack.seek(offset)
                jpeg = pack.read(length)
        except (OSError, struct.error, OverflowError) as error:
            raise _damaged(id, "its thumbnails cannot be read") from error
        if len(jpeg) != length or zlib.crc32(jpeg, second) != checksum:
            raise _damaged(id, f"its thumbnail of second {second} has changed on disk")
        return jpeg or None

    def add(
        self, reference: Reference, features: ReferenceFeatures, thumbnails: Sequence[bytes] | None = None
    ) -> Reference:
        """The reference as stored, with the hash of its features; when this returns it is safe on disk.

        Raises ReferenceExists when the id is taken. Thumbnails are one JPEG per second, empty where there is none.
        """
        check_id(reference.id)
        if len(features.rows) != reference.n_seconds or (thumbnails and len(thumbnails) != reference.n_seconds):
            raise ValueError(f"{reference.id}: features and thumbnails must be {reference.n_seconds} seconds long")
        if self._select("SELECT id FROM reference WHERE id = ?", reference.id):
            raise ReferenceExists(f"The id {reference.id} is taken; choose another with --id, or remove it first.")
        arrays = {"rows": features.rows, "informative": features.informative}
        content = save(arrays, metadata={"encoder_id": reference.encoder_id})
        reference = replace(reference, features_sha256=hashlib.sha256(content).hexdigest())
        with _told(self.data_dir):
            _write_file(self._features_path(reference), content)
            if thumbnails:
                _write_file(self._thumbnails_path(reference), _packed(thumbnails))
            row = _row_of(reference, bool(thumbnails))
            self._change("INSERT INTO reference VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        logger.info("added reference %s: %d s", reference.id, reference.n_seconds)
        return reference

    def remove(self, id: ReferenceId) -> Reference:
        """The reference that was there; UnknownReference if there was none. A damaged one can be removed too."""
        reference = _parsed(self._row(id))
        with _told(self.data_dir):
            self._change("DELETE FROM reference WHERE id = ?", (id,))
            self._features_path(reference).unlink(missing_ok=True)
            self._thumbnails_path(reference).unlink(missing_ok=True)
        logger.info("removed reference %s", id)
        return reference

    def _features_path(self, reference: Reference) -> Path:
        return self.data_dir / "features" / f"{reference.id}.{reference.features_sha256[:16]}.safetensors"

    def _thumbnails_path(self, reference: Reference) -> Path:
        return self.data_dir / "thumbnails" / f"{reference.id}.{reference.features_sha256[:16]}.jpegs"

    def _row(self, id: ReferenceId) -> Row:
        rows = self._select("SELECT * FROM reference WHERE id = ?", id)
        if not rows:
            raise UnknownReference(f"There is no reference {id}; `copywatch refs list` shows those there are.")
        return rows[0]

    def _select(self, sql: str, *values: str) -> list[Row]:
        with _told(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return []
            assert self._connection is not None
            return list(self._connection.execute(sql, values))

    def _connect_to_read(self) -> bool:
        """Whether there is a library to read; until a writer has made one there is not."""
        path = self.data_dir / "catalog.sqlite"
        if not path.exists():
            return False
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        if not _is_made(connection):
            connection.close()
            return False
        self._connection = connection
        return True

    def _create(self) -> None:
        path = self.data_dir / "catalog.sqlite"
        self._connection = db = apsw.Connection(str(path))
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        db.pragma("journal_mode", "wal")
        db.pragma("synchronous", "full")
        if not _is_made(db):
            with db:
                db.execute(SCHEMA)
            for directory in (self.data_dir, self.data_dir.parent):
                _sync_directory(directory)

    def _change(self, sql: str, values: Row) -> None:
        """Runs the statement and moves the generation on, both or neither."""
        if self._lock is None or self._connection is None:
            raise CatalogError(f"The library in {self.data_dir} is open for reading only.")
        with self._connection as db:
            db.execute(sql, values)
            db.execute("UPDATE library SET generation = generation + 1")

    def _clear_away_garbage(self) -> None:
        """Removes what a writer left that did not live to write the row; not while a row may be misread."""
        try:
            references = self.references()
        except DamagedReference:
            return
        known = {path(reference) for reference in references for path in (self._features_path, self._thumbnails_path)}
        for directory in ("features", "thumbnails"):
            for path in (self.data_dir / directory).iterdir():
                if path not in known:
                    logger.warning("cleared away %s, left by an interrupted writer", path.name)
                    path.unlink()


def check_id(id: str) -> ReferenceId:
    """The id as a ReferenceId; raises CatalogError for one that could not be a file's name."""
    if not ID_PATTERN.fullmatch(id):
        raise CatalogError(f"{id!r} cannot be an id: use up to 128 letters, digits, dots, dashes and underscores.")
    return ReferenceId(id)


def _row_of(reference: Reference, has_thumbnails: bool) -> Row:
    r = reference
    tags = json.dumps(r.tags, sort_keys=True)
    added_at = r.added_at.astimezone(UTC).isoformat()
    hashes = (r.encoder_id, r.features_sha256)
    row = (r.id, r.title, r.owner, tags, r.content_sha256, r.n_seconds, r.n_uninformative, *hashes, added_at)
    return (*row, int(has_thumbnails), _row_hash((*row, int(has_thumbnails))))


def _row_hash(row: Row) -> str:
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def _reference(row: Row) -> Reference:
    if _row_hash(row[:-1]) != row[-1]:
        raise _damaged(row[0], "its row in the catalogue has changed on disk")
    return _parsed(row)


def _parsed(row: Row) -> Reference:
    id, title, owner, tags, content, n_seconds, n_uninformative, encoder_id, features, added_at = row[:-2]
    when = datetime.fromisoformat(added_at)
    return Reference(
        id, title, owner, json.loads(tags), content, n_seconds, n_uninformative, encoder_id, features, when
    )


def _damaged(id: str, what: str) -> DamagedReference:
    again = f"run `copywatch refs rm {id}` and `copywatch refs add FILE --id {id}` again"
    return DamagedReference(f"Reference {id} is damaged: {what}; {again}.")


def _packed(thumbnails: Sequence[bytes]) -> bytes:
    """The JPEGs behind a table of where each is; the checksum begins at the second, so that none stands for another."""
    table, offset = bytearray(), THUMBNAIL.size * len(thumbnails)
    for second, jpeg in enumerate(thumbnails):
        table += THUMBNAIL.pack(offset, len(jpeg), zlib.crc32(jpeg, second))
        offset += len(jpeg)
    return bytes(table) + b"".join(thumbnails)


def _write_file(path: Path, content: bytes) -> None:
    """Writes the file so that it is there whole or not at all, and stays."""
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked(data_dir: Path) -> int:
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


def _is_made(connection: apsw.Connection) -> bool:
    version = connection.pragma("user_version")
    if version > SCHEMA_VERSION:
        raise CatalogError(f"This library was made by a newer Copywatch (format {version}); use that version.")
    return bool(version)


@contextmanager
def _told(data_dir: Path) -> Iterator[None]:
    """Turns errors of disk and database into a sentence that says what to do."""
    try:
        yield
    except (OSError, apsw.Error) as error:
        if isinstance(error, apsw.FullError) or getattr(error, "errno", None) == errno.ENOSPC:
            raise CatalogError(f"The disk of {data_dir} is full; free some space and try again.") from error
        if isinstance(error, apsw.CorruptError | apsw.NotADBError):
            name = data_dir / "catalog.sqlite"
            raise CatalogError(f"{name} is damaged; restore it from a backup or register anew.") from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CatalogError(
            f"The library in {data_dir} cannot be used ({reason}); check the path and its permissions, or set data_dir."
        ) from error
