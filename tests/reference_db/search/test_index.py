"""The index against plain matrix products. test_index_keeper.py follows a library that changes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference_db.errors import EncoderMismatch, StorageError
from reference_db.search.index import IndexKeeper, ReferenceIndex
from reference_db.store.catalog import Catalog, Reference, ReferenceFeatures, ReferenceId
from tests.support.sample_references import some_features, some_reference

Pairs = list[tuple[Reference, ReferenceFeatures]]


def some_pairs(*lengths: int) -> Pairs:
    return [(some_reference(ReferenceId(f"ref-{i}"), n), some_features(n, seed=i)) for i, n in enumerate(lengths)]


def unit_rows(n: int, seed: int) -> NDArray[np.float32]:
    rows = np.random.default_rng([seed, 7]).standard_normal((n, 512)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def slow_search(pairs: Pairs, row: NDArray[np.float32], k: int) -> list[tuple[float, int, int]]:
    """(similarity, reference, second) of the k best, by comparing with each."""
    cells = [
        (float(features.rows[second].astype(np.float64) @ row), i, second)
        for i, (_, features) in enumerate(pairs)
        for second in range(len(features.rows))
        if features.informative[second]
    ]
    return sorted(cells, reverse=True)[:k]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), max_size=4), k=st.integers(1, 12), seed=st.integers(0, 99))
def test_search_finds_the_most_similar_informative_seconds(lengths: list[int], k: int, seed: int) -> None:
    pairs = some_pairs(*lengths)
    index = ReferenceIndex.from_features(pairs, generation=3)
    queries = unit_rows(3, seed)
    hits = index.search(queries, k)
    assert hits.reference.shape == hits.second.shape == hits.similarity.shape == (3, k)
    for n, query in enumerate(queries):
        expected = slow_search(pairs, query, k)
        found = list(zip(hits.reference[n].tolist(), hits.second[n].tolist(), strict=True))
        assert found == [(i, second) for _, i, second in expected] + [(-1, -1)] * (k - len(expected))
        np.testing.assert_allclose(hits.similarity[n, : len(expected)], [e[0] for e in expected], atol=1e-6)


def test_a_reference_s_own_second_is_found_first() -> None:
    pairs = some_pairs(20, 35)
    index = ReferenceIndex.from_features(pairs, generation=1)
    hits = index.search(index.rows(1)[np.array([7, 33])], 1)
    assert hits.reference.tolist() == [[1], [1]]
    assert hits.second.tolist() == [[7], [33]]
    assert hits.similarity == pytest.approx(1, abs=1e-3)


def test_uninformative_seconds_are_not_found() -> None:
    index = ReferenceIndex.from_features(some_pairs(20), generation=1)
    assert not index.informative(0)[4]
    hits = index.search(index.rows(0)[4:5], 30)
    assert 4 not in hits.second
    assert len(index) == 16
    assert (hits.reference[0] >= 0).sum() == 16


def test_the_hits_of_a_row_do_not_depend_on_the_other_rows() -> None:
    index = ReferenceIndex.from_features(some_pairs(300, 300), generation=1)
    queries = unit_rows(64, seed=5)
    together = index.search(queries, 10)
    order = np.random.default_rng(2).permutation(64)
    shuffled = index.search(queries[order], 10)
    assert np.array_equal(shuffled.similarity, together.similarity[order])
    assert np.array_equal(shuffled.second, together.second[order])
    for n in range(64):
        alone = index.search(queries[n : n + 1], 10)
        assert np.array_equal(alone.similarity[0], together.similarity[n])
        assert np.array_equal(alone.second[0], together.second[n])


def test_an_empty_library_finds_nothing(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        index = ReferenceIndex.build(catalog, "enc-1")
    hits = index.search(unit_rows(2, 0), 4)
    assert index.references == ()
    assert index.generation == 0
    assert hits.reference.tolist() == hits.second.tolist() == [[-1] * 4] * 2
    assert (hits.similarity == -1).all()
    assert index.search(unit_rows(0, 0), 4).reference.shape == (0, 4)


def test_build_loads_the_catalogue_s_references(tmp_path: Path) -> None:
    pairs = some_pairs(5, 8)
    with Catalog.open(tmp_path, write=True) as catalog:
        for reference, features in pairs:
            catalog.add(reference, features)
        index = ReferenceIndex.build(catalog, "enc-1")
        assert index.references == catalog.references()
        assert index.generation == catalog.generation() == 2
    for i, (_, features) in enumerate(pairs):
        assert np.array_equal(index.rows(i)[:], features.rows.astype(np.float32))
        assert np.array_equal(index.informative(i), features.informative)
    assert not index.informative(0).flags.writeable


def test_a_library_whose_disk_is_gone_is_an_error_and_not_empty(tmp_path: Path) -> None:
    keeper = IndexKeeper(tmp_path / "library", "enc-1")
    assert keeper.refresh().references == ()  # it does not exist yet
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        for reference, features in some_pairs(5, 8):
            catalog.add(reference, features)
    assert len(keeper.refresh().references) == 2
    (tmp_path / "library").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is gone"):
        keeper.refresh()
    (tmp_path / "elsewhere").rename(tmp_path / "library")
    assert len(keeper.refresh().references) == 2


def test_references_of_another_encoder_are_refused_by_id(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        for reference, features in some_pairs(*[4] * 8):
            catalog.add(replace(reference, encoder_id="old" if reference.id != "ref-0" else "new"), features)
        with pytest.raises(EncoderMismatch) as caught:
            ReferenceIndex.build(catalog, "new")
    message = str(caught.value)
    assert "ref-1, ref-2, ref-3, ref-4, ref-5 and 2 more" in message
    assert "ref-0" not in message
    assert "copywatch refs rm ID" in message
    assert "copywatch refs add FILE" in message


def test_damaged_features_are_never_searched(tmp_path: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        for reference, features in some_pairs(5, 8):
            catalog.add(reference, features)
        path = next((tmp_path / "features").glob("ref-1*"))
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
        index = ReferenceIndex.build(catalog, "enc-1")
        assert [reference.id for reference in index.references] == ["ref-0"]
        assert index.damaged == {"ref-1": "its feature file has changed on disk"}
