"""The catalogue's tables: rows that carry their own hash, and a checksum over all of them.

SQLite has no page checksums. So every row carries a SHA-256 of its other columns, and the one row of the table
`library` counts the rows and sums their hashes: a changed row no longer matches its hash, and a missing row no longer
matches the checksum.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import apsw

from reference_db.errors import DamagedReference, StorageError
from reference_db.store.references import Reference, record_of, reference_from_record
from reference_db.store.sqlite import connect, transaction

SCHEMA_VERSION = 3  # 2 has the same tables; its rows have no `features_id`
READABLE_VERSIONS = (2, SCHEMA_VERSION)
# Compared with the file's own schema, so a change here is a new version. `tally` is the checksum.
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
COLUMNS = {  # of each table: name, and whether it is text
    "reference": tuple((name, True) for name in ("id", "content_sha256", "features_sha256", "record", "row_sha256")),
    "quarantine": tuple((name, True) for name in ("id", "reason", "row_sha256")),
    "library": (("generation", False), ("n_rows", False), ("tally", True), ("row_sha256", True)),
}

Row = tuple[Any, ...]


def iter_rows(db: apsw.Connection, table: str, column: str = "", value: str = "") -> Iterator[Row]:
    """The rows of a table, sorted by id; only those with this value in this column, if one is named.

    Text is read as bytes: that of a damaged row may be invalid UTF-8, which must not hide the other rows.
    """
    names = ", ".join(f"CAST({name} AS BLOB)" if is_text else name for name, is_text in COLUMNS[table])
    where = f" WHERE {column} = ?" if column else ""
    order = " ORDER BY id" if table != "library" else ""
    for row in db.execute(f"SELECT {names} FROM {table}{where}{order}", (value,) if column else ()):  # noqa: S608
        yield tuple(cell.decode(errors="backslashreplace") if isinstance(cell, bytes) else cell for cell in row)


def select_rows(db: apsw.Connection, table: str, column: str = "", value: str = "") -> list[Row]:
    """`iter_rows` as a list."""
    return list(iter_rows(db, table, column, value))


@dataclass(slots=True)
class CatalogChecksum:
    """The number of rows and the sum of their hashes; a missing row breaks both."""

    generation: int
    n_rows: int
    total: int

    @classmethod
    def of(cls, generation: int, rows: Iterable[Row]) -> Self:
        checksum = cls(generation, 0, 0)
        for row in rows:
            checksum.add(row)
        return checksum

    @classmethod
    def read(cls, db: apsw.Connection) -> Self:
        library = select_rows(db, "library")
        if len(library) != 1 or not is_valid(library[0]):
            raise apsw.CorruptError("the checksum of its rows has changed")
        generation, n_rows, total, _ = library[0]
        return cls(generation, n_rows, int(total, 16))

    def add(self, row: Row) -> None:
        self.n_rows += 1
        self.total = (self.total + hash_number(row)) % (1 << 256)

    def subtract(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.n_rows -= 1
            self.total = (self.total - hash_number(row)) % (1 << 256)

    def recount(self, db: apsw.Connection) -> None:
        """Sums again after a damaged row was removed; not if rows are missing, which it would hide."""
        rows = select_rows(db, "reference") + select_rows(db, "quarantine")
        if len(rows) == self.n_rows:
            self.total = CatalogChecksum.of(0, rows).total

    def row(self) -> Row:
        return with_hash((self.generation, self.n_rows, f"{self.total:064x}"))

    def write(self, db: apsw.Connection) -> None:
        """Writes it as the next generation."""
        self.generation += 1
        db.execute("DELETE FROM library")
        db.execute("INSERT INTO library VALUES (?, ?, ?, ?)", self.row())


def row_of(reference: Reference) -> Row:
    """The reference's row in the catalogue."""
    record = record_of(reference, with_features_id=True)
    return with_hash((reference.id, reference.content_sha256, reference.features_sha256, record))


def reference_of(row: Row) -> Reference:
    if not is_valid(row):
        raise DamagedReference(row[0], "its row in the catalogue has changed on disk")
    return reference_from_record(row[3], row[2])


def with_hash(row: Row) -> Row:
    # A damaged page may hold values of any type.
    return (*row, hashlib.sha256(json.dumps(row, default=repr).encode()).hexdigest())


def is_valid(row: Row) -> bool:
    return with_hash(row[:-1]) == row


