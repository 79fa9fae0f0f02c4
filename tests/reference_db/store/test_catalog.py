"""The library on disk: durable references, detected damage, and nothing half written by a killed writer."""

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest

from reference_db.errors import (
    CatalogError,
    CatalogLocked,
    DamagedReference,
    ReferenceExists,
    StorageError,
    UnknownReference,
)
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, Contents, check_id
from reference_db.store.tables import row_of
from reference_db.store.verification import repair
from tests.support.sample_references import FILM, NEWS, some_features, some_reference


def test_a_stored_reference_is_read_back_unchanged(tmp_path: Path) -> None:
    features = some_features(10)
    with Catalog.open(tmp_path, write=True) as catalog:
        stored = catalog.add(some_reference(), features, [b"jpeg %d" % s if s != 3 else b"" for s in range(10)])
    with Catalog.open(tmp_path) as catalog:
        assert catalog.references() == (stored,)
        assert catalog.get(FILM) == stored
        assert replace(stored, features_sha256="", thumbnails_sha256="", features_id="") == some_reference()
        assert catalog.by_content("c" * 64) == stored
        assert catalog.by_content("d" * 64) is None
        loaded = catalog.features(FILM)
        assert np.array_equal(loaded.rows, features.rows)
        assert np.array_equal(loaded.informative, features.informative)
        assert not loaded.rows.flags.writeable
        assert [catalog.thumbnail(FILM, s) for s in (0, 3, 9, 10, -1)] == [b"jpeg 0", None, b"jpeg 9", None, None]
        assert catalog.thumbnails(FILM, 1.6, 4.6) == [(2.5, b"jpeg 2"), (4.5, b"jpeg 4")]


def test_two_thumbnails_per_second_are_read_by_time(tmp_path: Path) -> None:
    jpegs = [b"" if number in (5, 8, 9) else b"jpeg %d" % number for number in range(20)]
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10), jpegs)
        assert [catalog.thumbnail(FILM, s) for s in (0, 2, 4, 10)] == [b"jpeg 1", b"jpeg 4", None, None]
        assert catalog.thumbnails(FILM, -1, 1.5) == [(0.0, b"jpeg 0"), (0.5, b"jpeg 1"), (1.0, b"jpeg 2")]
        assert catalog.thumbnails(FILM, 9.2, 99) == [(9.5, b"jpeg 19")]
        with pytest.raises(ValueError, match="must be 10 seconds long"):
            catalog.add(replace(some_reference(), id=NEWS), some_features(10), jpegs[:15])


def test_references_are_sorted_and_counted_by_generation(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        assert catalog.generation() == 0
        catalog.add(some_reference(NEWS), some_features(10))
        catalog.add(some_reference(FILM), some_features(10))
        assert [reference.id for reference in catalog.references()] == [FILM, NEWS]
        assert catalog.generation() == 2
        catalog.remove(NEWS)
        assert catalog.generation() == 3
        assert [reference.id for reference in catalog.references()] == [FILM]
        assert catalog.thumbnail(FILM, 0) is None
    assert len(list((tmp_path / "features").iterdir())) == 1


def test_a_removed_reference_loses_its_files_and_can_be_added_again(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10), [b"jpeg"] * 10)
        catalog.remove(FILM)
        assert not any((tmp_path / "features").iterdir())
        assert not any((tmp_path / "thumbnails").iterdir())
        with pytest.raises(UnknownReference, match="no reference film-1"):
            catalog.get(FILM)
        with pytest.raises(UnknownReference):
            catalog.features(FILM)
        with pytest.raises(UnknownReference):
            catalog.remove(FILM)
        catalog.add(some_reference(), some_features(10, seed=1))
        assert catalog.get(FILM).n_seconds == 10


