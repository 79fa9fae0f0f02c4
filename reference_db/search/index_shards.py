"""Parts of an index: the informative seconds of some references, searchable, never changed once made.

A small library is searched exactly. A large one is searched by codes of 64 bytes a second (RaBitQ: one bit for each
of the 512 numbers, of a row turned so that no number matters more than another) in lists of like seconds, of which a
row looks through those nearest to it; what is found is a shortlist, to be ranked again by the features themselves.
Every part of a large library has the same code book, so a second's code and list do not depend on the part it is in,
and parts can be merged without being made again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from reference_db.search.feature_rows import Key
from reference_db.store.references import FEATURE_SIZE, Reference, ReferenceFeatures

_faiss: Any = faiss  # its types know only a part of it

SHORTLIST = 40  # seconds that are ranked again by their features
LIST_ROWS = 1024  # seconds in a list, about
MIN_LISTS, MAX_LISTS = 64, 32768
LISTS_READ = 192  # of 1,024 lists, that a row looks through; of more lists more, by their number's eighth root
LIST_SAMPLE = 32  # seconds per list that the code book is learned from
LEARNING_ROUNDS = 8
BLOCK_ROWS = 1 << 15  # rows compared at once while learning
QUERY_BITS = 8
SECOND_BITS = 32  # a row's number is its reference's place in the part, then its second

Pair = tuple[Reference, ReferenceFeatures]


def key_of(reference: Reference) -> Key:
    return reference.id, reference.features_sha256


@dataclass(frozen=True, slots=True, eq=False)
class ShardHits:
    """The most similar seconds of one part, the best first."""

    similarity: NDArray[np.float32]
    place: NDArray[np.int64]  # of the reference in the part
    second: NDArray[np.int64]


class IndexShard(Protocol):
    """Some references' seconds; `keys` tells which, and None where a merge took one out."""

    @property
    def keys(self) -> tuple[Key | None, ...]: ...

    def __len__(self) -> int: ...

    def search(self, row: NDArray[np.float32], n: int) -> ShardHits: ...


def single_threaded() -> None:
    """Makes FAISS compute in the calling thread alone, and every row as if it were the only one."""
    faiss.omp_set_num_threads(1)  # it holds for the calling thread only
    # Batches of 20 and more would go through BLAS, whose sums depend on the size of the batch.
    faiss.cvar.distance_compute_blas_threshold = 1 << 30


class FlatShard:
    """Seconds that are compared one by one."""

    def __init__(self, keys: tuple[Key, ...], flat: Any, numbers: NDArray[np.int64]) -> None:
        self.keys = keys
        self._flat = flat
        self._numbers = numbers

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> FlatShard:
        """The part of these references, in this order."""
        keys: list[Key] = []
        numbers, flat = [np.empty(0, np.int64)], faiss.IndexFlatIP(FEATURE_SIZE)
        for reference, features in pairs:
            seconds = np.flatnonzero(features.informative)
            flat.add(features.rows[seconds].astype(np.float32))
            numbers.append(seconds + (len(keys) << SECOND_BITS))
            keys.append(key_of(reference))
        return cls(tuple(keys), flat, np.concatenate(numbers))

    @classmethod
    def merged(cls, parts: Sequence[FlatShard], keep: Sequence[NDArray[np.bool_]]) -> FlatShard:
        """One part of those references of the parts that are to be kept."""
        keys: list[Key] = []
        numbers, flat = [np.empty(0, np.int64)], faiss.IndexFlatIP(FEATURE_SIZE)
        for part, kept in zip(parts, keep, strict=True):
            place = part._numbers >> SECOND_BITS
            new_place = np.cumsum(kept) - 1 + len(keys)
            rows = np.flatnonzero(kept[place])
            if len(rows):
                flat.add(part._flat.reconstruct_n(0, len(part))[rows])
            numbers.append((new_place[place[rows]] << SECOND_BITS) | _second(part._numbers[rows]))
            keys += [key for key, is_kept in zip(part.keys, kept, strict=True) if is_kept]
        return cls(tuple(keys), flat, np.concatenate(numbers))

    def __len__(self) -> int:
        return len(self._numbers)

    def search(self, row: NDArray[np.float32], n: int) -> ShardHits:
        """The n most similar seconds, with their similarity."""
        if not len(self):
            return _found(np.empty(0, np.float32), np.empty(0, np.int64))
        single_threaded()
        similarity, rows = self._flat.search(row[None], min(n, len(self)))
        return _found(similarity[0], self._numbers[rows[0]])