def hash_number(row: Row) -> int:
    """The row's hash as a number, computed from its content; that of a damaged row matches no checksum."""
    return int(with_hash(row[:-1])[-1], 16)


def generation_of(library: list[Row]) -> int:
    """The generation in the library's row: 0 if there is no row yet, -1 if it is damaged."""
    if not library:
        return 0
    return int(library[0][0]) if is_valid(library[0]) else -1


def checksum_of(library: list[Row]) -> str:
    """The hash of the library's row; empty if there is none or it is damaged."""
    return str(library[0][-1]) if library and is_valid(library[0]) else ""


def checksum_problem(library: list[Row], rows: list[Row], quarantine: list[Row]) -> str | None:
    """Damage of the catalogue that no single row of a reference shows."""
    if not library and not rows:
        return None  # there is no library yet
    if len(library) != 1 or not is_valid(library[0]):
        return "the checksum of its rows has changed on disk"
    generation, n_rows = library[0][:2]
    n_found = len(rows) + len(quarantine)
    if n_found < n_rows:
        return f"{n_rows - n_found} of {n_rows} rows are missing"
    if n_found == n_rows and not all(map(is_valid, rows)):
        return None  # that row is reported by itself
    expected = CatalogChecksum.of(generation, [*rows, *quarantine]).row()
    return None if expected == library[0] else "rows have changed on disk"


@dataclass(frozen=True, slots=True)
class RecoveredCatalog:
    """The valid rows of a catalogue that may be damaged, and what its checksum says about the others."""

    references: tuple[Reference, ...]  # of the valid rows
    generation: int | None  # None if unknown
    n_missing: int | None  # rows that are missing or invalid; None if unknown
    missing_total: int  # the sum of their hashes

    def is_missing(self, references: Sequence[Reference]) -> bool:
        """Whether exactly these references' rows are missing, proven by the checksum."""
        if len(references) != self.n_missing:
            return False
        earlier = [replace(reference, features_id="") for reference in references]  # as version 2 wrote them
        return self.missing_total in (CatalogChecksum.of(0, map(row_of, rows)).total for rows in (references, earlier))


def recover_catalog(data_dir: Path) -> RecoveredCatalog:
    """Reads all readable rows of a catalogue, however damaged; the caller holds the writer's lock."""
    tables: dict[str, list[Row]] = {"library": [], "reference": [], "quarantine": []}
    path = data_dir / "catalog.sqlite"
    with suppress(apsw.Error), closing(connect(path, "write")) as db:  # unreadable rows count as missing
        for table, rows in tables.items():
            with suppress(apsw.Error):
                rows.extend(row for row in iter_rows(db, table) if is_valid(row))
    references = tuple(reference_of(row) for row in tables["reference"])
    if len(tables["library"]) != 1:
        return RecoveredCatalog(references, None, None, 0)
    generation, n_rows, total, _ = tables["library"][0]
    missing = CatalogChecksum(generation, n_rows, int(total, 16))
    missing.subtract([*tables["reference"], *tables["quarantine"]])
    return RecoveredCatalog(references, generation, missing.n_rows, missing.total)


def create_database(path: Path, references: Iterable[Reference], generation: int) -> None:
    """Creates a catalogue of these references in a new file; all of it is on disk when this returns."""
    rows = [row_of(reference) for reference in references]
    with closing(connect(path, "create")) as db:
        with transaction(db):
            for statement in SCHEMA:
                db.execute(statement)
            db.executemany("INSERT INTO reference VALUES (?, ?, ?, ?, ?)", rows)
            db.execute("INSERT INTO library VALUES (?, ?, ?, ?)", CatalogChecksum.of(generation, rows).row())
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)  # closing does it too, but would not report a failure


def has_tables(connection: apsw.Connection) -> bool:
    """Whether the catalogue has its tables; raises StorageError or CorruptError if it has others."""
    version = connection.pragma("user_version")
    if version > SCHEMA_VERSION:
        raise StorageError(f"A newer Copywatch made this library (format {version}); use that version.")
    tables = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
    if version == 0 and not tables:
        return False
    if version == 1:
        raise StorageError("An older Copywatch made this library (format 1); move it away and register again.")
    if version not in READABLE_VERSIONS or tables != set(SCHEMA):
        raise apsw.CorruptError("its tables are not those of a catalogue")
    return True
