"""Index shards: coded search finds what exact search finds, and merging changes no hit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reference_db.search.feature_rows import FeatureFolder
from reference_db.search.index import ReferenceIndex
from reference_db.search.index_shards import (
    MAX_LISTS,
    MIN_LISTS,
    CodedShard,
    FlatShard,
    key_of,
    n_lists_for,
    rotate,
)
from tests.support.indexed_films import add, found, keeper, remove
from tests.support.sample_references import NEWS, some_features, some_reference


def test_a_large_library_finds_what_exact_search_finds(eight: Path) -> None:
    exact, coded = keeper(eight, 10**6).refresh(), keeper(eight).refresh()
    assert isinstance(exact.shards[0], FlatShard)
    assert isinstance(coded.shards[0], CodedShard)
    assert len(exact) == len(coded) == 8 * 147
    for wanted, got in zip(found(exact, *range(8)), found(coded, *range(8)), strict=True):
        wanted = [hit for hit in wanted if hit[2] >= 0.5]  # the shot itself; other hits are similar by chance
        assert len(wanted) == 5
        assert [hit[:2] for hit in got[:5]] == [hit[:2] for hit in wanted]
        assert [hit[2] for hit in got[:5]] == pytest.approx(
            [hit[2] for hit in wanted], abs=3e-6
        )  # exact after re-ranking


def test_merging_and_reopening_change_no_hit(tmp_path: Path) -> None:
    add(tmp_path, *range(5))
    index_keeper = keeper(tmp_path)
    main = index_keeper.refresh().shards[0]
    add(tmp_path, 5)
    assert found(index_keeper.refresh(), 5)[3][0][:2] == ("film-5", 33)
    add(tmp_path, 6, 7)
    remove(tmp_path, 2, 6)
    apart = index_keeper.refresh()
    assert len(apart.shards) == 3
    assert apart.shards[0] is main  # an addition rebuilds nothing
    reopened = keeper(tmp_path).refresh()
    assert len(reopened.shards) == 2
    merged = index_keeper._merge("merge", apart)
    whole = ReferenceIndex(apart.references, 0, merged, FeatureFolder(tmp_path / "features"))
    again = keeper(tmp_path).refresh()
    assert len(again.shards) == 1  # the merged shard is on disk
    assert again.shards[0].keys[2] is None
    wanted = found(apart, *range(8))
    assert {hit[0] for row in wanted for hit in row} == {f"film-{n}" for n in (0, 1, 3, 4, 5, 7)}
    assert found(reopened, *range(8)) == wanted
    assert found(whole, *range(8)) == wanted
    assert found(again, *range(8)) == wanted


def test_a_flat_shard_keeps_the_chosen_references_when_merged() -> None:
    film, news = some_reference(n_seconds=10), some_reference(NEWS, 20)
    first = FlatShard.build([(film, some_features(10)), (news, some_features(20, seed=1))])
    second = FlatShard.build([(film, some_features(10, seed=2))])
    merged = FlatShard.merge([first, second], [np.array([False, True]), np.array([True])])
    assert merged.keys == (key_of(news), key_of(film))
    assert len(merged) == 16 + 8  # every fifth second is uninformative
    hits = merged.search(some_features(10, seed=2).rows[3].astype(np.float32), 1)
    assert (hits.place.tolist(), hits.second.tolist()) == ([1], [3])
    assert hits.similarity == pytest.approx(1, abs=1e-3)


def test_a_rotation_changes_no_dot_product() -> None:
    rows = some_features(20).rows.astype(np.float32)
    np.testing.assert_allclose(rotate(rows) @ rotate(rows).T, rows @ rows.T, atol=1e-5)


@pytest.mark.parametrize(("n_rows", "n_lists"), [(0, MIN_LISTS), (100_000, 128), (1 << 20, 1024), (1 << 40, MAX_LISTS)])
def test_the_number_of_lists_grows_with_the_library(n_rows: int, n_lists: int) -> None:
    assert n_lists_for(n_rows) == n_lists
