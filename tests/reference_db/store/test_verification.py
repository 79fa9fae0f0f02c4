"""Verification detects damage and excludes it from search; repair rebuilds a damaged catalogue from its files."""

import contextlib
import os
from pathlib import Path

import apsw
import pytest

from reference_db.errors import StorageError
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, Contents, ReferenceId
from reference_db.store.verification import repair, verify
from tests.chaos.flips import flip_bytes
from tests.chaos.operations import FILM, GAME, NEWS, put, some_features, some_reference, some_thumbnails, state


@pytest.fixture
def library(tmp_path: Path) -> Path:
    data_dir = tmp_path / "library"
    with Catalog.open(data_dir, write=True) as catalog:
        for seed, id in enumerate((FILM, NEWS, GAME)):
            put(catalog, id, seed)
    return data_dir


def file_of(library: Path, folder: str, id: str) -> Path:
    (path,) = (library / folder).glob(f"{id}.*")
    return path


def flip(path: Path, at: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def edit(library: Path, statement: str) -> None:
    connection = apsw.Connection(str(library / "catalog.sqlite"))
    connection.execute(statement)
    connection.close()


def test_an_undamaged_library_is_whole(library: Path) -> None:
    steps: list[tuple[int, int]] = []
    found = verify(library, progress=lambda *step: steps.append(step))
    assert found.is_whole
    assert found.n_references == 3
    assert found.n_bytes == sum(path.stat().st_size for path in library.glob("*/*"))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert verify(library.parent / "none").is_whole


def test_damaged_features_are_quarantined_until_their_file_is_valid_again(library: Path) -> None:
    path = file_of(library, "features", NEWS)
    flip(path)
    found = verify(library)
    assert found.damaged == {NEWS: "its feature file has changed on disk"}
    assert not found.is_whole
    with Catalog.open(library) as catalog:
        assert catalog.contents().damaged == found.damaged
        assert catalog.generation() == 4  # so that monitors reload
        index = ReferenceIndex.build(catalog, "enc-1")
    assert {reference.id for reference in index.references} == {FILM, GAME}
    assert index.damaged == found.damaged
    assert verify(library).damaged == found.damaged
    with Catalog.open(library) as catalog:
        assert catalog.generation() == 4  # nothing new
    flip(path)
    whole = verify(library)
    assert whole.is_whole
    assert whole.released == (NEWS,)
    with Catalog.open(library) as catalog:
        assert catalog.contents().damaged == {}
    path.unlink()
    assert verify(library).damaged == {NEWS: "its feature file cannot be read (No such file or directory)"}


def test_a_reference_with_damaged_thumbnails_is_still_searched(library: Path) -> None:
    flip(file_of(library, "thumbnails", NEWS))
    found = verify(library)
    assert found.without_thumbnails == {NEWS: "its thumbnail file has changed on disk"}
    assert found.damaged == {}
    assert not found.is_whole
    with Catalog.open(library) as catalog:
        assert len(catalog.references()) == 3


def test_a_library_in_use_is_read_and_quarantine_stays_unchanged(library: Path) -> None:
    flip(file_of(library, "features", NEWS))
    with Catalog.open(library, write=True) as writer:
        found = verify(library)
        assert found.damaged.keys() == {NEWS}
        assert "quarantine was not updated" in found.problems[0]
        assert writer.contents().damaged == {}
        writer.replace(some_reference(NEWS, 7), some_features(7))
    assert verify(library).is_whole


def test_missing_rows_are_restored_from_their_files(library: Path) -> None:
    whole = state(library)
    edit(library, "DELETE FROM reference WHERE id IN ('film', 'news')")
    assert verify(library).problems == ("The catalogue is damaged: 2 of 3 rows are missing.",)
    done = repair(library)
    assert done.restored == (FILM, NEWS)
    assert done.is_certain
    assert done.n_lost == 0
    assert done.backup.exists()
    assert verify(library).is_whole
    assert state(library) == whole
    with Catalog.open(library, write=True) as catalog:
        assert catalog.generation() == 4
        catalog.remove(FILM)
    assert verify(library).is_whole


def test_a_damaged_row_is_restored_from_its_file(library: Path) -> None:
    whole = state(library)
    edit(library, "UPDATE reference SET record = replace(record, 'Owner', 'Thief') WHERE id = 'film'")
    assert verify(library).damaged == {FILM: "its row in the catalogue has changed on disk"}
    assert repair(library).restored == (FILM,)
    assert state(library) == whole


def test_the_leftover_of_a_removed_reference_is_not_restored(library: Path) -> None:
    """A writer killed between row and file leaves the file; the checksum proves that its reference was removed."""
    leftover = file_of(library, "features", GAME)
    content = leftover.read_bytes()
    with Catalog.open(library, write=True) as catalog:
        catalog.remove(GAME)
    leftover.write_bytes(content)
    edit(library, "DELETE FROM reference WHERE id = 'news'")
    done = repair(library)
    assert (done.restored, done.is_certain) == ((NEWS,), True)
    assert state(library).keys() == {FILM, NEWS}


def test_a_catalogue_that_is_not_a_database_any_more_is_rebuilt(library: Path) -> None:
    whole = state(library)
    (library / "catalog.sqlite").write_bytes(b"nothing " * 1000)
    with pytest.raises(StorageError, match=r"damaged; run `copywatch refs verify --repair`"):
        verify(library)
    done = repair(library)
    assert done.restored == (FILM, GAME, NEWS)
    assert not done.is_certain
    assert done.n_lost is None
    assert done.backup.read_bytes().startswith(b"nothing")
    assert state(library) == whole
    assert verify(library).is_whole
    (library / "catalog.sqlite").unlink()
    assert repair(library).restored == (FILM, GAME, NEWS)
    assert state(library) == whole


def test_a_reference_without_row_and_file_is_counted_as_lost(library: Path) -> None:
    edit(library, "DELETE FROM reference WHERE id = 'news'")
    flip(file_of(library, "features", NEWS))
    done = repair(library)
    assert (done.restored, done.n_lost) == ((), 1)
    assert verify(library).is_whole
    assert state(library).keys() == {FILM, GAME}


def test_a_torn_page_is_detected_and_repaired(library: Path) -> None:
    """Whichever page is overwritten, the library is refused or reported as damaged; repair restores all."""
    whole = state(library)
    catalogue = library / "catalog.sqlite"
    content = catalogue.read_bytes()
    for page in range(len(content) // 4096):
        torn = content[: page * 4096] + os.urandom(4096) + content[(page + 1) * 4096 :]
        catalogue.write_bytes(torn)
        with contextlib.suppress(StorageError):
            assert not verify(library).is_whole
        repair(library)
        assert state(library) == whole
        for path in library.glob("catalog.sqlite*"):
            path.unlink()


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    tally = flip_bytes(200, seed=5)
    assert tally.failures == []
    assert tally.n_found >= 100


def test_an_empty_quarantine_changes_nothing(library: Path) -> None:
    with Catalog.open(library, write=True) as catalog:
        before = catalog.contents()
        catalog.quarantine({})
        assert catalog.contents() == before
        assert isinstance(before, Contents)
        catalog.add(some_reference(ReferenceId("x"), 8), some_features(8), some_thumbnails(8))
