"""The catalogue's tables: hashes of rows and their checksum. test_catalog.py damages whole catalogues."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest

from reference_db.errors import DamagedReference, StorageError
from reference_db.store.references import Reference, ReferenceId
from reference_db.store.sqlite import connect
from reference_db.store.tables import (
    SCHEMA_VERSION,
    CatalogChecksum,
    checksum_problem,
    create_database,
    has_tables,
    is_valid,
    recover_catalog,
    reference_of,
    row_of,
    select_rows,
)


def reference(id: str) -> Reference:
    when = datetime(2026, 3, 1, tzinfo=UTC)
    return Reference(ReferenceId(id), "Title", "", {}, "c" * 64, 10, 0, "enc-1", "f" * 64, when)


FILM, NEWS = reference("film"), reference("news")


def test_a_row_is_valid_until_a_column_changes() -> None:
    row = row_of(FILM)
    assert is_valid(row)
    assert reference_of(row) == FILM
    for column in range(len(row)):
        changed = (*row[:column], row[column] + "x", *row[column + 1 :])
        assert not is_valid(changed)
        with pytest.raises(DamagedReference, match="its row in the catalogue has changed"):
            reference_of(changed)


def test_a_checksum_does_not_depend_on_the_order_and_rows_can_be_subtracted() -> None:
    film, news = row_of(FILM), row_of(NEWS)
    both = CatalogChecksum.of(3, [film, news])
    assert CatalogChecksum.of(3, [news, film]) == both
    both.subtract([film])
    assert both == CatalogChecksum.of(3, [news])


def test_a_new_catalogue_has_its_rows_and_no_problem(tmp_path: Path) -> None:
    create_database(tmp_path / "catalog.sqlite", [NEWS, FILM], generation=7)
    with closing(connect(tmp_path / "catalog.sqlite", "read")) as db:
        assert has_tables(db)
        rows = select_rows(db, "reference")
        assert [reference_of(row) for row in rows] == [FILM, NEWS]
        assert CatalogChecksum.read(db) == CatalogChecksum.of(7, rows)
        assert checksum_problem(select_rows(db, "library"), rows, []) is None
        assert checksum_problem(select_rows(db, "library"), rows[:1], []) == "1 of 2 rows are missing"
        assert select_rows(db, "reference", "id", "news") == rows[1:]


def test_the_checksum_identifies_the_missing_references(tmp_path: Path) -> None:
    create_database(tmp_path / "catalog.sqlite", [NEWS, FILM], generation=7)
    with closing(connect(tmp_path / "catalog.sqlite", "write")) as db:
        db.execute("DELETE FROM reference WHERE id = 'news'")
    recovered = recover_catalog(tmp_path)
    assert (recovered.references, recovered.generation, recovered.n_missing) == ((FILM,), 7, 1)
    assert recovered.is_missing([NEWS])
    assert not recovered.is_missing([reference("other")])
    assert not recovered.is_missing([])


def test_nothing_is_recovered_from_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"nothing " * 1000)
    recovered = recover_catalog(tmp_path)
    assert (recovered.references, recovered.generation, recovered.n_missing) == ((), None, None)


def test_an_empty_file_has_no_tables_and_other_files_are_refused(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "file.sqlite", "create")) as db:
        assert not has_tables(db)
        db.execute("CREATE TABLE other (id TEXT)")
        with pytest.raises(apsw.CorruptError):
            has_tables(db)
        db.pragma("user_version", SCHEMA_VERSION + 1)
        with pytest.raises(StorageError, match="newer Copywatch"):
            has_tables(db)