class CodeBook:
    """How rows become codes, and which list each belongs to; learned once from a sample of the library."""

    def __init__(self, quantizer: Any, owner: Any) -> None:
        self._quantizer = quantizer  # which list a row belongs to; all parts share it
        self._owner = owner  # what must not be freed while it is in use
        self.n_lists = int(quantizer.ntotal)
        n_groups = _faiss.downcast_index(quantizer).nlist
        self.reading = _faiss.SearchParametersIVF(
            nprobe=min(self.n_lists, round(LISTS_READ * (self.n_lists / 1024) ** 0.125)),
            quantizer_params=_faiss.SearchParametersIVF(nprobe=max(32, n_groups // 2)),
        )

    @classmethod
    def learned(cls, rows: NDArray[np.float32], n_rows: int) -> CodeBook:
        """A code book for some `n_rows` seconds like these rows [n, 512]."""
        n_lists = lists_for(n_rows)
        n_groups = 1 << ((n_lists.bit_length()) // 2)
        sample = turned(rows)
        groups, owner = _clusters(sample, n_groups)
        share = np.maximum(1, np.bincount(owner, minlength=n_groups) * (n_lists - n_groups) // len(sample) + 1)
        leaves = np.concatenate(
            [_clusters(sample[owner == g], int(share[g]))[0] for g in range(n_groups) if (owner == g).any()]
        )
        single_threaded()
        top = faiss.IndexFlatIP(FEATURE_SIZE)
        top.add(groups)
        quantizer = faiss.IndexIVFFlat(top, FEATURE_SIZE, n_groups, faiss.METRIC_INNER_PRODUCT)
        quantizer.is_trained = True
        quantizer.nprobe = max(8, n_groups // 8)  # groups of lists in which a new row's own is looked for
        quantizer.add(leaves)
        quantizer.make_direct_map()
        return cls(quantizer, top)

    def encoded(self, pairs: Iterable[Pair]) -> CodedShard:
        """The part of these references, in this order."""
        single_threaded()
        index = self.empty()
        keys: list[Key] = []
        for reference, features in pairs:
            seconds = np.flatnonzero(features.informative)
            if len(seconds):
                rows = turned(features.rows[seconds].astype(np.float32))
                index.add_with_ids(rows, seconds + (len(keys) << SECOND_BITS))
            keys.append(key_of(reference))
        return CodedShard(self, tuple(keys), index)

    def empty(self) -> Any:
        """A FAISS index of this code book, without rows."""
        index = faiss.IndexIVFRaBitQFastScan(
            self._quantizer, FEATURE_SIZE, self.n_lists, faiss.METRIC_INNER_PRODUCT, 32, True, 1
        )
        index.qb = QUERY_BITS
        index.is_trained = True
        return index


class CodedShard:
    """Seconds as codes in lists; what it finds is by an estimate of the similarity."""

    def __init__(self, book: CodeBook, keys: tuple[Key | None, ...], index: Any) -> None:
        self.book = book
        self.keys = keys
        self.index = index

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search(self, row: NDArray[np.float32], n: int) -> ShardHits:
        """The n seconds that seem most similar, with the estimate."""
        single_threaded()
        similarity, numbers = self.index.search(turned(row[None]), n, params=self.book.reading)
        n_found = n if numbers[0, -1] >= 0 else int(np.count_nonzero(numbers[0] >= 0))  # -1 where there are no more
        return _found(similarity[0, :n_found], numbers[0, :n_found])


def merge_coded(parts: Sequence[CodedShard], keep: Sequence[NDArray[np.bool_]]) -> CodedShard:
    """One part of all these, which stay as they are; of references that are not kept the place is left empty."""
    index, keys = _faiss.clone_index(parts[0].index), list(parts[0].keys)
    for part in parts[1:]:
        index.merge_from(faiss.clone_index(part.index), len(keys) << SECOND_BITS)
        keys += part.keys
    for place in np.flatnonzero(~np.concatenate(list(keep))).tolist():
        if keys[place] is not None:
            index.remove_ids(faiss.IDSelectorRange(place << SECOND_BITS, (place + 1) << SECOND_BITS))
            keys[place] = None
    return CodedShard(CodeBook(_faiss.downcast_index(index.quantizer), index), tuple(keys), index)


def lists_for(n_rows: int) -> int:
    """How many lists suit a library of this many seconds: a power of two."""
    return min(MAX_LISTS, 1 << max(MIN_LISTS.bit_length() - 1, round(math.log2(max(1, n_rows) / LIST_ROWS))))


def _clusters(rows: NDArray[np.float32], n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """n directions that the rows gather around, and which is nearest to each row."""
    n = min(n, len(rows))
    centres = rows[np.random.default_rng(1).choice(len(rows), n, replace=False)]
    for _ in range(LEARNING_ROUNDS):
        nearest = _nearest(rows, centres)
        order = np.argsort(nearest, kind="stable")
        there, starts = np.unique(nearest[order], return_index=True)
        sums = np.add.reduceat(rows[order], starts, axis=0)
        centres[there] = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
    return centres, _nearest(rows, centres)


def _nearest(rows: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.int64]:
    blocks = (rows[at : at + BLOCK_ROWS] @ centres.T for at in range(0, len(rows), BLOCK_ROWS))
    return np.concatenate([block.argmax(axis=1) for block in blocks])


def turned(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows [n, 512] turned so that no number matters more than another; their products stay."""
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty_like(rows)
    _TURN.apply_noalloc(len(rows), _faiss.swig_ptr(rows), _faiss.swig_ptr(out))
    return out


def _turn() -> Any:
    turn = faiss.HadamardRotation(FEATURE_SIZE)
    turn.train(np.zeros((1, FEATURE_SIZE), np.float32))
    return turn


_TURN = _turn()


def _second(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers & ((1 << SECOND_BITS) - 1)


def _found(similarity: NDArray[np.float32], numbers: NDArray[np.int64]) -> ShardHits:
    return ShardHits(similarity, numbers >> SECOND_BITS, _second(numbers))
