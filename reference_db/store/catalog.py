"""The library on disk: its references, and the features and thumbnails of each.

    catalog.sqlite                            one row per reference, the generation, which grows with every change, and
                                              a checksum over all rows
    features/ID.HASH.safetensors              rows and informative seconds (references.py), SHA-256 in the row
    thumbnails/ID.HASH.jpegs                  two small JPEGs per second, SHA-256 in the row
    writer.lock                               locked by the one process that may write

A reference exists once its row does: its files are written, synced and renamed before the row, and the next writer that
opens the library removes files without a row. So whenever the power fails, a reference that was acknowledged is
complete, and one that was not does not exist. Every row and file has a hash, and bytes that do not match it raise
DamagedReference; a missing row breaks the checksum. Each change ends with a checkpoint that empties the write-ahead
log, since SQLite would treat a damaged log as one that was never finished.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import apsw

from reference_db.errors import (
    CatalogError,
    DamagedReference,
    NotAReference,
    ReferenceExists,
    StorageError,
    UnknownReference,
)
from reference_db.store.disk import (
    PRIVATE_FILE,
    REPAIR,
    create_directories,
    lock_for_writing,
    storage_errors,
    sync_directory,
    write_file,
    write_pieces,
)
from reference_db.store.feature_files import StoredFeatures, features_id, file_chunks, file_header
from reference_db.store.references import (
    FEATURE_SIZE,
    MAX_SECONDS,
    Features,
    Reference,
    ReferenceFeatures,
    ReferenceId,
    check_id,
    check_texts,
)
from reference_db.store.sqlite import connect, transaction
from reference_db.store.tables import (
    SCHEMA_VERSION,
    CatalogChecksum,
    RecoveredCatalog,
    Row,
    checksum_of,
    checksum_problem,
    create_database,
    generation_of,
    has_tables,
    is_valid,
    recover_catalog,
    reference_of,
    row_of,
    select_rows,
    with_hash,
)
from reference_db.store.thumbnails import read_thumbnail, thumbnail_chunks, thumbnails_per_second

__all__ = ["FEATURE_SIZE", "Catalog", "Contents", "Reference", "ReferenceFeatures", "ReferenceId", "check_id"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of the library at one moment."""

    generation: int
    references: tuple[Reference, ...]  # searchable ones, sorted by id
    damaged: dict[ReferenceId, str]  # the others, each with its fault
    problem: str | None  # damage of the catalogue beyond that, such as missing rows
    # The hash of all that: a library restored from a backup may reach a known generation with other content.
    checksum: str = field(default="", compare=False)


