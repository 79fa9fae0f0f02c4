"""The catalogue's tables: rows that carry their hash, and a tally over all of them.

SQLite has no checksums of its pages. So every row carries a SHA-256 over the rest of it, and one row more, that of the
library, counts the rows and sums their hashes: what was changed no longer fits its hash, and what is gone is missed by
the tally.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import apsw

from reference_db.errors import DamagedReference, StorageError
from reference_db.store.references import Reference, from_record, record
from reference_db.store.sqlite import connect, transaction

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
COLUMNS = {  # of each table, and whether they hold words
    "reference": tuple((name, True) for name in ("id", "content_sha256", "features_sha256", "record", "row_sha256")),
    "quarantine": tuple((name, True) for name in ("id", "reason", "row_sha256")),
    "library": (("generation", False), ("n_rows", False), ("tally", True), ("row_sha256", True)),
}

Row = tuple[Any, ...]


def each(db: apsw.Connection, table: str, column: str = "", value: str = "") -> Iterator[Row]:
    """The rows of a table, in order of their ids; those with this value in this column, if one is named.

    Words are read as bytes: those of a damaged row may be no words any more, and must not stop the others.
    """
    names = ", ".join(f"CAST({name} AS BLOB)" if is_text else name for name, is_text in COLUMNS[table])
    where = f" WHERE {column} = ?" if column else ""
    order = " ORDER BY id" if table != "library" else ""
    for row in db.execute(f"SELECT {names} FROM {table}{where}{order}", (value,) if column else ()):  # noqa: S608
        yield tuple(cell.decode(errors="backslashreplace") if isinstance(cell, bytes) else cell for cell in row)


def select(db: apsw.Connection, table: str, column: str = "", value: str = "") -> list[Row]:
    """All of `each`."""
    return list(each(db, table, column, value))


@dataclass(slots=True)
class Tally:
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
        library = select(db, "library")
        if len(library) != 1 or not is_right(library[0]):
            raise apsw.CorruptError("the tally of its rows has changed")
        generation, n_rows, total, _ = library[0]
        return cls(generation, n_rows, int(total, 16))

    def put(self, row: Row) -> None:
        self.n_rows += 1
        self.total = (self.total + number_of(row)) % (1 << 256)

    def take(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.n_rows -= 1
            self.total = (self.total - number_of(row)) % (1 << 256)

    def recount(self, db: apsw.Connection) -> None:
        """Counts anew, since a damaged row was taken out; not where rows are gone, which would hide that."""
        rows = select(db, "reference") + select(db, "quarantine")
        if len(rows) == self.n_rows:
            self.total = Tally.of(0, rows).total

    def row(self) -> Row:
        return hashed((self.generation, self.n_rows, f"{self.total:064x}"))

    def write(self, db: apsw.Connection) -> None:
        """Writes it as the next generation."""
        self.generation += 1
        db.execute("DELETE FROM library")
        db.execute("INSERT INTO library VALUES (?, ?, ?, ?)", self.row())


def row_of(reference: Reference) -> Row:
    """The reference as the catalogue keeps it."""
    return hashed((reference.id, reference.content_sha256, reference.features_sha256, record(reference)))


def hashed(row: Row) -> Row:
    # A damaged page may hold values of any kind.
    return (*row, hashlib.sha256(json.dumps(row, default=repr).encode()).hexdigest())


def is_right(row: Row) -> bool:
    return hashed(row[:-1]) == row


def number_of(row: Row) -> int:
    """The hash of a row as a number: of one that is damaged what its bytes give, which fits no tally."""
    return int(hashed(row[:-1])[-1], 16)


def generation_of(library: list[Row]) -> int:
    """The generation that the library's row tells: 0 where there is none yet, -1 where it is damaged."""
    if not library:
        return 0
    return int(library[0][0]) if is_right(library[0]) else -1


def tally_of(library: list[Row]) -> str:
    """The hash of the library's row; empty where there is none or it is damaged."""
    return str(library[0][-1]) if library and is_right(library[0]) else ""


def tally_problem(library: list[Row], rows: list[Row], quarantine: list[Row]) -> str | None:
    """What is wrong with the catalogue that no row of a reference tells by itself."""
    if not library and not rows:
        return None  # there is no library yet
    if len(library) != 1 or not is_right(library[0]):
        return "the tally of its rows has changed on disk"
    generation, n_rows = library[0][:2]
    n_found = len(rows) + len(quarantine)
    if n_found < n_rows:
        return f"{n_rows - n_found} of {n_rows} rows are gone"
    if n_found == n_rows and not all(map(is_right, rows)):
        return None  # that row is named
    return None if Tally.of(generation, [*rows, *quarantine]).row() == library[0] else "rows have changed on disk"


def reference_of(row: Row) -> Reference:
    if not is_right(row):
        raise DamagedReference(row[0], "its row in the catalogue has changed on disk")
    return from_record(row[3], row[2])


@dataclass(frozen=True, slots=True)
class Salvage:
    """What can be believed of a catalogue that may be damaged."""

    references: tuple[Reference, ...]  # whose rows are right
    generation: int | None  # None where that is not known any more
    n_missing: int | None  # rows that are gone or wrong; None where not even that is known
    missing: int  # the sum of their hashes

    def is_missing(self, references: Sequence[Reference]) -> bool:
        """Whether these are those whose rows are missing, beyond doubt."""
        return len(references) == self.n_missing and self.missing == Tally.of(0, map(row_of, references)).total


def salvage(data_dir: Path) -> Salvage:
    """Reads what can be read of the catalogue, however damaged; a library must be held to write."""
    tables: dict[str, list[Row]] = {"library": [], "reference": [], "quarantine": []}
    path = data_dir / "catalog.sqlite"
    with suppress(apsw.Error), closing(connect(path, "write")) as db:  # what cannot be read counts as missing
        for table, rows in tables.items():
            with suppress(apsw.Error):
                rows.extend(row for row in each(db, table) if is_right(row))
    references = tuple(reference_of(row) for row in tables["reference"])
    if len(tables["library"]) != 1:
        return Salvage(references, None, None, 0)
    generation, n_rows, total, _ = tables["library"][0]
    tally = Tally(generation, n_rows, int(total, 16))
    tally.take([*tables["reference"], *tables["quarantine"]])
    return Salvage(references, generation, tally.n_rows, tally.total)


def make(path: Path, references: Iterable[Reference], generation: int) -> None:
    """Makes a catalogue of these references in a file that is not there yet; when this returns all of it is."""
    rows = [row_of(reference) for reference in references]
    with closing(connect(path, "create")) as db:
        with transaction(db):
            for statement in SCHEMA:
                db.execute(statement)
            db.executemany("INSERT INTO reference VALUES (?, ?, ?, ?, ?)", rows)
            db.execute("INSERT INTO library VALUES (?, ?, ?, ?)", Tally.of(generation, rows).row())
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)  # closing does it too, but would not report a failure


def is_made(connection: apsw.Connection) -> bool:
    """Whether the catalogue has its tables; raises an error where they are not those that we make."""
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
