"""The library on disk: which references there are, and the features and thumbnails of each.

    catalog.sqlite                            one row per reference, the generation, which grows with every change, and
                                              a tally over all rows
    features/ID.HASH.safetensors              rows and informative seconds (references.py), SHA-256 in the row
    thumbnails/ID.HASH.jpegs                  one small JPEG per second, SHA-256 in the row
    writer.lock                               held by the one process that may write

A reference is there once its row is: the files are written aside, synced and renamed before it, and files without a
row are cleared away when the next writer opens the library. So whenever the power fails, a reference that was
acknowledged is whole, and one that was not is not there. Every row and file carries a hash, and bytes that do not
fit theirs raise DamagedReference; a row that is gone no longer fits the tally. The write-ahead log is emptied after
each change, since SQLite would take a damaged one for one that was never finished.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import apsw

from reference_db.errors import (
    CatalogError,
    CatalogLocked,
    DamagedReference,
    ReferenceExists,
    StorageError,
    UnknownReference,
)
from reference_db.references import (
    FEATURE_SIZE,
    Reference,
    ReferenceFeatures,
    ReferenceId,
    check_id,
    check_words,
    features_of,
    from_record,
    packed,
    record,
)

__all__ = ["FEATURE_SIZE", "Catalog", "Contents", "Reference", "ReferenceFeatures", "ReferenceId", "check_id"]

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_MS = 5000
SCHEMA_VERSION = 2
SCHEMA = (
    """CREATE TABLE reference (
    id TEXT PRIMARY KEY, content_sha256 TEXT NOT NULL, features_sha256 TEXT NOT NULL, record TEXT NOT NULL,
    row_sha256 TEXT NOT NULL
) STRICT, WITHOUT ROWID""",
    "CREATE INDEX reference_by_content ON reference (content_sha256)",
    """CREATE TABLE quarantine (
    id TEXT PRIMARY KEY, reason TEXT NOT NULL, row_sha256 TEXT NOT NULL
) STRICT, WITHOUT ROWID""",
    """CREATE TABLE library (
    generation INTEGER NOT NULL, n_rows INTEGER NOT NULL, tally TEXT NOT NULL, row_sha256 TEXT NOT NULL
) STRICT""",
)
THUMBNAIL = struct.Struct("<QII")  # offset, length and CRC-32 of one second's JPEG; length 0 where there is none
REPAIR = "run `copywatch refs verify --repair`, which makes it again from the feature files"

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What the library holds at one moment."""

    generation: int
    references: tuple[Reference, ...]  # those that may be searched, sorted by id
    damaged: dict[ReferenceId, str]  # those that may not, each with what is wrong
    problem: str | None  # what is wrong with the catalogue beyond that: rows are gone


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
            _make_directories(data_dir)
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
        rows = self._select("SELECT * FROM library")
        return int(rows[0][0]) if rows else 0

    def contents(self) -> Contents:
        """All that is there, as of one moment: the references, the damaged among them, and whether rows are gone."""
        library, rows, quarantine = self._read()
        references, damaged = [], {ReferenceId(row[0]): str(row[1]) for row in quarantine}
        for row in rows:
            if not _is_right(row):
                damaged[ReferenceId(row[0])] = "its row in the catalogue has changed on disk"
            elif row[0] not in damaged:
                references.append(_reference(row))
        problem = _tally_problem(library, rows, quarantine)
        return Contents(int(library[0][0]) if library else 0, tuple(references), damaged, problem)

    def references(self) -> tuple[Reference, ...]:
        """All references that may be searched, sorted by id; `contents` tells the damaged ones."""
        return self.contents().references

    def get(self, id: ReferenceId) -> Reference:
        """The reference of this id, or UnknownReference, or DamagedReference."""
        return _reference(self._row(id))

    def by_content(self, sha256: str) -> Reference | None:
        """The reference made from a file with these bytes."""
        rows = self._select("SELECT * FROM reference WHERE content_sha256 = ? ORDER BY id", sha256)
        return _reference(rows[0]) if rows else None

    def features(self, id: ReferenceId) -> ReferenceFeatures:
        """The reference's features, as they were written, or DamagedReference."""
        reference = self.get(id)
        try:
            content = self.features_path(reference).read_bytes()
        except OSError as error:
            self.get(id)  # removed meanwhile: unknown, not damaged
            raise DamagedReference(id, f"its feature file cannot be read ({error.strerror})") from error
        if hashlib.sha256(content).hexdigest() != reference.features_sha256:
            raise DamagedReference(id, "its feature file has changed on disk")
        return features_of(content)

    def thumbnail(self, id: ReferenceId, second: int) -> bytes | None:
        """The JPEG that shows this second, or None where none was kept."""
        reference = self.get(id)
        if not reference.thumbnails_sha256 or not 0 <= second < reference.n_seconds:
            return None
        try:
            with self.thumbnails_path(reference).open("rb") as pack:
                pack.seek(second * THUMBNAIL.size)
                offset, length, checksum = THUMBNAIL.unpack(pack.read(THUMBNAIL.size))
                pack.seek(offset)
                jpeg = pack.read(length)
        except (OSError, struct.error, OverflowError) as error:
            raise DamagedReference(id, "its thumbnails cannot be read") from error
        if len(jpeg) != length or zlib.crc32(jpeg, second) != checksum:
            raise DamagedReference(id, f"its thumbnail of second {second} has changed on disk")
        return jpeg or None

    def add(
        self, reference: Reference, features: ReferenceFeatures, thumbnails: Sequence[bytes] | None = None
    ) -> Reference:
        """The reference as stored, with the hashes of its files; when this returns it is safe on disk.

        Raises ReferenceExists when the id is taken. Thumbnails are one JPEG per second, empty where there is none.
        """
        if self._select("SELECT id FROM reference WHERE id = ?", check_id(reference.id)):
            raise ReferenceExists(f"The id {reference.id} is taken; choose another with --id, or remove it first.")
        reference = self._store(reference, features, thumbnails, instead_of=None)
        logger.info("added reference %s: %d s", reference.id, reference.n_seconds)
        return reference

    def replace(
        self, reference: Reference, features: ReferenceFeatures, thumbnails: Sequence[bytes] | None = None
    ) -> Reference:
        """The reference as stored in place of the one that has its id, in one step: nobody sees neither or both."""
        reference = self._store(reference, features, thumbnails, instead_of=self._row(reference.id))
        logger.info("replaced reference %s: %d s", reference.id, reference.n_seconds)
        return reference

    def remove(self, id: ReferenceId) -> None:
        """Takes the reference out, for good when this returns; UnknownReference if there is none.

        A damaged one can be removed too.
        """
        row = self._row(id)
        with _told(self.data_dir):
            self._change(minus=[row])
            self._remove_files(row, keep=None)
        logger.info("removed reference %s", id)

    def quarantine(self, reasons: dict[ReferenceId, str]) -> None:
        """Makes these, and no others, the references that are kept out of every search until they are whole again."""
        stored = self._select("SELECT * FROM quarantine ORDER BY id")
        if {row[0]: row[1] for row in stored} == reasons:
            return
        with _told(self.data_dir):
            self._change(minus=stored, plus=[_hashed((id, reason)) for id, reason in sorted(reasons.items())])

    def features_path(self, reference: Reference) -> Path:
        """Where its features are."""
        return self.data_dir / "features" / f"{reference.id}.{reference.features_sha256[:16]}.safetensors"

    def thumbnails_path(self, reference: Reference) -> Path:
        """Where its thumbnails are, if it has any."""
        return self.data_dir / "thumbnails" / f"{reference.id}.{reference.thumbnails_sha256[:16]}.jpegs"

    def files(self) -> list[Path]:
        """Every file of features and thumbnails, those of no reference too."""
        with _told(self.data_dir):
            folders = [self.data_dir / name for name in ("features", "thumbnails")]
            return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir())

    def faults(self) -> list[str]:
        """What SQLite itself finds wrong with the catalogue's pages."""
        return [str(row[0]) for row in self._select("PRAGMA integrity_check") if row[0] != "ok"]

    def _store(
        self,
        reference: Reference,
        features: ReferenceFeatures,
        thumbnails: Sequence[bytes] | None,
        instead_of: Row | None,
    ) -> Reference:
        check_words(reference.title, reference.owner, reference.tags)
        if len(features.rows) != reference.n_seconds or (thumbnails and len(thumbnails) != reference.n_seconds):
            raise ValueError(f"{reference.id}: features and thumbnails must be {reference.n_seconds} seconds long")
        pictures = _packed_thumbnails(thumbnails) if thumbnails else None
        shown = "" if pictures is None else hashlib.sha256(pictures).hexdigest()
        reference = replace(reference, features_sha256="", thumbnails_sha256=shown)
        content = packed(reference, features)
        reference = replace(reference, features_sha256=hashlib.sha256(content).hexdigest())
        with _told(self.data_dir):
            self._check_writable()
            if pictures is not None:
                _write_file(self.thumbnails_path(reference), pictures)
            _write_file(self.features_path(reference), content)
            self._change(minus=[instead_of] if instead_of else [], plus=[row_of(reference)])
            if instead_of:
                self._remove_files(instead_of, keep=reference)
        return reference

    def _change(self, *, minus: Sequence[Row] = (), plus: Sequence[Row] = ()) -> None:
        """Takes these rows out and puts those in, with the tally and the next generation: all of it or nothing.

        Rows of three columns are the quarantine's, the others the references'. Taking a reference out ends its
        quarantine.
        """
        self._check_writable()
        assert self._connection is not None
        try:
            with self._connection as db:
                tally = _Tally.read(db)
                for row in minus:
                    tally.take(db.execute("DELETE FROM quarantine WHERE id = ? RETURNING *", (row[0],)))
                    if len(row) > 3:
                        tally.take(db.execute("DELETE FROM reference WHERE id = ? RETURNING *", (row[0],)))
                for row in plus:
                    table = "quarantine VALUES (?, ?, ?)" if len(row) == 3 else "reference VALUES (?, ?, ?, ?, ?)"
                    db.execute(f"INSERT INTO {table}", row)
                    tally.put(row)
                if not all(map(_is_right, minus)):
                    tally.recount(db)
                tally.write(db)
        except (apsw.IOError, apsw.FullError):
            # Whether it was committed is not known any more, and a failed sync must not be tried again: whoever opens
            # the library next finds out.
            self.close()
            raise
        self._empty_log()

    def _empty_log(self) -> None:
        """Moves the change from the log to its place; where a reader stands in the way, the next change does it."""
        assert self._connection is not None
        try:
            self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:
            logger.info("a reader holds the catalogue's log; it is emptied with the next change")
        except (apsw.IOError, apsw.FullError) as error:
            logger.warning("the catalogue's log could not be emptied: %s", error)
            self.close()  # what was committed stands, but nothing more goes through this connection

    def _check_writable(self) -> None:
        if self._lock is None or self._connection is None:
            raise CatalogError(f"The library in {self.data_dir} is open for reading only, or was closed by a fault.")

    def _remove_files(self, row: Row, keep: Reference | None) -> None:
        """Removes the files that this row named; the change stands, so what cannot go now goes at the next open."""
        kept = {self.features_path(keep), self.thumbnails_path(keep)} if keep else set()
        try:
            for path in set(self._files_of(row)) - kept:
                path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            logger.warning("files of %s could not be removed yet: %s", row[0], error)

    def _files_of(self, row: Row) -> list[Path]:
        if not _is_right(row):  # then it may name the wrong ones
            return [path for path in self.files() if path.name.rsplit(".", 2)[0] == row[0]]
        reference = _reference(row)
        return [self.features_path(reference), self.thumbnails_path(reference)]

    def _row(self, id: ReferenceId) -> Row:
        rows = self._select("SELECT * FROM reference WHERE id = ?", id)
        if not rows or rows[0][0] != id:
            raise UnknownReference(f"There is no reference {id}; `copywatch refs list` shows those there are.")
        return rows[0]

    def _read(self) -> tuple[list[Row], list[Row], list[Row]]:
        """All rows of library, references and quarantine, as of one moment."""
        with _told(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return [], [], []
            assert self._connection is not None
            with self._connection as db:  # one transaction, whatever a writer does meanwhile
                library = list(db.execute("SELECT * FROM library"))
                rows = list(db.execute("SELECT * FROM reference ORDER BY id"))
                quarantine = list(db.execute("SELECT * FROM quarantine ORDER BY id"))
            return library, rows, quarantine

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
                for statement in SCHEMA:
                    db.execute(statement)
                _Tally(-1, 0, 0).write(db, new=True)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            _sync_directory(self.data_dir)
        self._empty_log()

    def _clear_away_garbage(self) -> None:
        """Removes what a writer left that did not live to write the row; not while a row may be gone or misread."""
        library, rows, quarantine = self._read()
        if _tally_problem(library, rows, quarantine) or not all(map(_is_right, rows)):
            logger.warning("the catalogue is damaged; %s", REPAIR)
            return
        known = {path for row in rows for path in self._files_of(row)}
        for path in self.files():
            if path not in known:
                logger.warning("cleared away %s, left by an interrupted writer", path.name)
                path.unlink()


@dataclass(slots=True)
class _Tally:
    """How many rows there are, and the sum of their hashes: what a row that is gone does not fit any more."""

    generation: int
    n_rows: int
    total: int

    @classmethod
    def of(cls, generation: int, rows: Iterable[Row]) -> Self:
        tally = cls(generation, 0, 0)
        for row in rows:
            tally.put(row)
        return tally

    @classmethod
    def read(cls, db: apsw.Connection) -> Self:
        library = list(db.execute("SELECT * FROM library"))
        if len(library) != 1 or not _is_right(library[0]):
            raise apsw.CorruptError("the tally of its rows has changed")
        generation, n_rows, total, _ = library[0]
        return cls(generation, n_rows, int(total, 16))

    def put(self, row: Row) -> None:
        self.n_rows += 1
        self.total = (self.total + _number(row)) % (1 << 256)

    def take(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.n_rows -= 1
            self.total = (self.total - _number(row)) % (1 << 256)

    def recount(self, db: apsw.Connection) -> None:
        """Counts anew, since a damaged row was taken out; not where rows are gone, which would hide that."""
        rows = [*db.execute("SELECT * FROM reference"), *db.execute("SELECT * FROM quarantine")]
        if len(rows) == self.n_rows:
            self.total = _Tally.of(0, rows).total

    def row(self) -> Row:
        return _hashed((self.generation, self.n_rows, f"{self.total:064x}"))

    def write(self, db: apsw.Connection, *, new: bool = False) -> None:
        """Writes it as the next generation."""
        self.generation += 1
        if not new:
            db.execute("DELETE FROM library")
        db.execute("INSERT INTO library VALUES (?, ?, ?, ?)", self.row())


def row_of(reference: Reference) -> Row:
    """The reference as the catalogue keeps it."""
    return _hashed((reference.id, reference.content_sha256, reference.features_sha256, record(reference)))


def _hashed(row: Row) -> Row:
    return (*row, hashlib.sha256(json.dumps(row).encode()).hexdigest())


def _is_right(row: Row) -> bool:
    return _hashed(row[:-1]) == row


def _number(row: Row) -> int:
    """The hash of a row as a number: of one that is damaged what its bytes give, which fits no tally."""
    return int(_hashed(row[:-1])[-1], 16)


def _tally_problem(library: list[Row], rows: list[Row], quarantine: list[Row]) -> str | None:
    """What is wrong with the catalogue that no row of a reference tells by itself."""
    if not library and not rows:
        return None  # there is no library yet
    if len(library) != 1 or not _is_right(library[0]):
        return "the tally of its rows has changed on disk"
    generation, n_rows = library[0][:2]
    n_found = len(rows) + len(quarantine)
    if n_found < n_rows:
        return f"{n_rows - n_found} of {n_rows} rows are gone"
    if n_found == n_rows and not all(map(_is_right, rows)):
        return None  # that row is named
    return None if _Tally.of(generation, [*rows, *quarantine]).row() == library[0] else "rows have changed on disk"


def _reference(row: Row) -> Reference:
    if not _is_right(row):
        raise DamagedReference(row[0], "its row in the catalogue has changed on disk")
    return from_record(row[3], row[2])


def _packed_thumbnails(thumbnails: Sequence[bytes]) -> bytes:
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


def _make_directories(data_dir: Path) -> None:
    """Makes the library's directories, so that they stay."""
    missing = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
    for path in [*reversed(missing), data_dir / "features", data_dir / "thumbnails"]:
        if not path.is_dir():
            path.mkdir(exist_ok=True)
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
    """Whether the catalogue has its tables; raises StorageError where they are not those that we make."""
    version = connection.pragma("user_version")
    if version > SCHEMA_VERSION:
        raise StorageError(f"This library was made by a newer Copywatch (format {version}); use that version.")
    tables = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
    if version == 0 and not tables:
        return False
    if version == 1:
        raise StorageError("This library was made by an older Copywatch (format 1); move it away and register anew.")
    if version != SCHEMA_VERSION or tables != set(SCHEMA):
        raise apsw.CorruptError("its tables are not those that were made")
    return True


@contextmanager
def _told(data_dir: Path) -> Iterator[None]:
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
