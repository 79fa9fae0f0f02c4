"""The index keeper: generations follow the catalogue, shards are merged in the background."""

from __future__ import annotations

import hashlib
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from reference_db.errors import CatalogLocked
from reference_db.search import index as index_module
from reference_db.search.index import ReferenceIndex
from reference_db.search.index_shards import CodedShard, FlatShard
from reference_db.search.shard_files import ShardFiles
from reference_db.store.catalog import Catalog, ReferenceId
from reference_db.store.tables import row_of
from reference_db.store.verification import verify
from tests.support.indexed_films import EXACT, LENGTH, add, film, found, keeper, remove


def test_a_small_library_follows_the_catalogue_and_writes_no_files(tmp_path: Path) -> None:
    index_keeper = keeper(tmp_path)
    assert len(index_keeper.refresh().references) == 0
    add(tmp_path, 1, 2)
    index = index_keeper.refresh()
    assert [reference.id for reference in index.references] == ["film-1", "film-2"]
    assert index_keeper.refresh() is index
    remove(tmp_path, 1)
    later = index_keeper.refresh()
    assert [reference.id for reference in later.references] == ["film-2"]
    assert {hit[0] for hits in found(later, 1, 2) for hit in hits} == {"film-2"}
    assert {hit[0] for hits in found(index, 1) for hit in hits[:1]} == {"film-1"}  # a generation never changes
    assert not (tmp_path / "index").exists()


def test_a_replaced_reference_is_found_by_its_new_features_only(tmp_path: Path) -> None:
    add(tmp_path, 1, 2)
    index_keeper = keeper(tmp_path)
    index_keeper.refresh()
    with Catalog.open(tmp_path, write=True) as catalog:
        old = catalog.get(ReferenceId("film-1"))
        catalog.replace(old, film(7))
    hits = found(index_keeper.refresh(), 1, 7)
    assert all(hit[2] < 0.5 for row in hits[:12] for hit in row if hit[0] == "film-1")
    assert all(row[0][:2] == ("film-1", 30 + n) for n, row in enumerate(hits[12:]))


@pytest.mark.parametrize("exact_rows", [EXACT, 10**6])
def test_compaction_runs_while_references_are_added_and_removed(
    tmp_path: Path, exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "SMALL_ROWS", 100)
    add(tmp_path, *range(6))
    index_keeper = keeper(tmp_path, exact_rows)
    index_keeper.refresh()
    assert not index_keeper.wants_compaction
    assert index_keeper.compact() is None
    add(tmp_path, 6, 7)
    before = index_keeper.refresh()
    assert index_keeper.wants_compaction
    merged: list[ReferenceIndex | None] = []
    merging = threading.Thread(target=lambda: merged.append(index_keeper.compact()))
    merging.start()
    add(tmp_path, 8)
    remove(tmp_path, 0)
    index_keeper.refresh()
    merging.join()
    after = index_keeper.refresh()
    assert merged[0] is not None
    assert {reference.id for reference in after.references} == {f"film-{n}" for n in range(1, 9)}
    assert len(after.shards[0].keys) == 8
    wanted = [[hit for hit in row if hit[0] != "film-0"] for row in found(before, *range(1, 8))]
    got = [[hit for hit in row if hit[0] != "film-8"] for row in found(after, *range(1, 8))]
    assert [row[:5] for row in got] == [row[:5] for row in wanted]
    assert all(row[0][0] == "film-8" for row in found(after, 8))


def test_many_small_shards_are_folded_into_one(tmp_path: Path) -> None:
    add(tmp_path, *range(5))
    index_keeper = keeper(tmp_path)
    index_keeper.refresh()
    for number in range(5, 5 + index_module.MAX_ADDED_SHARDS):
        add(tmp_path, number)
        index = index_keeper.refresh()
    assert len(index.shards) == 1 + index_module.MAX_ADDED_SHARDS
    written = (tmp_path / "index" / "main.json").read_bytes()
    folded = index_keeper.compact()
    assert folded is not None
    assert len(folded.shards) == 2
    assert folded.shards[0] is index.shards[0]
    assert (tmp_path / "index" / "main.json").read_bytes() == written
    assert found(folded, *range(12)) == found(index, *range(12))


def test_a_library_that_outgrows_exact_search_is_encoded_and_becomes_exact_again(tmp_path: Path) -> None:
    add(tmp_path, 0, 1, 2)
    index_keeper = keeper(tmp_path)
    assert isinstance(index_keeper.refresh().shards[0], FlatShard)
    add(tmp_path, 3, 4)
    assert all(isinstance(shard, FlatShard) for shard in index_keeper.refresh().shards)
    encoded = index_keeper.compact()
    assert encoded is not None
    assert isinstance(encoded.shards[0], CodedShard)
    assert [row[0][:2] for row in found(encoded, 4)] == [("film-4", 30 + n) for n in range(12)]
    remove(tmp_path, 0, 1, 2)
    assert len(index_keeper.refresh()) == 2 * 147
    small = index_keeper.compact()
    assert small is not None
    assert isinstance(small.shards[0], FlatShard)
    assert len(small.shards[0]) == 2 * 147