def test_a_taken_id_is_refused(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        stored = catalog.add(some_reference(), some_features(10))
        with pytest.raises(ReferenceExists, match="film-1 is taken"):
            catalog.add(some_reference(), some_features(10, seed=1))
        assert catalog.references() == (stored,)
        assert catalog.generation() == 1


@pytest.mark.parametrize("id", ["", "../up", "a/b", ".hidden", "a b", "é", "x" * 129, "line\n", "-dash"])
def test_ids_that_could_not_be_file_names_are_refused(id: str) -> None:
    with pytest.raises(CatalogError, match="cannot be an id"):
        check_id(id)


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as writer:
        with pytest.raises(CatalogLocked, match="Another process"):
            Catalog.open(tmp_path, write=True)
        with Catalog.open(tmp_path) as reader:
            assert reader.references() == ()
            writer.add(some_reference(), some_features(10))
            assert [reference.id for reference in reader.references()] == [FILM]
            assert reader.generation() == 1
            writer.remove(FILM)
            assert reader.references() == ()
    with Catalog.open(tmp_path, write=True) as writer:
        assert writer.generation() == 2


def test_a_reader_sees_a_library_that_is_created_later(tmp_path: Path) -> None:
    data_dir = tmp_path / "later"
    with Catalog.open(data_dir) as reader:
        assert reader.references() == ()
        assert reader.generation() == 0
        assert reader.by_content("c" * 64) is None
        with pytest.raises(UnknownReference):
            reader.get(FILM)
        assert not data_dir.exists()
        with Catalog.open(data_dir, write=True) as writer:
            writer.add(some_reference(), some_features(10))
        assert [reference.id for reference in reader.references()] == [FILM]


def test_a_library_that_must_exist_is_not_empty_if_its_disk_is_gone(tmp_path: Path) -> None:
    with (
        Catalog.open(tmp_path / "gone", must_exist=True) as catalog,
        pytest.raises(StorageError, match="is gone; mount its disk"),
    ):
        catalog.contents()


def test_exact_features_are_those_of_one_version(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        old = catalog.add(some_reference(), some_features(10))
        new = catalog.replace(some_reference(n_seconds=7), some_features(7))
        assert len(catalog.exact_features(new).rows) == len(catalog.features(FILM).rows) == 7
        with pytest.raises(UnknownReference, match="replaced meanwhile"):
            catalog.exact_features(old)
        catalog.remove(FILM)
        with pytest.raises(UnknownReference, match="no reference"):
            catalog.exact_features(new)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
    with Catalog.open(tmp_path) as catalog, pytest.raises(CatalogError, match="reading only"):
        catalog.remove(FILM)
    with Catalog.open(tmp_path) as catalog:
        assert [reference.id for reference in catalog.references()] == [FILM]


def test_a_directory_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CatalogError, match="set data_dir"):
        Catalog.open(tmp_path / "file" / "library", write=True)


def test_the_sqlite_in_use_has_no_wal_reset_bug_and_syncs_fully(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        connection = catalog._connection
        assert connection is not None
        assert connection.pragma("journal_mode") == "wal"
        assert connection.pragma("synchronous") == 2
    assert tuple(map(int, apsw.sqlite_lib_version().split("."))) >= (3, 51, 3)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_every_damaged_byte_of_a_feature_file_is_detected(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
        (path,) = (tmp_path / "features").iterdir()
        size = path.stat().st_size
        for at in np.random.default_rng(0).integers(0, size, 40):
            flip(path, int(at))
            with pytest.raises(
                DamagedReference, match=r"film-1 is damaged.*copywatch refs add FILE.*copywatch refs rm film-1"
            ):
                catalog.features(FILM)
            flip(path, int(at))
        catalog.features(FILM)
        os.truncate(path, size - 1)
        with pytest.raises(DamagedReference):
            catalog.features(FILM)
        path.unlink()
        with pytest.raises(DamagedReference, match="cannot be read"):
            catalog.features(FILM)
        catalog.remove(FILM)
        assert catalog.contents() == Contents(2, (), {}, None)


def test_every_damaged_byte_of_a_thumbnail_is_detected(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(n_seconds=5), some_features(5), [b"jpeg %d" % s for s in range(5)])
        (path,) = (tmp_path / "thumbnails").iterdir()
        for at in range(0, path.stat().st_size, 3):
            flip(path, at)
            n_damaged = 0
            for second in range(5):
                try:
                    assert catalog.thumbnail(FILM, second) == b"jpeg %d" % second
                except DamagedReference:
                    n_damaged += 1
            assert n_damaged == 1
            flip(path, at)


def edit(data_dir: Path, *statements: str) -> None:
    """Changes the catalogue from outside, as a bad disk would."""
    connection = apsw.Connection(str(data_dir / "catalog.sqlite"))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_damaged_row_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
        news = catalog.add(some_reference(NEWS), some_features(10, seed=1))
    edit(tmp_path, "UPDATE reference SET record = replace(record, 'Owner', 'Thief') WHERE id = 'film-1'")
    with Catalog.open(tmp_path, write=True) as catalog:
        assert catalog.references() == (news,)
        contents = catalog.contents()
        assert contents.damaged == {FILM: "its row in the catalogue has changed on disk"}
        assert contents.problem is None  # none beyond that
        for read in (catalog.get, catalog.features):
            with pytest.raises(DamagedReference, match="row in the catalogue"):
                read(FILM)
        assert len(list((tmp_path / "features").iterdir())) == 2  # no file is removed in doubt
        catalog.remove(FILM)
        assert catalog.contents() == Contents(3, (news,), {}, None)
        assert len(list((tmp_path / "features").iterdir())) == 1


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DELETE FROM reference WHERE id = 'film-1'", "1 of 2 rows are missing"),
        ("DELETE FROM reference", "2 of 2 rows are missing"),
        ("UPDATE library SET n_rows = 1", "the checksum of its rows has changed on disk"),
        ("UPDATE library SET generation = 7", "the checksum of its rows has changed on disk"),
        ("DELETE FROM library", "the checksum of its rows has changed on disk"),
        ("INSERT INTO library SELECT * FROM library", "the checksum of its rows has changed on disk"),
        ("INSERT INTO quarantine VALUES ('news', 'x', 'y')", "rows have changed on disk"),
    ],
)
def test_missing_rows_are_detected(tmp_path: Path, damage: str, problem: str) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
        catalog.add(some_reference(NEWS), some_features(10, seed=1))
    edit(tmp_path, damage)
    with Catalog.open(tmp_path) as catalog:
        assert catalog.contents().problem == problem
    with Catalog.open(tmp_path, write=True) as catalog:
        assert len(catalog.files()) == 2  # no file is removed in doubt
        assert catalog.contents().problem == problem


def test_a_missing_row_is_detected_after_further_changes_too(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
    edit(tmp_path, "DELETE FROM reference")
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(NEWS), some_features(10))
        catalog.remove(NEWS)
        assert catalog.contents().problem == "1 of 1 rows are missing"


def test_quarantine_lasts_until_a_reference_is_replaced_or_removed(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        film = catalog.add(some_reference(), some_features(10))
        news = catalog.add(some_reference(NEWS), some_features(10, seed=1))
        catalog.quarantine({FILM: "its feature file has changed on disk"})
        assert catalog.contents() == Contents(3, (news,), {FILM: "its feature file has changed on disk"}, None)
        catalog.quarantine({FILM: "its feature file has changed on disk"})
        assert catalog.generation() == 3  # nothing new
        catalog.quarantine({})
        assert catalog.contents() == Contents(4, (film, news), {}, None)
        catalog.quarantine({FILM: "x", NEWS: "y"})
        catalog.remove(FILM)
        assert catalog.contents() == Contents(6, (), {NEWS: "y"}, None)
        news = catalog.replace(some_reference(NEWS), some_features(10, seed=2))
        assert catalog.contents() == Contents(7, (news,), {}, None)


def test_a_reference_is_replaced_atomically(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10), [b"old"] * 10)
        stored = catalog.replace(replace(some_reference(), title="New"), some_features(10, seed=1), [b"new"] * 10)
        assert catalog.contents() == Contents(2, (stored,), {}, None)
        assert catalog.thumbnail(FILM, 3) == b"new"
        assert len(catalog.files()) == 2
        again = catalog.replace(replace(some_reference(), title="New"), some_features(10, seed=1), [b"new"] * 10)
        assert again == stored
        assert np.array_equal(catalog.features(FILM).rows, some_features(10, seed=1).rows)  # its files are the same
        with pytest.raises(UnknownReference):
            catalog.replace(some_reference(NEWS), some_features(10))


def test_the_write_ahead_log_is_empty_after_every_change(tmp_path: Path) -> None:
    """SQLite treats a damaged log as one that was never finished, so no committed change may stay in it."""
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
        assert (tmp_path / "catalog.sqlite-wal").stat().st_size == 0
        catalog.remove(FILM)
        assert (tmp_path / "catalog.sqlite-wal").stat().st_size == 0


@pytest.mark.parametrize(
    "texts",
    [
        {"title": "two\nlines"},
        {"title": "x" * 1001},
        {"owner": "\x1b[31m"},
        {"tags": {"a": "\ud800"}},
        {"tags": {"\u202e": "x"}},
        {"tags": {str(n): "" for n in range(101)}},
    ],
)
def test_texts_that_cannot_be_printed_are_refused(tmp_path: Path, texts: dict[str, Any]) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        with pytest.raises(
            CatalogError, match=r"is invalid: use up to 1000 printable characters|101 tags are too many"
        ):
            catalog.add(replace(some_reference(), **texts), some_features(10))
        assert catalog.files() == []


def test_a_damaged_catalogue_is_reported(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
    (tmp_path / "catalog.sqlite").write_bytes(b"not a database " * 500)
    with Catalog.open(tmp_path) as catalog, pytest.raises(CatalogError, match=r"catalog.sqlite is damaged"):
        catalog.references()
    with pytest.raises(CatalogError, match=r"catalog.sqlite is damaged"):
        Catalog.open(tmp_path, write=True)


def test_a_library_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Catalog.open(tmp_path, write=True).close()
    with sqlite3.connect(tmp_path / "catalog.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(CatalogError, match="newer Copywatch"):
        Catalog.open(tmp_path, write=True)
    with Catalog.open(tmp_path) as catalog, pytest.raises(CatalogError, match="newer Copywatch"):
        catalog.references()


def test_two_machines_that_register_one_video_agree_on_its_features(tmp_path: Path) -> None:
    later = some_reference().added_at + timedelta(days=1)
    with (
        Catalog.open(tmp_path / "one", write=True) as one,
        Catalog.open(tmp_path / "other", write=True) as other,
    ):
        here = one.add(some_reference(), some_features(10))
        there = other.add(replace(some_reference(), added_at=later, imported=True), some_features(10))
        changed = other.add(some_reference(NEWS), some_features(10, seed=1))
    assert here.features_id == there.features_id
    assert here.features_sha256 != there.features_sha256
    assert changed.features_id != here.features_id


def test_a_library_of_the_second_format_is_read_and_written(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        stored = catalog.add(some_reference(), some_features(10))
        old = replace(stored, features_id="")
        catalog._change_rows(remove=[row_of(stored)], add=[row_of(old)])
    edit(tmp_path, "PRAGMA user_version = 2")
    with Catalog.open(tmp_path) as catalog:
        assert catalog.contents().references == (old,)
        index = ReferenceIndex.build(catalog, "enc-1")
        assert index.features_id(0) == stored.features_id  # computed from the file
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(NEWS), some_features(10, seed=1))
        assert {one.id: bool(one.features_id) for one in catalog.references()} == {FILM: False, NEWS: True}
    edit(tmp_path, "DELETE FROM reference WHERE id = 'film-1'")
    assert repair(tmp_path).is_certain  # the checksum proves the row of the earlier version
    with Catalog.open(tmp_path) as catalog:
        assert catalog.get(FILM) == stored


def test_a_library_of_the_first_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    edit(tmp_path, "CREATE TABLE reference (id TEXT)", "PRAGMA user_version = 1")
    with pytest.raises(CatalogError, match="older Copywatch"):
        Catalog.open(tmp_path, write=True)


@pytest.mark.parametrize(
    "damage", ["PRAGMA user_version = 0", "DROP INDEX reference_by_content", "ALTER TABLE quarantine RENAME id TO ie"]
)
def test_a_catalogue_with_other_tables_is_not_treated_as_empty(tmp_path: Path, damage: str) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
    edit(tmp_path, damage)
    with pytest.raises(CatalogError, match=r"is damaged; run `copywatch refs verify --repair`"):
        Catalog.open(tmp_path, write=True)
    with Catalog.open(tmp_path) as catalog, pytest.raises(CatalogError, match="is damaged"):
        catalog.references()


def test_a_full_disk_is_reported_and_leaves_the_library_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with Catalog.open(tmp_path, write=True) as catalog:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(CatalogError, match="is full"):
                catalog.add(some_reference(), some_features(10))
        assert catalog.references() == ()
        assert not any((tmp_path / "features").iterdir())
        catalog.add(some_reference(), some_features(10))


# Forks writers that add one reference and remove another, each killed one system call later than the one before.
DYING_WRITERS = """
import itertools, os, signal, sys
from pathlib import Path
from typing import Any
from reference_db.store.catalog import Catalog
from tests.support.sample_references import FILM, NEWS, some_features, some_reference

def write(data_dir, deadly):
    catalog = Catalog.open(data_dir, write=True)
    calls = itertools.count(1)

    def until_dead(call):
        def counted(*args, **options):
            if next(calls) == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)
        return counted

    for name in ("fsync", "rename", "unlink", "open"):
        setattr(os, name, until_dead(getattr(os, name)))
    catalog.add(some_reference(FILM), some_features(10), [b"jpeg"] * 10)
    os.write(1, b"added ")
    catalog.remove(NEWS)
    os.write(1, b"removed ")
    os._exit(0)

for deadly in itertools.count(1):
    data_dir = Path(sys.argv[1]) / str(deadly)
    with Catalog.open(data_dir, write=True) as catalog:
        catalog.add(some_reference(NEWS), some_features(10, seed=1), [b"news"] * 10)
    writer = os.fork()
    if not writer:
        write(data_dir, deadly)
    code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    os.write(1, b"%d\\n" % code)
    if code == 0:
        break
"""


def test_a_killed_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING_WRITERS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *killed, survived = [line.split() for line in done.stdout.splitlines()]
    assert survived == ["added", "removed", "0"]
    assert len(killed) >= 8
    n_with_orphans = 0
    for deadly, (*acknowledged, code) in enumerate(killed, start=1):
        assert int(code) == -signal.SIGKILL
        data_dir = tmp_path / str(deadly)
        n_files = len(list((data_dir / "features").iterdir()))
        with Catalog.open(data_dir, write=True) as catalog:
            ids = {reference.id for reference in catalog.references()}
            n_with_orphans += n_files > len(ids)
            assert FILM in ids or "added" not in acknowledged
            assert NEWS in ids or "added" in acknowledged
            for id in ids:  # every reference is complete
                assert len(catalog.features(id).rows) == 10
                assert catalog.thumbnail(id, 9) == (b"news" if id == NEWS else b"jpeg")
            for directory in ("features", "thumbnails"):
                assert len(list((data_dir / directory).iterdir())) == len(ids)
            if FILM not in ids:
                catalog.add(some_reference(FILM), some_features(10))
    assert n_with_orphans >= 3  # there were files to remove
