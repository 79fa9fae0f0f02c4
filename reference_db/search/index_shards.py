"""Shards of an index: the informative seconds of some references, searchable and immutable.

A small library is searched exactly. A large one is searched by codes of 64 bytes per second (RaBitQ: one bit for each
of the 512 numbers of a rotated row, so that all bits matter equally) in inverted lists of similar seconds; a search
reads the lists nearest to its row. Its result is a shortlist that is re-ranked by the features themselves. All shards
of a large library share one code book, so a second's code and list do not depend on its shard, and shards can be merged
without encoding again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from reference_db.search.feature_rows import Key, informative_blocks
from reference_db.store.references import FEATURE_SIZE, Features, Reference

_faiss: Any = faiss  # its type stubs are incomplete

SHORTLIST = 40  # seconds that are re-ranked by their features
LIST_ROWS = 1024  # approximate seconds per list
MIN_LISTS, MAX_LISTS = 64, 32768
LISTS_READ = 192  # lists that a search reads of 1,024; grows with the eighth root of their number
LIST_SAMPLE = 32  # seconds per list that the code book is trained on
TRAINING_ROUNDS = 8
BLOCK_ROWS = 1 << 15  # rows compared at once in training
QUERY_BITS = 8
SECOND_BITS = 32  # a row's number is its reference's place in the shard, then its second

Pair = tuple[Reference, Features]


def key_of(reference: Reference) -> Key:
    return reference.id, reference.features_sha256


@dataclass(frozen=True, slots=True, eq=False)
class ShardHits:
    """The most similar seconds of one shard, the best first."""

    similarity: NDArray[np.float32]
    place: NDArray[np.int64]  # of the reference in the shard
    second: NDArray[np.int64]


class IndexShard(Protocol):
    """Some references' seconds; `keys` identifies them, None where a merge removed one."""

    @property
    def keys(self) -> tuple[Key | None, ...]: ...

    def __len__(self) -> int: ...

    def search(self, row: NDArray[np.float32], n: int) -> ShardHits: ...


def single_threaded() -> None:
    """Makes FAISS compute in the calling thread only, and each row independently of the others."""
    faiss.omp_set_num_threads(1)  # applies to the calling thread only
    # Batches of 20 and more would go through BLAS, whose sums depend on the size of the batch.
    faiss.cvar.distance_compute_blas_threshold = 1 << 30


class FlatShard:
    """Seconds as they are, searched exactly."""

    def __init__(self, keys: tuple[Key, ...], flat: Any, numbers: NDArray[np.int64]) -> None:
        self.keys = keys
        self._flat = flat
        self._numbers = numbers

    @classmethod
    def build(cls, pairs: Iterable[Pair]) -> FlatShard:
        """A shard of these references, in this order."""
        keys: list[Key] = []
        numbers, flat = [np.empty(0, np.int64)], faiss.IndexFlatIP(FEATURE_SIZE)
        for reference, features in pairs:
            for seconds, rows in informative_blocks(features):
                flat.add(rows)
                numbers.append(seconds + (len(keys) << SECOND_BITS))
            keys.append(key_of(reference))
        return cls(tuple(keys), flat, np.concatenate(numbers))

    @classmethod
    def merge(cls, shards: Sequence[FlatShard], keep: Sequence[NDArray[np.bool_]]) -> FlatShard:
        """One shard of the references to keep of these shards."""
        keys: list[Key] = []
        numbers, flat = [np.empty(0, np.int64)], faiss.IndexFlatIP(FEATURE_SIZE)
        for shard, is_present in zip(shards, keep, strict=True):
            place = shard._numbers >> SECOND_BITS
            new_place = np.cumsum(is_present) - 1 + len(keys)
            rows = np.flatnonzero(is_present[place])
            if len(rows):
                flat.add(shard._flat.reconstruct_n(0, len(shard))[rows])
            numbers.append((new_place[place[rows]] << SECOND_BITS) | _second(shard._numbers[rows]))
            keys += [key for key, present in zip(shard.keys, is_present, strict=True) if present]
        return cls(tuple(keys), flat, np.concatenate(numbers))

    def __len__(self) -> int:
        return len(self._numbers)

    def search(self, row: NDArray[np.float32], n: int) -> ShardHits:
        """The n most similar seconds, with their similarity."""
        if not len(self):
            return _hits(np.empty(0, np.float32), np.empty(0, np.int64))
        single_threaded()
        similarity, rows = self._flat.search(row[None], min(n, len(self)))
        return _hits(similarity[0], self._numbers[rows[0]])


