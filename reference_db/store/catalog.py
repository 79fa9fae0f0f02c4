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

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import apsw

from reference_db.errors import DamagedReference, ReferenceExists, StorageError, UnknownReference
from reference_db.store.disk import (
    REPAIR,
    lock_for_writing,
    make_directories,
    storage_errors,
    sync_directory,
    write_file,
)
from reference_db.store.references import (
    FEATURE_SIZE,
    Reference,
    ReferenceFeatures,
    ReferenceId,
    check_id,
    check_words,
    features_of,
    packed,
)
from reference_db.store.sqlite import connect, transaction
from reference_db.store.tables import (
    Row,
    Salvage,
    Tally,
    generation_of,
    hashed,
    is_made,
    is_right,
    make,
    reference_of,
    row_of,
    salvage,
    select,
    tally_of,
    tally_problem,
)
from reference_db.store.thumbnails import packed_thumbnails, thumbnail_in

__all__ = ["FEATURE_SIZE", "Catalog", "Contents", "Reference", "ReferenceFeatures", "ReferenceId", "check_id"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Contents:
    """What the library holds at one moment."""

    generation: int
    references: tuple[Reference, ...]  # those that may be searched, sorted by id
    damaged: dict[ReferenceId, str]  # those that may not, each with what is wrong
    problem: str | None  # what is wrong with the catalogue beyond that: rows are gone
    # The hash of all that: a library put back from a backup may come to a known generation by another way.
    tally: str = field(default="", compare=False)


class Catalog:
    """The library in one directory; use `Catalog.open`, in one thread at a time.

    A reader sees each change as soon as it is committed, and an empty library where there is none yet.
    """

    def __init__(self, data_dir: Path, lock: int | None, *, must_exist: bool = False) -> None:
        self.data_dir = data_dir
        self._must_exist = must_exist
        self._fault: str | None = None  # of the disk, after which nothing more is written
        self._lock = lock
        self._connection: apsw.Connection | None = None

    @classmethod
    def open(cls, data_dir: Path, *, write: bool = False, must_exist: bool = False) -> Self:
        """The library in `data_dir`; only one process at a time may have it open to write (CatalogLocked).

        To a reader a library that is not there is empty; with `must_exist` that is a StorageError, for one who has seen
        it and must not take a disk that is gone for a library whose references are.
        """
        if not write:
            return cls(data_dir, None, must_exist=must_exist)
        with storage_errors(data_dir):
            make_directories(data_dir)
            catalog = cls(data_dir, lock_for_writing(data_dir))
        try:
            with storage_errors(data_dir):
                # A change that a killed writer wrote to the log, but showed to nobody, may come to light as long as the
                # log is not emptied; its files are no garbage till then.
                if catalog._connect_to_write():
                    catalog._clear_away_garbage()
        except BaseException:
            catalog.close()
            raise
        return catalog

    @classmethod
    def make_again(cls, data_dir: Path, choose: Callable[[Salvage], Iterable[Reference]]) -> Path:
        """Puts a catalogue of the chosen references in the place of one that may be damaged, which is kept aside.

        `choose` is told what can still be read and says which references there are; their files must be. Where the old
        catalogue was kept comes back.
        """
        path = data_dir / "catalog.sqlite"
        with storage_errors(data_dir):
            lock = lock_for_writing(data_dir)
            try:
                found = salvage(data_dir)
                references = list(choose(found))
                kept = _copied_aside(path)
                # Monitors look whether the number is another one; the clock's is, where the old one is not known.
                generation = int(time.time()) if found.generation is None else found.generation + 1
                _create(path, references, generation)
            finally:
                os.close(lock)
        return kept

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
        """A number that grows with every change; -1 while it is damaged."""
        return generation_of(self._select("library"))

    def tally(self) -> str:
        """A word that changes with every change; empty while it is damaged, and where there is no library yet."""
        return tally_of(self._select("library"))

    def contents(self) -> Contents:
        """All that is there, as of one moment: the references, the damaged among them, and whether rows are gone."""
        library, rows, quarantine = self._read()
        references, damaged = [], {ReferenceId(str(row[0])): str(row[1]) for row in quarantine}
        for row in rows:
            if not is_right(row):
                damaged[ReferenceId(str(row[0]))] = "its row in the catalogue has changed on disk"
            elif row[0] not in damaged:
                references.append(reference_of(row))
        problem = tally_problem(library, rows, quarantine)
        return Contents(generation_of(library), tuple(references), damaged, problem, tally_of(library))

    def references(self) -> tuple[Reference, ...]:
        """All references that may be searched, sorted by id; `contents` tells the damaged ones."""
        return self.contents().references

    def get(self, id: ReferenceId) -> Reference:
        """The reference of this id, or UnknownReference, or DamagedReference."""
        return reference_of(self._row(id))

    def by_content(self, sha256: str) -> Reference | None:
        """The reference made from a file with these bytes; one whose row is damaged is not believed."""
        rows = [row for row in self._select("reference", "content_sha256", sha256) if is_right(row)]
        return reference_of(rows[0]) if rows else None

    def is_quarantined(self, id: ReferenceId) -> bool:
        """Whether the reference is kept out of every search, since its features are damaged."""
        return bool(self._select("quarantine", "id", id))

    def features(self, id: ReferenceId) -> ReferenceFeatures:
        """The reference's features, as they were written, or DamagedReference."""
        while True:
            reference = self.get(id)
            with suppress(UnknownReference):  # replaced meanwhile; where it was removed, `get` says so
                return self.exact_features(reference)

    def exact_features(self, reference: Reference) -> ReferenceFeatures:
        """The features of this very reference, or DamagedReference; UnknownReference once it is removed or replaced."""
        try:
            content = self.features_path(reference).read_bytes()
        except OSError as error:
            if self.get(reference.id) != reference:
                raise UnknownReference(f"The reference {reference.id} was replaced meanwhile.") from None
            raise DamagedReference(reference.id, f"its feature file cannot be read ({error.strerror})") from error
        if hashlib.sha256(content).hexdigest() != reference.features_sha256:
            raise DamagedReference(reference.id, "its feature file has changed on disk")
        return features_of(content)

    def thumbnail(self, id: ReferenceId, second: int) -> bytes | None:
        """The JPEG that shows this second, or None where none was kept."""
        reference = self.get(id)
        if not reference.thumbnails_sha256 or not 0 <= second < reference.n_seconds:
            return None
        try:
            with self.thumbnails_path(reference).open("rb") as pack:
                jpeg = thumbnail_in(pack, second)
        except (OSError, ValueError) as error:
            if self.get(id) != reference:  # replaced meanwhile
                return self.thumbnail(id, second)
            what = "its thumbnails cannot be read" if isinstance(error, OSError) else str(error)
            raise DamagedReference(id, what) from error
        return jpeg or None

    def add(
        self, reference: Reference, features: ReferenceFeatures, thumbnails: Sequence[bytes] | None = None
    ) -> Reference:
        """The reference as stored, with the hashes of its files; when this returns it is safe on disk.

        Raises ReferenceExists when the id is taken. Thumbnails are one JPEG per second, empty where there is none.
        """
        if self._select("reference", "id", check_id(reference.id)):
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
        with storage_errors(self.data_dir):
            self._change(minus=[row])
            self._remove_files(row, keep=None)
        logger.info("removed reference %s", id)

    def quarantine(self, reasons: dict[ReferenceId, str]) -> None:
        """Makes these, and no others, the references that are kept out of every search until they are whole again."""
        stored = self._select("quarantine")
        if {row[0]: row[1] for row in stored} == reasons:
            return
        with storage_errors(self.data_dir):
            self._change(minus=stored, plus=[hashed((id, reason)) for id, reason in sorted(reasons.items())])

    def features_path(self, reference: Reference) -> Path:
        """Where its features are."""
        return self.data_dir / "features" / f"{reference.id}.{reference.features_sha256[:16]}.safetensors"

    def thumbnails_path(self, reference: Reference) -> Path:
        """Where its thumbnails are, if it has any."""
        return self.data_dir / "thumbnails" / f"{reference.id}.{reference.thumbnails_sha256[:16]}.jpegs"

    def files(self) -> list[Path]:
        """Every file of features and thumbnails, those of no reference too."""
        with storage_errors(self.data_dir):
            folders = [self.data_dir / name for name in ("features", "thumbnails")]
            return sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir())

    def faults(self) -> list[str]:
        """What SQLite itself finds wrong with the catalogue's pages."""
        with storage_errors(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return []
            assert self._connection is not None
            return [str(row[0]) for row in self._connection.execute("PRAGMA integrity_check") if row[0] != "ok"]

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
        pictures = packed_thumbnails(thumbnails) if thumbnails else None
        shown = "" if pictures is None else hashlib.sha256(pictures).hexdigest()
        reference = replace(reference, features_sha256="", thumbnails_sha256=shown)
        content = packed(reference, features)
        reference = replace(reference, features_sha256=hashlib.sha256(content).hexdigest())
        with storage_errors(self.data_dir):
            self._check_writable()
            if pictures is not None:
                write_file(self.thumbnails_path(reference), pictures)
            write_file(self.features_path(reference), content)
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
            with transaction(self._connection) as db:
                tally = Tally.read(db)
                for row in minus:
                    tally.take(select(db, "quarantine", "id", row[0]))
                    db.execute("DELETE FROM quarantine WHERE id = ?", (row[0],))
                    if len(row) > 3:
                        tally.take([row])
                        db.execute("DELETE FROM reference WHERE id = ?", (row[0],))
                for row in plus:
                    table = "quarantine VALUES (?, ?, ?)" if len(row) == 3 else "reference VALUES (?, ?, ?, ?, ?)"
                    db.execute(f"INSERT INTO {table}", row)
                    tally.put(row)
                if not all(map(is_right, minus)):
                    tally.recount(db)
                tally.write(db)
        except (apsw.IOError, apsw.FullError) as error:
            # Whether it was committed is not known any more, and a failed sync must not be tried again: whoever opens
            # the library next finds out.
            self._close_after(error)
            raise
        try:
            self._empty_log()
        except (apsw.IOError, apsw.FullError) as error:
            logger.warning("the catalogue's log could not be emptied: %s", error)
            self._close_after(error)  # what was committed stands, but nothing more goes through this connection
            sync_directory(self.data_dir)  # it stands in the log, whose name must stay

    def _empty_log(self) -> bool:
        """Moves the change from the log to its place; where a reader stands in the way, the next change does it."""
        assert self._connection is not None
        try:
            self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:
            logger.info("a reader holds the catalogue's log; it is emptied with the next change")
            sync_directory(self.data_dir)  # the log's name must stay; that SQLite's own sync failed it would not say
            return False
        return True

    def _close_after(self, error: apsw.Error) -> None:
        """Lets go of a library whose disk has failed, as it is: closing must not try once more what failed."""
        self._fault = str(error)
        if self._connection is not None:
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.close()

    def _check_writable(self) -> None:
        if self._fault:
            raise StorageError(
                f"The library in {self.data_dir} was closed after a fault ({self._fault}); open it again."
            )
        if self._lock is None or self._connection is None:
            raise StorageError(f"The library in {self.data_dir} is open for reading only.")

    def _remove_files(self, row: Row, keep: Reference | None) -> None:
        """Removes the files that this row named; the change stands, so what cannot go now goes at the next open."""
        kept = {self.features_path(keep), self.thumbnails_path(keep)} if keep else set()
        try:
            for path in set(self._files_of(row)) - kept:
                path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            logger.warning("files of %s could not be removed yet: %s", row[0], error)

    def _files_of(self, row: Row) -> list[Path]:
        if not is_right(row):  # then it may name the wrong ones
            return [path for path in self.files() if path.name.rsplit(".", 2)[0] == row[0]]
        reference = reference_of(row)
        return [self.features_path(reference), self.thumbnails_path(reference)]

    def _row(self, id: ReferenceId) -> Row:
        rows = self._select("reference", "id", id)
        if not rows or rows[0][0] != id:
            raise UnknownReference(f"There is no reference {id}; `copywatch refs list` shows those there are.")
        return rows[0]

    def _read(self) -> tuple[list[Row], list[Row], list[Row]]:
        """All rows of library, references and quarantine, as of one moment."""
        with storage_errors(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return [], [], []
            assert self._connection is not None
            with self._connection as db:  # one transaction, whatever a writer does meanwhile
                return select(db, "library"), select(db, "reference"), select(db, "quarantine")
        raise AssertionError  # `with` of a connection passes every error on

    def _select(self, table: str, column: str = "", value: str = "") -> list[Row]:
        with storage_errors(self.data_dir):
            if self._connection is None and not self._connect_to_read():
                return []
            assert self._connection is not None
            return select(self._connection, table, column, value)

    def _connect_to_read(self) -> bool:
        """Whether there is a library to read; until a writer has made one there is not."""
        path = self.data_dir / "catalog.sqlite"
        if not path.exists():
            if self._must_exist:
                raise StorageError(f"The library in {self.data_dir} is gone; mount its disk, or restore it.")
            return False
        connection = connect(path, "read")
        if not is_made(connection):
            connection.close()
            return False
        self._connection = connection
        return True

    def _connect_to_write(self) -> bool:
        """Whether the log is empty now."""
        path = self.data_dir / "catalog.sqlite"
        if not path.exists():
            _create(path)
        self._connection = connect(path, "write")
        if not is_made(self._connection):
            raise apsw.CorruptError("it is empty")
        return self._empty_log()

    def _clear_away_garbage(self) -> None:
        """Removes what a writer left that did not live to write the row; not while a row may be gone or misread."""
        library, rows, quarantine = self._read()
        if tally_problem(library, rows, quarantine) or not all(map(is_right, rows)):
            logger.warning("the catalogue is damaged; %s", REPAIR)
            return
        known = {path for row in rows for path in self._files_of(row)}
        for path in self.files():
            if path not in known:
                logger.warning("cleared away %s, left by an interrupted writer", path.name)
                path.unlink()


def _create(path: Path, references: Iterable[Reference] = (), generation: int = 0) -> None:
    """Makes a catalogue of these aside and puts it in its place, so that no reader meets one that is half made."""
    aside = path.with_name(path.name + ".part")
    for leftover in path.parent.glob(aside.name + "*"):
        leftover.unlink()
    make(aside, references, generation)
    for log in (path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        log.unlink(missing_ok=True)  # one of a catalogue that was there would be taken for this one's
    aside.rename(path)
    sync_directory(path.parent)


def _copied_aside(path: Path) -> Path:
    """Where a copy of the file was put, beside it."""
    number = 1
    while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    if path.exists():
        write_file(kept, path.read_bytes())
    return kept