def test_many_new_references_are_added_in_steps_so_that_the_first_are_found_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "REFRESH_ROWS", 2 * LENGTH)
    index_keeper = keeper(tmp_path)
    empty = index_keeper.refresh()
    add(tmp_path, *range(5))
    sizes = []
    for _ in range(3):
        index = index_keeper.refresh()
        sizes.append((len(index.references), index.generation))
    assert sizes == [(2, empty.generation), (4, empty.generation), (5, 5)]
    assert index_keeper.refresh() is index


def test_a_reference_with_damaged_features_is_not_searched_until_they_are_valid(tmp_path: Path) -> None:
    add(tmp_path, *range(6))
    keeper(tmp_path).refresh()
    path = next((tmp_path / "features").glob("film-3.*"))
    content = path.read_bytes()
    path.write_bytes(content[:-9000] + bytes([content[-9000] ^ 1]) + content[-8999:])
    index_keeper = keeper(tmp_path)
    index = index_keeper.refresh()
    assert index.damaged == {"film-3": "its feature file has changed on disk"}
    assert index.place(ReferenceId("film-3")) is None
    assert "film-3" not in {hit[0] for row in found(index, 3) for hit in row}
    path.write_bytes(content)
    add(tmp_path, 6)  # the next change reads it again
    index = index_keeper.refresh()
    assert index.damaged == {}
    assert found(index, 3)[0][0][:2] == ("film-3", 30)


def test_a_monstrous_or_invalid_reference_is_not_searched_and_the_others_are(tmp_path: Path) -> None:
    add(tmp_path, *range(4))
    with Catalog.open(tmp_path, write=True) as catalog:
        monster, invalid = (catalog.get(ReferenceId(id)) for id in ("film-1", "film-2"))
        garbage = b"not a feature file, but the one that the catalogue names"
        changed = replace(invalid, features_sha256=hashlib.sha256(garbage).hexdigest())
        catalog.features_path(changed).write_bytes(garbage)
        rows = [row_of(replace(monster, n_seconds=10**9)), row_of(changed)]
        catalog._change_rows(remove=[row_of(monster), row_of(invalid)], add=rows)
    for exact_rows in (EXACT, 10):  # a small library, and a large one
        index = keeper(tmp_path, exact_rows).refresh()
        assert [one.id for one in index.references] == ["film-0", "film-3"]
        assert index.damaged == {
            "film-1": "it lasts 1000000000 s, longer than the 69 hours that a reference may have",
            "film-2": "its feature file has changed on disk",
        }
    assert verify(tmp_path).damaged == index.damaged


def test_much_that_is_added_to_a_small_library_is_encoded_at_once(tmp_path: Path) -> None:
    add(tmp_path, 0)
    index_keeper = keeper(tmp_path)
    assert [type(shard) for shard in index_keeper.refresh().shards] == [FlatShard]
    add(tmp_path, *range(1, 10))
    index = index_keeper.refresh()
    assert [type(shard) for shard in index.shards] == [CodedShard]
    assert len(index.references) == 10
    assert found(index, 3)[0][0][:2] == ("film-3", 30)


def test_reindexing_trains_again_and_finds_the_same_copies(tmp_path: Path) -> None:
    add(tmp_path, *range(5))
    index_keeper = keeper(tmp_path)
    index_keeper.refresh()
    add(tmp_path, 5, 6)
    remove(tmp_path, 1)
    assert len(index_keeper.refresh_fully().references) == 6
    index = keeper(tmp_path).reindex()
    assert [key[0] for key in index.shards[0].keys if key] == [f"film-{n}" for n in (0, 2, 3, 4, 5, 6)]
    assert len(index.shards) == 1
    assert [row[0][:2] for row in found(index, 6)] == [("film-6", 30 + n) for n in range(12)]
    assert keeper(tmp_path).refresh().shards[0].keys == index.shards[0].keys
    with ShardFiles(tmp_path / "index", "enc-1").locked(), pytest.raises(CatalogLocked):
        index_keeper.reindex()


def test_a_library_restored_from_a_backup_is_loaded_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, backup = tmp_path / "library", tmp_path / "backup"
    add(folder, 1, 2)
    shutil.copytree(folder, backup)
    index_keeper = keeper(folder)
    add(folder, 3)
    newer = index_keeper.refresh()
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    older = index_keeper.refresh()
    assert [reference.id for reference in older.references] == ["film-1", "film-2"]
    assert f"went back from generation {newer.generation} to {older.generation}" in caplog.text
    add(folder, 4)  # the generation number of film 3, with another film
    index = index_keeper.refresh()
    assert index.generation == newer.generation
    assert {row[0][0] for row in found(index, 4)} == {"film-4"}


def test_a_library_restored_between_two_refreshes_is_recognised_as_another(tmp_path: Path) -> None:
    folder, backup = tmp_path / "library", tmp_path / "backup"
    add(folder, 1)
    shutil.copytree(folder, backup)
    index_keeper = keeper(folder)
    add(folder, 2)
    generation = index_keeper.refresh().generation
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    add(folder, 3)
    index = index_keeper.refresh()
    assert index.generation == generation
    assert [reference.id for reference in index.references] == ["film-1", "film-3"]


def test_only_one_process_merges_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SMALL_ROWS", 100)
    add(tmp_path, *range(5))
    index_keeper = keeper(tmp_path)
    index_keeper.refresh()
    add(tmp_path, 5)
    index_keeper.refresh()
    with ShardFiles(tmp_path / "index", "enc-1").locked() as ours:
        assert ours
        assert index_keeper.compact() is None
    assert index_keeper.compact() is not None
