"""The keeper: generations follow the catalogue, parts are merged aside, files are believed by their hash only."""

import os
import resource
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from reference_db.errors import CatalogLocked
from reference_db.search import index as index_module
from reference_db.search.feature_rows import FeatureFolder
from reference_db.search.index import Hits, IndexKeeper, ReferenceIndex
from reference_db.search.index_shards import CodedShard, FlatShard
from reference_db.search.shard_files import ShardFiles
from reference_db.store.catalog import Catalog, ReferenceFeatures, ReferenceId
from tests.chaos.operations import Ack
from tests.chaos.storage import in_child
from tests.reference_db.store.test_catalog import some_reference

LENGTH = 150
EXACT = 600  # so that a few films are a large library
KINDS = np.random.default_rng(5).standard_normal((40, 512))


def film(number: int) -> ReferenceFeatures:
    """Shots of some seconds, each of one of a few kinds; every 50th second is black."""
    rng = np.random.default_rng([3, number])
    shots = 0.6 * KINDS[rng.integers(0, len(KINDS), LENGTH // 5)] + rng.standard_normal((LENGTH // 5, 512))
    rows = np.repeat(shots, 5, axis=0) + 0.5 * rng.standard_normal((LENGTH, 512))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return ReferenceFeatures(rows.astype(np.float16), np.arange(LENGTH) % 50 != 49)


def add(folder: Path, *numbers: int) -> None:
    with Catalog.open(folder, write=True) as catalog:
        for number in numbers:
            reference = some_reference(ReferenceId(f"film-{number}"), LENGTH)
            when = reference.added_at + timedelta(seconds=number)
            catalog.add(
                replace(reference, n_uninformative=3, content_sha256=f"{number:064x}", added_at=when), film(number)
            )


def remove(folder: Path, *numbers: int) -> None:
    with Catalog.open(folder, write=True) as catalog:
        for number in numbers:
            catalog.remove(ReferenceId(f"film-{number}"))


def keeper(folder: Path, exact_rows: int = EXACT) -> IndexKeeper:
    return IndexKeeper(folder, "enc-1", exact_rows=exact_rows)


def copies(*numbers: int) -> NDArray[np.float32]:
    """Twelve seconds of each film, blurred."""
    rng = np.random.default_rng(8)
    rows = np.concatenate([film(number).rows[30:42] for number in numbers]).astype(np.float64)
    rows += 0.03 * rng.standard_normal(rows.shape)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


def named(index: ReferenceIndex, hits: Hits) -> list[list[tuple[str, int, float]]]:
    """Hits with the references' ids, which are the same in every generation."""
    return [
        [(index.references[p].id, s, round(x, 6)) for p, s, x in zip(places, seconds, similar, strict=True) if p >= 0]
        for places, seconds, similar in zip(
            hits.reference.tolist(), hits.second.tolist(), hits.similarity.tolist(), strict=True
        )
    ]


def found(index: ReferenceIndex, *numbers: int) -> list[list[tuple[str, int, float]]]:
    return named(index, index.search(copies(*numbers), 10))


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    add(folder, *range(8))
    return folder


def test_a_small_library_follows_the_catalogue_and_keeps_no_files(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    assert len(kept.refresh().references) == 0
    add(tmp_path, 1, 2)
    index = kept.refresh()
    assert [reference.id for reference in index.references] == ["film-1", "film-2"]
    assert kept.refresh() is index
    remove(tmp_path, 1)
    later = kept.refresh()
    assert [reference.id for reference in later.references] == ["film-2"]
    assert {hit[0] for hits in found(later, 1, 2) for hit in hits} == {"film-2"}
    assert {hit[0] for hits in found(index, 1) for hit in hits[:1]} == {"film-1"}  # a generation never changes
    assert not (tmp_path / "index").exists()


def test_a_reference_that_another_replaced_is_found_by_its_new_features_only(tmp_path: Path) -> None:
    add(tmp_path, 1, 2)
    kept = keeper(tmp_path)
    kept.refresh()
    with Catalog.open(tmp_path, write=True) as catalog:
        old = catalog.get(ReferenceId("film-1"))
        catalog.replace(old, film(7))
    hits = found(kept.refresh(), 1, 7)
    assert all(hit[2] < 0.5 for row in hits[:12] for hit in row if hit[0] == "film-1")
    assert all(row[0][:2] == ("film-1", 30 + n) for n, row in enumerate(hits[12:]))


def test_a_large_library_finds_what_exact_search_finds(eight: Path) -> None:
    exact, coded = keeper(eight, 10**6).refresh(), keeper(eight).refresh()
    assert isinstance(exact.parts[0], FlatShard)
    assert isinstance(coded.parts[0], CodedShard)
    assert len(exact) == len(coded) == 8 * 147
    for wanted, got in zip(found(exact, *range(8)), found(coded, *range(8)), strict=True):
        wanted = [hit for hit in wanted if hit[2] >= 0.5]  # the shot itself; what else there is looks alike by chance
        assert len(wanted) == 5
        assert [hit[:2] for hit in got[:5]] == [hit[:2] for hit in wanted]
        assert [hit[2] for hit in got[:5]] == pytest.approx([hit[2] for hit in wanted], abs=3e-6)  # the features' own


def test_merging_and_reopening_change_no_hit(tmp_path: Path) -> None:
    add(tmp_path, *range(5))
    kept = keeper(tmp_path)
    main = kept.refresh().parts[0]
    add(tmp_path, 5)
    assert found(kept.refresh(), 5)[3][0][:2] == ("film-5", 33)
    add(tmp_path, 6, 7)
    remove(tmp_path, 2, 6)
    apart = kept.refresh()
    assert len(apart.parts) == 3
    assert apart.parts[0] is main  # an addition makes nothing anew
    reopened = keeper(tmp_path).refresh()
    assert len(reopened.parts) == 2
    merged = kept._merged("merge", apart)
    whole = ReferenceIndex(apart.references, 0, merged, FeatureFolder(tmp_path / "features"))
    again = keeper(tmp_path).refresh()
    assert len(again.parts) == 1  # what was merged is on disk
    assert again.parts[0].keys[2] is None
    wanted = found(apart, *range(8))
    assert {hit[0] for row in wanted for hit in row} == {f"film-{n}" for n in (0, 1, 3, 4, 5, 7)}
    assert found(reopened, *range(8)) == wanted
    assert found(whole, *range(8)) == wanted
    assert found(again, *range(8)) == wanted


@pytest.mark.parametrize("exact_rows", [EXACT, 10**6])
def test_compaction_is_made_aside_while_references_come_and_go(
    tmp_path: Path, exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "SMALL_ROWS", 100)
    add(tmp_path, *range(6))
    kept = keeper(tmp_path, exact_rows)
    kept.refresh()
    assert not kept.wants_compaction
    assert kept.compact() is None
    add(tmp_path, 6, 7)
    before = kept.refresh()
    assert kept.wants_compaction
    made: list[ReferenceIndex | None] = []
    merging = threading.Thread(target=lambda: made.append(kept.compact()))
    merging.start()
    add(tmp_path, 8)
    remove(tmp_path, 0)
    kept.refresh()
    merging.join()
    after = kept.refresh()
    assert made[0] is not None
    assert {reference.id for reference in after.references} == {f"film-{n}" for n in range(1, 9)}
    assert len(after.parts[0].keys) == 8
    wanted = [[hit for hit in row if hit[0] != "film-0"] for row in found(before, *range(1, 8))]
    got = [[hit for hit in row if hit[0] != "film-8"] for row in found(after, *range(1, 8))]
    assert [row[:5] for row in got] == [row[:5] for row in wanted]
    assert all(row[0][0] == "film-8" for row in found(after, 8))


def test_many_small_additions_are_folded_into_one(tmp_path: Path) -> None:
    add(tmp_path, *range(5))
    kept = keeper(tmp_path)
    kept.refresh()
    for number in range(5, 5 + index_module.MAX_PARTS):
        add(tmp_path, number)
        index = kept.refresh()
    assert len(index.parts) == 1 + index_module.MAX_PARTS
    written = (tmp_path / "index" / "main.json").read_bytes()
    folded = kept.compact()
    assert folded is not None
    assert len(folded.parts) == 2
    assert folded.parts[0] is index.parts[0]
    assert (tmp_path / "index" / "main.json").read_bytes() == written
    assert found(folded, *range(12)) == found(index, *range(12))


def test_a_library_that_outgrows_exact_search_is_learned_aside_and_shrinks_back(tmp_path: Path) -> None:
    add(tmp_path, 0, 1, 2)
    kept = keeper(tmp_path)
    assert isinstance(kept.refresh().parts[0], FlatShard)
    add(tmp_path, 3, 4)
    assert all(isinstance(part, FlatShard) for part in kept.refresh().parts)
    learned = kept.compact()
    assert learned is not None
    assert isinstance(learned.parts[0], CodedShard)
    assert [row[0][:2] for row in found(learned, 4)] == [("film-4", 30 + n) for n in range(12)]
    remove(tmp_path, 0, 1, 2)
    assert len(kept.refresh()) == 2 * 147
    small = kept.compact()
    assert small is not None
    assert isinstance(small.parts[0], FlatShard)
    assert len(small.parts[0]) == 2 * 147


def test_many_new_references_are_taken_in_bit_by_bit_so_that_the_first_are_found_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "AT_ONCE_ROWS", 2 * LENGTH)
    kept = keeper(tmp_path)
    empty = kept.refresh()
    add(tmp_path, *range(5))
    sizes = []
    for _ in range(3):
        index = kept.refresh()
        sizes.append((len(index.references), index.generation))
    assert sizes == [(2, empty.generation), (4, empty.generation), (5, 5)]
    assert kept.refresh() is index


def flips(folder: Path) -> Iterator[tuple[Path, int]]:
    rng = np.random.default_rng(4)
    for path in sorted((folder / "index").iterdir()):
        size = path.stat().st_size
        for at in [0, size - 1, *rng.integers(0, max(1, size), 20).tolist()] if size else []:
            yield path, at


def test_an_index_with_one_flipped_byte_is_never_searched_but_made_again(
    eight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = found(keeper(eight).refresh(), *range(8))
    files = ShardFiles(eight / "index", "enc-1")
    assert files.read() is not None
    for path, at in flips(eight):
        content = path.read_bytes()
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        assert files.read() is None, (path, at)
        path.write_bytes(content)
    damaged = next((eight / "index").glob("main.*.faiss"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    caplog.clear()
    assert found(keeper(eight).refresh(), *range(8)) == wanted
    assert "made again from the features" in caplog.text
    assert files.read() is not None
    assert ShardFiles(eight / "index", "enc-2").read() is None  # another encoder's


def test_a_reference_whose_features_changed_on_disk_is_left_out_by_name_until_it_is_whole(tmp_path: Path) -> None:
    add(tmp_path, *range(6))
    keeper(tmp_path).refresh()
    path = next((tmp_path / "features").glob("film-3.*"))
    content = path.read_bytes()
    path.write_bytes(content[:-9000] + bytes([content[-9000] ^ 1]) + content[-8999:])
    kept = keeper(tmp_path)
    index = kept.refresh()
    assert index.damaged == {"film-3": "its feature file has changed on disk"}
    assert index.place(ReferenceId("film-3")) is None
    assert "film-3" not in {hit[0] for row in found(index, 3) for hit in row}
    path.write_bytes(content)
    add(tmp_path, 6)  # the next change looks again
    index = kept.refresh()
    assert index.damaged == {}
    assert found(index, 3)[0][0][:2] == ("film-3", 30)


def test_reindexing_learns_anew_and_finds_the_same_copies(tmp_path: Path) -> None:
    add(tmp_path, *range(5))
    kept = keeper(tmp_path)
    kept.refresh()
    add(tmp_path, 5, 6)
    remove(tmp_path, 1)
    assert len(kept.settled().references) == 6
    index = keeper(tmp_path).reindex()
    assert [key[0] for key in index.parts[0].keys if key] == [f"film-{n}" for n in (0, 2, 3, 4, 5, 6)]
    assert len(index.parts) == 1
    assert [row[0][:2] for row in found(index, 6)] == [("film-6", 30 + n) for n in range(12)]
    assert keeper(tmp_path).refresh().parts[0].keys == index.parts[0].keys
    with ShardFiles(tmp_path / "index", "enc-1").locked(), pytest.raises(CatalogLocked):
        kept.reindex()


REBUILT_AT = [
    *(("fsync", n) for n in (1, 2, 3)),
    *(("rename", n) for n in (1, 2)),
    *(("write", n) for n in (1, 2, 5, 20)),
    ("unlink", 1),
]


def killed_while_reindexing(folder: Path, call: str, n: int) -> bool:
    def work(data_dir: Path, ack: Ack) -> None:
        keeper(data_dir).reindex()
        ack()

    return in_child(work, folder, ["-f", "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={n}"]).killed


@pytest.mark.system
@pytest.mark.parametrize(("call", "n"), REBUILT_AT)
def test_an_index_whose_making_was_killed_leaves_the_old_one_or_is_the_new_one(
    eight: Path, tmp_path: Path, call: str, n: int
) -> None:
    folder = tmp_path / "library"
    shutil.copytree(eight, folder)
    before = found(keeper(folder).refresh(), *range(8))
    old = ShardFiles(folder / "index", "enc-1").read()
    add(folder, 8)  # so that the new one is another
    assert killed_while_reindexing(folder, call, n)
    left = ShardFiles(folder / "index", "enc-1").read()
    assert old is not None
    assert left is not None, "there is no index any more"
    assert len(left.keys) in (len(old.keys), len(old.keys) + 1)
    index = keeper(folder).refresh()
    assert [row[0] for row in found(index, *range(8))] == [row[0] for row in before]
    assert {row[0][0] for row in found(index, 8)} == {"film-8"}
    again = keeper(folder).reindex()
    assert len(again.parts) == 1
    assert len(list((folder / "index").glob("main.*.faiss"))) == 1  # nothing of the killed one stays


def test_a_library_put_back_from_a_backup_is_taken_as_it_is_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, backup = tmp_path / "library", tmp_path / "backup"
    add(folder, 1, 2)
    shutil.copytree(folder, backup)
    kept = keeper(folder)
    add(folder, 3)
    newer = kept.refresh()
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    older = kept.refresh()
    assert [reference.id for reference in older.references] == ["film-1", "film-2"]
    assert f"went back from generation {newer.generation} to {older.generation}" in caplog.text
    add(folder, 4)  # the generation that film 3 had, with another film
    index = kept.refresh()
    assert index.generation == newer.generation
    assert {row[0][0] for row in found(index, 4)} == {"film-4"}


def test_a_library_put_back_between_two_looks_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    folder, backup = tmp_path / "library", tmp_path / "backup"
    add(folder, 1)
    shutil.copytree(folder, backup)
    kept = keeper(folder)
    add(folder, 2)
    generation = kept.refresh().generation
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    add(folder, 3)
    index = kept.refresh()
    assert index.generation == generation
    assert [reference.id for reference in index.references] == ["film-1", "film-3"]


def test_only_one_process_merges_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SMALL_ROWS", 100)
    add(tmp_path, *range(5))
    kept = keeper(tmp_path)
    kept.refresh()
    add(tmp_path, 5)
    kept.refresh()
    with ShardFiles(tmp_path / "index", "enc-1").locked() as ours:
        assert ours
        assert kept.compact() is None
    assert kept.compact() is not None


def test_an_index_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(tmp_path, *range(5))
    (tmp_path / "index").write_text("in the way")
    index = keeper(tmp_path).refresh()
    assert isinstance(index.parts[0], CodedShard)
    assert found(index, 2)[0][0][:2] == ("film-2", 30)
    assert "cannot be kept" in caplog.text


def test_rows_are_read_from_disk_as_they_were_written(tmp_path: Path) -> None:
    add(tmp_path, 1)
    index = keeper(tmp_path).refresh()
    rows, wanted = index.rows(0), film(1).rows.astype(np.float32)
    assert len(rows) == LENGTH
    assert np.array_equal(rows[:], wanted)
    assert np.array_equal(rows[140:170], wanted[140:])
    assert np.array_equal(rows[20:10], wanted[20:10])
    assert np.array_equal(rows[np.array([7, 3, 7, 149])], wanted[[7, 3, 7, 149]])
    assert np.array_equal(rows[np.array([], np.int64)], wanted[:0])
    assert np.array_equal(rows[12], wanted[12])
    assert np.array_equal(index.informative(0), film(1).informative)
    with pytest.raises(IndexError):
        rows[LENGTH]
    remove(tmp_path, 1)
    assert np.array_equal(rows[:], wanted)  # whoever follows it may read it to its end


def test_a_file_cut_short_under_us_is_zeros_and_a_missing_one_has_no_place(tmp_path: Path) -> None:
    add(tmp_path, 1, 2)
    index = keeper(tmp_path).refresh()
    path = next((tmp_path / "features").glob("film-1.*"))
    rows = index.rows(0)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10 * 1024)
    assert np.array_equal(rows[:130], film(1).rows[:130].astype(np.float32))
    assert not rows[145:].any()
    next((tmp_path / "features").glob("film-2.*")).unlink()
    assert index.place(ReferenceId("film-2")) is None


def test_a_process_that_may_open_no_more_files_closes_older_ones(tmp_path: Path) -> None:
    add(tmp_path, *range(6))
    wanted = found(keeper(tmp_path).refresh(), *range(6))
    index = keeper(tmp_path).refresh()
    held = [index.rows(place) for place in range(3)]
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)  # the next one that would be opened
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, allowed[1]))
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/", os.O_RDONLY)
        del held
        assert found(index, *range(6)) == wanted
        assert all(index.place(ReferenceId(f"film-{n}")) == n for n in range(6))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)


def test_a_removed_reference_s_file_is_not_kept_open(tmp_path: Path) -> None:
    add(tmp_path, *range(6))
    kept = keeper(tmp_path)
    found(kept.refresh(), *range(6))
    remove(tmp_path, 2)
    kept.refresh()
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [name for name in open_files if str(tmp_path) in name and "(deleted)" in name]
    assert [name for name in open_files if f"{tmp_path}/features/film-3" in name]