class CodeBook:
    """Assigns rows to lists and encodes them; trained once on a sample of the library."""

    def __init__(self, quantizer: Any, owner: Any) -> None:
        self._quantizer = quantizer  # finds the list of a row; all shards share it
        self._owner = owner  # owns the quantizer's memory
        self.n_lists = int(quantizer.ntotal)
        n_groups = _faiss.downcast_index(quantizer).nlist
        self.search_parameters = _faiss.SearchParametersIVF(
            nprobe=min(self.n_lists, round(LISTS_READ * (self.n_lists / 1024) ** 0.125)),
            quantizer_params=_faiss.SearchParametersIVF(nprobe=max(32, n_groups // 2)),
        )

    @classmethod
    def train(cls, rows: NDArray[np.float32], n_rows: int) -> CodeBook:
        """A code book for about `n_rows` seconds, trained on these rows [n, 512]."""
        n_lists = n_lists_for(n_rows)
        n_groups = 1 << ((n_lists.bit_length()) // 2)
        sample = rotate(rows)
        groups, owner = _cluster(sample, n_groups)
        share = np.maximum(1, np.bincount(owner, minlength=n_groups) * (n_lists - n_groups) // len(sample) + 1)
        leaves = np.concatenate(
            [_cluster(sample[owner == g], int(share[g]))[0] for g in range(n_groups) if (owner == g).any()]
        )
        single_threaded()
        top = faiss.IndexFlatIP(FEATURE_SIZE)
        top.add(groups)
        quantizer = faiss.IndexIVFFlat(top, FEATURE_SIZE, n_groups, faiss.METRIC_INNER_PRODUCT)
        quantizer.is_trained = True
        quantizer.nprobe = max(8, n_groups // 8)  # groups of lists searched for a new row's list
        quantizer.add(leaves)
        quantizer.make_direct_map()
        return cls(quantizer, top)

    def encode(self, pairs: Iterable[Pair]) -> CodedShard:
        """A shard of these references, in this order."""
        single_threaded()
        index = self.empty_index()
        keys: list[Key] = []
        for reference, features in pairs:
            for seconds, rows in informative_blocks(features):
                index.add_with_ids(rotate(rows), seconds + (len(keys) << SECOND_BITS))
            keys.append(key_of(reference))
        return CodedShard(self, tuple(keys), index)

    def empty_index(self) -> Any:
        """A FAISS index with this code book and no rows."""
        index = faiss.IndexIVFRaBitQFastScan(
            self._quantizer, FEATURE_SIZE, self.n_lists, faiss.METRIC_INNER_PRODUCT, 32, True, 1
        )
        index.qb = QUERY_BITS
        index.is_trained = True
        return index


class CodedShard:
    """Seconds as codes in inverted lists, searched by an estimate of the similarity."""

    def __init__(self, book: CodeBook, keys: tuple[Key | None, ...], index: Any) -> None:
        self.book = book
        self.keys = keys
        self.index = index

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search(self, row: NDArray[np.float32], n: int) -> ShardHits:
        """The n seconds with the highest estimates."""
        single_threaded()
        similarity, numbers = self.index.search(rotate(row[None]), n, params=self.book.search_parameters)
        n_found = n if numbers[0, -1] >= 0 else int(np.count_nonzero(numbers[0] >= 0))  # then -1
        return _hits(similarity[0, :n_found], numbers[0, :n_found])


def merge_coded(shards: Sequence[CodedShard], keep: Sequence[NDArray[np.bool_]]) -> CodedShard:
    """One new shard of all these; the places of the other references stay empty."""
    index, keys = _faiss.clone_index(shards[0].index), list(shards[0].keys)
    for shard in shards[1:]:
        index.merge_from(faiss.clone_index(shard.index), len(keys) << SECOND_BITS)
        keys += shard.keys
    for place in np.flatnonzero(~np.concatenate(list(keep))).tolist():
        if keys[place] is not None:
            index.remove_ids(faiss.IDSelectorRange(place << SECOND_BITS, (place + 1) << SECOND_BITS))
            keys[place] = None
    return CodedShard(CodeBook(_faiss.downcast_index(index.quantizer), index), tuple(keys), index)


def n_lists_for(n_rows: int) -> int:
    """The number of lists for a library of this many seconds: a power of two."""
    return min(MAX_LISTS, 1 << max(MIN_LISTS.bit_length() - 1, round(math.log2(max(1, n_rows) / LIST_ROWS))))


def _cluster(rows: NDArray[np.float32], n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Spherical k-means: n centres, and the nearest one of each row."""
    n = min(n, len(rows))
    centres = rows[np.random.default_rng(1).choice(len(rows), n, replace=False)]
    for _ in range(TRAINING_ROUNDS):
        nearest = _nearest(rows, centres)
        order = np.argsort(nearest, kind="stable")
        used, starts = np.unique(nearest[order], return_index=True)
        sums = np.add.reduceat(rows[order], starts, axis=0)
        centres[used] = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
    return centres, _nearest(rows, centres)


def _nearest(rows: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.int64]:
    blocks = (rows[at : at + BLOCK_ROWS] @ centres.T for at in range(0, len(rows), BLOCK_ROWS))
    return np.concatenate([block.argmax(axis=1) for block in blocks])


def rotate(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows [n, 512] rotated so that all numbers matter equally; dot products stay the same."""
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty_like(rows)
    _ROTATION.apply_noalloc(len(rows), _faiss.swig_ptr(rows), _faiss.swig_ptr(out))
    return out


def _build_rotation() -> Any:
    rotation = faiss.HadamardRotation(FEATURE_SIZE)
    rotation.train(np.zeros((1, FEATURE_SIZE), np.float32))
    return rotation


_ROTATION = _build_rotation()


def _second(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers & ((1 << SECOND_BITS) - 1)


def _hits(similarity: NDArray[np.float32], numbers: NDArray[np.int64]) -> ShardHits:
    return ShardHits(similarity, numbers >> SECOND_BITS, _second(numbers))