class Catalog:
    """The library in one directory; use `Catalog.open`, in one thread at a time.

    A reader sees each change as soon as it is committed, and an empty library if there is none yet.
    """

    def __init__(self, data_dir: Path, lock: int | None, *, must_exist: bool = False) -> None:
        self.data_dir = data_dir
        self._must_exist = must_exist
        self._fault: str | None = None  # a disk error, after which nothing more is written
        self._lock = lock
        self._connection: apsw.Connection | None = None

    @classmethod
    def open(cls, data_dir: Path, *, write: bool = False, must_exist: bool = False) -> Self:
        """The library in `data_dir`; only one process at a time may have it open to write (CatalogLocked).

        To a reader a missing library is empty; with `must_exist` it is a StorageError, for a reader that has seen it
        before and must not confuse a lost disk with an empty library.
        """
        if not write:
            return cls(data_dir, None, must_exist=must_exist)
        with storage_errors(data_dir):
            create_directories(data_dir)
            catalog = cls(data_dir, lock_for_writing(data_dir))
        try:
            with storage_errors(data_dir):
                # A change that a killed writer left in the log, invisible to readers, may become visible until the log
                # is empty; its files must stay until then.
                if catalog._connect_to_write():
                    catalog._remove_orphaned_files()
        except BaseException:
            catalog.close()
            raise
        return catalog

    @classmethod
    def rebuild(cls, data_dir: Path, choose: Callable[[RecoveredCatalog], Iterable[Reference]]) -> Path:
        """Replaces a catalogue that may be damaged by one of the chosen references; the path of the old one's backup.

        `choose` gets what can still be read and returns the references of the new one; their files must exist.
        """
        path = data_dir / "catalog.sqlite"
        with storage_errors(data_dir):
            lock = lock_for_writing(data_dir)
            try:
                recovered = recover_catalog(data_dir)
                references = list(choose(recovered))
                backup = _back_up(path)
                # Monitors reload when the generation differs; if the old one is unknown, the clock's surely does.
                generation = int(time.time()) if recovered.generation is None else recovered.generation + 1
                _create(path, references, generation)
            finally:
                os.close(lock)
        return backup

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the library and releases the writer's lock."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def generation(self) -> int:
        """A number that grows with every change; -1 while it is damaged."""
        return generation_of(self._select("library"))

    def checksum(self) -> str:
        """A hash that changes with every change; empty if it is damaged or there is no library yet."""
        return checksum_of(self._select("library"))

    def contents(self) -> Contents:
        """One consistent view: the references, the damaged ones, and whether rows are missing."""
        library, rows, quarantine = self._read()
        references, damaged = [], {ReferenceId(str(row[0])): str(row[1]) for row in quarantine}
        for row in rows:
            if not is_valid(row):
                damaged[ReferenceId(str(row[0]))] = "its row in the catalogue has changed on disk"
            elif row[0] not in damaged:
                reference = reference_of(row)
                if (fault := length_fault(reference)) is not None:  # registered before there was a limit
                    damaged[reference.id] = fault
                else:
                    references.append(reference)
        problem = checksum_problem(library, rows, quarantine)
        return Contents(generation_of(library), tuple(references), damaged, problem, checksum_of(library))

    def references(self) -> tuple[Reference, ...]:
        """All searchable references, sorted by id; `contents` has the damaged ones too."""
        return self.contents().references

    def get(self, id: ReferenceId) -> Reference:
        """The reference of this id, or UnknownReference, or DamagedReference."""
        return reference_of(self._row(id))

    def by_content(self, sha256: str) -> Reference | None:
        """The reference of a video file with this hash; ignores damaged rows."""
        rows = [row for row in self._select("reference", "content_sha256", sha256) if is_valid(row)]
        return reference_of(rows[0]) if rows else None

    def is_quarantined(self, id: ReferenceId) -> bool:
        """Whether the reference is excluded from search because its features are damaged."""
        return bool(self._select("quarantine", "id", id))

    def features(self, id: ReferenceId) -> ReferenceFeatures:
        """The reference's features in memory, verified, or DamagedReference."""
        stored = self.stored_features(id)
        return ReferenceFeatures(stored.rows[:], stored.informative)

    def stored_features(self, id: ReferenceId) -> StoredFeatures:
        """The reference's features in their file, verified, or DamagedReference."""
        while True:
            reference = self.get(id)
            with suppress(UnknownReference):  # replaced meanwhile; if it was removed, `get` raises
                return self.exact_features(reference)

    def exact_features(self, reference: Reference) -> StoredFeatures:
        """The features of this version of the reference; DamagedReference, or UnknownReference once it is replaced.

        The whole file is read and compared with its hash, in pieces; then it stays open.
        """
        features = self.open_features(reference)
        if features.sha256() != reference.features_sha256 or len(features.rows) != reference.n_seconds:
            raise DamagedReference(reference.id, "its feature file has changed on disk")
        return features

    def open_features(self, reference: Reference) -> StoredFeatures:
        """As `exact_features`, but the content is not verified: its hash was checked before."""
        if (fault := length_fault(reference)) is not None:
            raise DamagedReference(reference.id, fault)
        try:
            return StoredFeatures(self.features_path(reference))
        except OSError as error:
            if self.get(reference.id) != reference:
                raise UnknownReference(f"The reference {reference.id} was replaced meanwhile.") from None
            raise DamagedReference(reference.id, f"its feature file cannot be read ({error.strerror})") from error
        except NotAReference as error:
            raise DamagedReference(reference.id, "its feature file has changed on disk") from error

    def thumbnail(self, id: ReferenceId, second: int) -> bytes | None:
        """The JPEG of the middle of this second, else of its beginning; None if none is stored."""
        found = self.thumbnails(id, second + 0.5, second + 1) or self.thumbnails(id, second, second + 0.5)
        return found[0][1] if found else None

    def thumbnails(self, id: ReferenceId, start_s: float, end_s: float) -> list[tuple[float, bytes]]:
        """The stored JPEGs of this span of the reference, each with its time.

        Two per second, at its beginning and its middle; one of earlier versions' thumbnails, at its middle.
        """
        reference = self.get(id)
        if not reference.thumbnails_sha256:
            return []
        try:
            with self.thumbnails_path(reference).open("rb") as pack:
                per_second = thumbnails_per_second(pack, reference.n_seconds)
                return [
                    (time_s, jpeg)
                    for number, time_s in _thumbnail_times(per_second, reference.n_seconds, start_s, end_s)
                    if (jpeg := read_thumbnail(pack, number))
                ]
        except (OSError, ValueError) as error:
            if self.get(id) != reference:  # replaced meanwhile
                return self.thumbnails(id, start_s, end_s)
            what = "its thumbnails cannot be read" if isinstance(error, OSError) else str(error)
            raise DamagedReference(id, what) from error

    def add(self, reference: Reference, features: Features, thumbnails: Sequence[bytes] | None = None) -> Reference:
        """The reference as stored, with the hashes of its files; when this returns, it survives a power cut.

        Raises ReferenceExists if the id is taken. Thumbnails are two JPEGs per second, at its beginning and its
        middle, empty where there is none; or one, at its middle.
        """
        if self._select("reference", "id", check_id(reference.id)):
            raise ReferenceExists(f"The id {reference.id} is taken; choose another with --id, or remove it first.")
        reference = self._store(reference, features, thumbnails, replaced=None)
        logger.info("added reference %s: %d s", reference.id, reference.n_seconds)
        return reference

    def replace(self, reference: Reference, features: Features, thumbnails: Sequence[bytes] | None = None) -> Reference:
        """The reference as stored in place of the one with its id; readers see the old one or the new one."""
        reference = self._store(reference, features, thumbnails, replaced=self._row(reference.id))
        logger.info("replaced reference %s: %d s", reference.id, reference.n_seconds)
        return reference

    def remove(self, id: ReferenceId) -> None:
        """Removes the reference, damaged or not; durable when this returns. UnknownReference if there is none."""
        row = self._row(id)
        with storage_errors(self.data_dir):
            self._change_rows(remove=[row])
            self._remove_files(row, keep=None)
        logger.info("removed reference %s", id)

    def quarantine(self, reasons: dict[ReferenceId, str]) -> None:
        """Excludes exactly these references from search, until they are replaced or repaired."""
        stored = self._select("quarantine")
        if {row[0]: row[1] for row in stored} == reasons:
            return
        with storage_errors(self.data_dir):
            self._change_rows(remove=stored, add=[with_hash((id, reason)) for id, reason in sorted(reasons.items())])

    def features_path(self, reference: Reference) -> Path:
        """The path of its feature file."""
        return self.data_dir / "features" / f"{reference.id}.{reference.features_sha256[:16]}.safetensors"

    def thumbnails_path(self, reference: Reference) -> Path:
        """The path of its thumbnail file, if it has any thumbnails."""
        return self.data_dir / "thumbnails" / f"{reference.id}.{reference.thumbnails_sha256[:16]}.jpegs"

    def files(self) -> list[Path]:
        """Every feature and thumbnail file, also those without a reference."""
        with storage_errors(self.data_dir):
            folders = [self.data_dir / name for name in ("features", "thumbnails")]
            return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir())

    def integrity_errors(self) -> list[str]:
        """What SQLite's own integrity check reports."""
        with storage_errors(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return []
            assert self._connection is not None
            return [str(row[0]) for row in self._connection.execute("PRAGMA integrity_check") if row[0] != "ok"]

    def _store(
        self,
        reference: Reference,
        features: Features,
        thumbnails: Sequence[bytes] | None,
        replaced: Row | None,
    ) -> Reference:
        check_texts(reference.title, reference.owner, reference.tags)
        lengths = (reference.n_seconds, 2 * reference.n_seconds)
        if len(features.rows) != reference.n_seconds or (thumbnails and len(thumbnails) not in lengths):
            raise ValueError(f"{reference.id}: features and thumbnails must be {reference.n_seconds} seconds long")
        if (fault := length_fault(reference)) is not None:
            raise CatalogError(f"{reference.id} cannot be stored: {fault}.")
        pictures_sha256 = _sha256(thumbnail_chunks(thumbnails)) if thumbnails else ""
        reference = replace(reference, features_sha256="", thumbnails_sha256=pictures_sha256)
        header = file_header(reference, features)
        reference = replace(
            reference,
            features_sha256=_sha256(file_chunks(header, features)),
            features_id=features_id(reference.encoder_id, features),
        )
        with storage_errors(self.data_dir):
            self._check_writable()
            if thumbnails:
                write_pieces(self.thumbnails_path(reference), thumbnail_chunks(thumbnails), pictures_sha256)
            write_pieces(self.features_path(reference), file_chunks(header, features), reference.features_sha256)
            self._change_rows(remove=[replaced] if replaced else [], add=[row_of(reference)])
            if replaced:
                self._remove_files(replaced, keep=reference)
        return reference

    def _change_rows(self, *, remove: Sequence[Row] = (), add: Sequence[Row] = ()) -> None:
        """Removes and adds these rows in one transaction, with the checksum and the next generation.

        Rows of three columns belong to the quarantine, the others are references. Removing a reference ends its
        quarantine.
        """
        self._check_writable()
        assert self._connection is not None
        try:
            with transaction(self._connection) as db:
                checksum = CatalogChecksum.read(db)
                for row in remove:
                    checksum.subtract(select_rows(db, "quarantine", "id", row[0]))
                    db.execute("DELETE FROM quarantine WHERE id = ?", (row[0],))
                    if len(row) > 3:
                        checksum.subtract([row])
                        db.execute("DELETE FROM reference WHERE id = ?", (row[0],))
                for row in add:
                    table = "quarantine VALUES (?, ?, ?)" if len(row) == 3 else "reference VALUES (?, ?, ?, ?, ?)"
                    db.execute(f"INSERT INTO {table}", row)
                    checksum.add(row)
                if not all(map(is_valid, remove)):
                    checksum.recount(db)
                checksum.write(db)
        except (apsw.IOError, apsw.FullError) as error:
            # Whether it was committed is unknown now, and a failed sync must not be retried: the next open finds out.
            self._close_after(error)
            raise
        try:
            self._checkpoint()
        except (apsw.IOError, apsw.FullError) as error:
            logger.warning("checkpoint of the catalogue failed: %s", error)
            self._close_after(error)  # the commit is valid, but this connection must not be used again
            sync_directory(self.data_dir)  # the commit is in the log, whose name must survive a power cut

    def _checkpoint(self) -> bool:
        """Moves the change from the log to the database, or leaves that to the next change if a reader blocks it."""
        assert self._connection is not None
        try:
            self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:
            logger.info("a reader blocks the checkpoint of the catalogue; the next change retries it")
            sync_directory(
                self.data_dir
            )  # the log's name must survive; SQLite would not report that its own sync failed
            return False
        return True

    def _close_after(self, error: apsw.Error) -> None:
        """Closes a library whose disk has failed, without a checkpoint: it must not retry the failed write."""
        self._fault = str(error)
        if self._connection is not None:
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.close()

    def _check_writable(self) -> None:
        if self._fault:
            raise StorageError(
                f"The library in {self.data_dir} was closed after a disk error ({self._fault}); open it again."
            )
        if self._lock is None or self._connection is None:
            raise StorageError(f"The library in {self.data_dir} is open for reading only.")

    def _remove_files(self, row: Row, keep: Reference | None) -> None:
        """Removes the files of this row; the change is committed, so the next open retries what fails now."""
        needed = {self.features_path(keep), self.thumbnails_path(keep)} if keep else set()
        try:
            for path in set(self._files_of(row)) - needed:
                path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            logger.warning("could not remove files of %s, the next open retries: %s", row[0], error)

    def _files_of(self, row: Row) -> list[Path]:
        if not is_valid(row):  # its hashes may be those of other files
            return [path for path in self.files() if path.name.rsplit(".", 2)[0] == row[0]]
        reference = reference_of(row)
        return [self.features_path(reference), self.thumbnails_path(reference)]

    def _row(self, id: ReferenceId) -> Row:
        rows = self._select("reference", "id", id)
        if not rows or rows[0][0] != id:
            raise UnknownReference(f"There is no reference {id}; `copywatch refs list` lists all.")
        return rows[0]

    def _read(self) -> tuple[list[Row], list[Row], list[Row]]:
        """All rows of library, references and quarantine, in one consistent view."""
        with storage_errors(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return [], [], []
            assert self._connection is not None
            with self._connection as db:  # one transaction, so that a writer cannot change it meanwhile
                return select_rows(db, "library"), select_rows(db, "reference"), select_rows(db, "quarantine")
        raise AssertionError  # `with` of a connection re-raises every error

    def _select(self, table: str, column: str = "", value: str = "") -> list[Row]:
        with storage_errors(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return []
            assert self._connection is not None
            return select_rows(self._connection, table, column, value)

    def _connect_to_read(self) -> bool:
        """Whether there is a library to read; the first writer creates it."""
        path = self.data_dir / "catalog.sqlite"
        if not path.exists():
            if self._must_exist:
                raise StorageError(f"The library in {self.data_dir} is gone; mount its disk, or restore it.")
            return False
        connection = connect(path, "read")
        if not has_tables(connection):
            connection.close()
            return False
        self._connection = connection
        return True

    def _connect_to_write(self) -> bool:
        """Opens the database, created if necessary; whether the log is empty now."""
        path = self.data_dir / "catalog.sqlite"
        if not path.exists():
            _create(path)
        self._connection = connect(path, "write")
        if not has_tables(self._connection):
            raise apsw.CorruptError("it is empty")
        if self._connection.pragma("user_version") != SCHEMA_VERSION:
            self._connection.pragma("user_version", SCHEMA_VERSION)  # earlier versions cannot read the rows of this one
        return self._checkpoint()

    def _remove_orphaned_files(self) -> None:
        """Removes files that a killed writer left without a row; not while a row may be missing or damaged."""
        library, rows, quarantine = self._read()
        if checksum_problem(library, rows, quarantine) or not all(map(is_valid, rows)):
            logger.warning("the catalogue is damaged; %s", REPAIR)
            return
        known = {path for row in rows for path in self._files_of(row)}
        for path in self.files():
            if path not in known:
                logger.warning("removed %s, left by an interrupted writer", path.name)
                path.unlink()


def length_fault(reference: Reference) -> str | None:
    """Why a reference is too long to be searched; None if it is not."""
    if reference.n_seconds <= MAX_SECONDS:
        return None
    return f"it lasts {reference.n_seconds} s, longer than the {MAX_SECONDS // 3600} hours that a reference may have"


def _sha256(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _create(path: Path, references: Iterable[Reference] = (), generation: int = 0) -> None:
    """Creates a catalogue of these references beside `path` and renames it, so that no reader sees half of one."""
    temporary = path.with_name(path.name + ".part")
    for leftover in path.parent.glob(temporary.name + "*"):
        leftover.unlink()
    create_database(temporary, references, generation)
    for log in (path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        log.unlink(missing_ok=True)  # SQLite would apply the old catalogue's log to the new one
    temporary.rename(path)
    sync_directory(path.parent)


def _back_up(path: Path) -> Path:
    """Copies the file; the path of the copy, beside it."""
    number = 1
    while (backup := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    if path.exists():
        write_file(backup, path.read_bytes(), mode=PRIVATE_FILE)
    return backup


def _thumbnail_times(per_second: int, n_seconds: int, start_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    """Number and time of each thumbnail in this span."""
    first_s = 0.5 if per_second == 1 else 0.0
    first, last = (math.ceil((time_s - first_s) * per_second) for time_s in (start_s, end_s))
    for number in range(max(0, first), min(per_second * n_seconds, last)):
        yield number, first_s + number / per_second
