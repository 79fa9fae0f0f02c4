"""The index: all informative reference seconds of one generation of the library, searched by similarity.

A generation consists of shards (a main one, and small ones of what was added since) and of the references in them that
still exist. It is immutable; the keeper builds the next one beside it. The hits of a row depend on the references only,
not on the rows searched with it nor on the shard of a reference: except for equally similar seconds, a library gives
the same hits before and after its shards are merged. In a large library that holds as long as it has the same code
book, which is trained once and stored with the main shard.
"""

import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from reference_db.errors import CatalogLocked, DamagedReference, EncoderMismatch, UnknownReference
from reference_db.search.feature_rows import (
    FeatureFolder,
    Key,
    MemoryRows,
    ReferenceRows,
    RowSource,
    informative_blocks,
)
from reference_db.search.index_shards import (
    LIST_SAMPLE,
    SHORTLIST,
    CodeBook,
    CodedShard,
    FlatShard,
    IndexShard,
    Pair,
    ShardHits,
    key_of,
    merge_coded,
    n_lists_for,
    single_threaded,
)
from reference_db.search.shard_files import ShardFiles
from reference_db.store.catalog import Catalog, Contents, Reference, ReferenceFeatures, ReferenceId

logger = logging.getLogger(__name__)

T = TypeVar("T", np.int32, np.float32)

EXACT_ROWS = 50_000  # seconds up to which a library is searched exactly; at 100,000 that is eight times slower
MAX_EXACT_FACTOR = (
    2  # times EXACT_ROWS, up to which a library that has grown is searched exactly before it is compacted
)
REFRESH_ROWS = 40_000  # seconds that one refresh adds, so that the first of many are found soon
MAX_ADDED_SHARDS = 8  # then they are merged into one
SMALL_ROWS = 20_000  # fewer added or removed seconds are never worth a merge
ADDED_SHARE, REMOVED_SHARE = 1 / 8, 1 / 4  # of the main shard, from which a merge is worth its cost
RETRAIN_FACTOR = 4  # the code book is trained again when the library needs this many times its lists
MAX_NAMED = 5  # references that a message names; the others are counted


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """The most similar reference seconds of each row, the best first; then reference -1."""

    reference: NDArray[np.int32]  # [n, k] index into ReferenceIndex.references
    second: NDArray[np.int32]  # [n, k] second of that reference
    similarity: NDArray[np.float32]  # [n, k] cosine


class ReferenceIndex:
    """All references of one generation; immutable and thread-safe."""

    def __init__(
        self,
        references: Sequence[Reference],
        generation: int,
        shards: Sequence[IndexShard],
        source: RowSource,
        damaged: Mapping[ReferenceId, str] | None = None,
    ) -> None:
        self.references = tuple(references)
        self.generation = generation
        self.damaged = dict(damaged or {})  # references that are not searched, each with its fault
        self.shards = tuple(shards)
        self._source = source
        self._places = {reference.id: i for i, reference in enumerate(self.references)}
        self._keys = [key_of(reference) for reference in self.references]
        self._features_ids: dict[Key, str] = {}
        self._places_by_shard = [self._places_of(shard) for shard in self.shards]
        self._exact = all(isinstance(shard, FlatShard) for shard in self.shards)
        self._n_rows = sum(reference.n_seconds - reference.n_uninformative for reference in self.references)

    @classmethod
    def build(cls, catalog: Catalog, encoder_id: str) -> "ReferenceIndex":
        """The index of the catalogue's current references; EncoderMismatch if another encoder made some of them.

        Damaged ones are listed in `damaged` and not searched.
        """
        return IndexKeeper(catalog.data_dir, encoder_id).refresh()

    @classmethod
    def from_features(
        cls, pairs: Sequence[tuple[Reference, ReferenceFeatures]], generation: int = 0
    ) -> "ReferenceIndex":
        """An index of references in memory."""
        return cls([reference for reference, _ in pairs], generation, [FlatShard.build(pairs)], MemoryRows(pairs))

    def __len__(self) -> int:
        """The number of searchable seconds."""
        return self._n_rows

    def search(self, rows: NDArray[np.float32], k: int) -> Hits:
        """The k most similar informative reference seconds of each row [n, 512]."""
        found = [self._search(row, k) for row in np.ascontiguousarray(rows, np.float32)]
        return Hits(
            _table([one.place for one in found], k, np.int32),
            _table([one.second for one in found], k, np.int32),
            _table([one.similarity for one in found], k, np.float32),
        )

    def place(self, reference: ReferenceId) -> int | None:
        """Which of `references` has this id; None if none has, or if its file was just removed."""
        place = self._places.get(reference)
        return place if place is not None and self._source.has(self.references[place]) else None

    def rows(self, i: int) -> ReferenceRows:
        """The feature rows [n, 512] of reference i, uninformative ones included; `place` must have returned i."""
        return self._source.rows(self.references[i])

    def informative(self, i: int) -> NDArray[np.bool_]:
        """Which seconds of reference i are searchable."""
        return self._source.informative(self.references[i])

    def features_id(self, i: int) -> str:
        """The identity of the features of reference i; `place` must have returned i."""
        reference = self.references[i]
        if reference.features_id:
            return reference.features_id
        key = self._keys[i]  # of an earlier version: computed once, when the reference is first in use
        if key not in self._features_ids:
            self._features_ids[key] = self._source.features_id(reference)
        return self._features_ids[key]

    def is_present(self, n: int) -> NDArray[np.bool_]:
        """Which references of shard n belong to this generation."""
        return self._places_by_shard[n][:-1] >= 0

    def _places_of(self, shard: IndexShard) -> NDArray[np.int64]:
        """The place in this generation of each of the shard's references, -1 if it was removed or replaced."""
        places = np.full(len(shard.keys) + 1, -1, np.int64)  # one more, for a shard without any
        for n, key in enumerate(shard.keys):
            place = None if key is None else self._places.get(key[0])
            if place is not None and self._keys[place] == key:
                places[n] = place
        return places

    def _search(self, row: NDArray[np.float32], k: int) -> ShardHits:
        n = k if self._exact else max(k, SHORTLIST)
        found = [
            self._search_shard(shard, places, row, n)
            for shard, places in zip(self.shards, self._places_by_shard, strict=True)
        ]
        best = found[0] if len(found) == 1 else _best(found, n)
        return best if self._exact else self._rerank(best, row, k)

    def _search_shard(
        self, shard: IndexShard, places: NDArray[np.int64], row: NDArray[np.float32], n: int
    ) -> ShardHits:
        """The shard's n best hits among the references of this generation; searches deeper if others displace them."""
        n_requested = n
        while True:
            found = shard.search(row, n_requested)
            place = places[found.place]
            is_present = place >= 0
            n_present = np.count_nonzero(is_present)
            if n_present == len(is_present):
                return ShardHits(found.similarity[:n], place[:n], found.second[:n])
            if n_present >= n or len(place) < n_requested or n_requested >= len(shard):
                first = np.flatnonzero(is_present)[:n]
                return ShardHits(found.similarity[first], place[first], found.second[first])
            n_requested = min(4 * n_requested, len(shard))

    def _rerank(self, found: ShardHits, row: NDArray[np.float32], k: int) -> ShardHits:
        """The k best of these by their features themselves; ties in the order of the library."""
        keys = [self._keys[place] for place in found.place.tolist()]
        similarity = self._source.similarity(row, keys, found.second.tolist())
        best = np.lexsort((found.second, found.place, -similarity))[:k]
        return ShardHits(similarity[best], found.place[best], found.second[best])


class IndexKeeper:
    """The index of one library, generation after generation; `refresh` and `compact` may run in two threads.

    New references become a small shard of their own and removed ones are merely skipped, so neither rebuilds the main
    shard; `compact` merges shards once it is worth its cost, while the old ones are still searched.
    """

    def __init__(self, data_dir: Path, encoder_id: str, *, exact_rows: int = EXACT_ROWS) -> None:
        self._data_dir = data_dir
        self._encoder_id = encoder_id
        self._exact_rows = exact_rows
        self._files = ShardFiles(data_dir / "index", encoder_id)
        self._source = FeatureFolder(data_dir / "features")
        self._lock = threading.RLock()
        self._shards: list[IndexShard] = []
        self._damaged: dict[Key, str] = {}  # references with damaged features
        self._current: ReferenceIndex | None = None
        self._built_from = (0, "")  # the catalogue's generation and checksum of the current index
        self._is_complete = False

    def refresh(self) -> ReferenceIndex:
        """The newest generation; the same object as before if nothing changed.

        Raises EncoderMismatch if another encoder made some references, and StorageError.
        """
        existed = self._current is not None and self._current.generation != 0
        with self._lock, Catalog.open(self._data_dir, must_exist=existed) as catalog:
            version = (catalog.generation(), catalog.checksum())
            if self._current is not None and self._is_complete and version == self._built_from:
                return self._current
            contents = self._contents(catalog)
            if self._needs_main(_n_rows(contents.references)):
                self._shards = [self._load_main(catalog, contents)]
            self._recheck_damaged(catalog, contents)
            self._add_new(catalog, contents, None if self._current is None else REFRESH_ROWS)
            return self._publish(contents)

    @property
    def is_complete(self) -> bool:
        """Whether the newest generation has all references that the catalogue had when it was last read."""
        return self._is_complete

    @property
    def wants_compaction(self) -> bool:
        """Whether merging shards is worth its cost now."""
        with self._lock:
            return self._plan() is not None

    def compact(self) -> ReferenceIndex | None:
        """A generation of the same references with fewer shards, built in the background; None if not worth its cost.

        Only one process of a library does it at a time.
        """
        with self._lock:
            plan, index = self._plan(), self._current
        if plan is None or index is None:
            return None
        with self._files.locked() as ours:
            if not ours:
                return None
            return self._replace_shards(self._rebuild() if plan == "rebuild" else self._merge(plan, index))

    def refresh_fully(self) -> ReferenceIndex:
        """The newest generation with all references, compacted if worth its cost; takes longer than `refresh`."""
        index = self.refresh()
        while not self._is_complete:
            index = self.refresh()
        return self.compact() or index

    def reindex(self) -> ReferenceIndex:
        """The index rebuilt from the features, a large one with a new code book; CatalogLocked if busy."""
        with self._files.locked() as ours:
            if not ours:
                raise CatalogLocked(f"Another process is writing the index in {self._files.folder}; try again later.")
            return self._replace_shards(self._rebuild())

    def _replace_shards(self, shards: list[IndexShard]) -> ReferenceIndex:
        """A generation of these shards and of the references added while they were built."""
        with self._lock, Catalog.open(self._data_dir) as catalog:
            contents = self._contents(catalog)
            self._shards = shards
            self._add_new(catalog, contents, None)
            return self._publish(contents)

    # --- from catalogue to generation ---------------------------------------------------------------------------------

    def _contents(self, catalog: Catalog) -> Contents:
        contents = catalog.contents()
        if contents.problem:
            logger.error("the catalogue is damaged: %s; run `copywatch refs verify --repair`", contents.problem)
        foreign = [reference.id for reference in contents.references if reference.encoder_id != self._encoder_id]
        if foreign:
            names = ", ".join(foreign[:MAX_NAMED]) + (
                f" and {len(foreign) - MAX_NAMED} more" if len(foreign) > MAX_NAMED else ""
            )
            raise EncoderMismatch(
                f"Another encoder made the features of {names}; run `copywatch refs add FILE` again with the video of "
                f"each, which replaces them by this encoder's ({self._encoder_id}), or `copywatch refs rm ID`."
            )
        return contents

    def _needs_main(self, n_rows: int) -> bool:
        """Whether to load or build the main shard now: at the first start, and when much is added to a small library.

        What is added to a small library is searched exactly until it is compacted, at 2 kB per second; a reference of
        days would fill the memory meanwhile.
        """
        if self._current is None:
            return n_rows > self._exact_rows
        is_coded = any(isinstance(shard, CodedShard) for shard in self._shards)
        return not is_coded and n_rows > MAX_EXACT_FACTOR * self._exact_rows

    def _add_new(self, catalog: Catalog, contents: Contents, max_rows: int | None) -> None:
        """Adds a shard of the references that no shard has yet, the oldest first."""
        known = self._indexed() | self._damaged.keys()
        new = _by_age(reference for reference in contents.references if key_of(reference) not in known)
        n_added, n_rows = 0, 0
        while n_added < len(new) and (max_rows is None or not n_added or n_rows + new[n_added].n_seconds <= max_rows):
            n_rows += new[n_added].n_seconds
            n_added += 1
        self._is_complete = n_added == len(new)
        if n_added:
            pairs = self._pairs(catalog, new[:n_added])
            book = next((shard.book for shard in self._shards if isinstance(shard, CodedShard)), None)
            self._shards = [*self._shards, FlatShard.build(pairs) if book is None else book.encode(pairs)]

    def _pairs(self, catalog: Catalog, references: Sequence[Reference]) -> Iterator[Pair]:
        """Each reference with its features; records damaged ones, skips those removed meanwhile."""
        for reference in references:
            try:
                yield reference, catalog.exact_features(reference)
            except UnknownReference:
                continue
            except DamagedReference as error:
                self._damaged[key_of(reference)] = error.what

    def _recheck_damaged(self, catalog: Catalog, contents: Contents) -> None:
        """Reads the damaged references again and forgets those that were removed or repaired."""
        damaged = [reference for reference in contents.references if key_of(reference) in self._damaged]
        self._damaged = {}
        for _ in self._pairs(catalog, damaged):
            pass

    def _publish(self, contents: Contents) -> ReferenceIndex:
        indexed = self._indexed() - self._damaged.keys()
        damaged = dict(contents.damaged)
        damaged |= {r.id: self._damaged[key_of(r)] for r in contents.references if key_of(r) in self._damaged}
        references = [reference for reference in contents.references if key_of(reference) in indexed]
        generation = contents.generation if self._is_complete or self._current is None else self._current.generation
        if 0 <= contents.generation < self._built_from[0]:
            logger.warning(
                "the library went back from generation %d to %d, as after a restore; lost references are not searched",
                self._built_from[0],
                contents.generation,
            )
        self._built_from = (contents.generation, contents.checksum)
        self._source.close_except({key_of(reference) for reference in references})
        self._current = ReferenceIndex(references, generation, self._shards, self._source, damaged)
        return self._current

    def _indexed(self) -> set[Key]:
        return {key for shard in self._shards for key in shard.keys if key is not None}

    # --- the main shard -----------------------------------------------------------------------------------------------

    def _load_main(self, catalog: Catalog, contents: Contents) -> CodedShard:
        """The main shard from disk, the features of its references verified; built if there is none."""
        shard = self._files.read()
        if shard is None:
            with self._files.locked() as ours:
                shard = self._build_main(catalog, contents)
                return self._files.write(shard) if ours else shard
        indexed = {key for key in shard.keys if key is not None}
        for reference in contents.references:
            if key_of(reference) in indexed and (fault := _file_fault(catalog.features_path(reference), reference)):
                self._damaged[key_of(reference)] = fault
        return shard

    def _build_main(self, catalog: Catalog, contents: Contents) -> CodedShard:
        """The main shard, trained on and built from the features of all references."""
        references = _by_age(contents.references)
        n_rows = _n_rows(references)
        logger.info("building the index of %d references, %d s; this may take a while", len(references), n_rows)
        every = max(1, n_rows // (LIST_SAMPLE * n_lists_for(n_rows)))
        sample, n_read = [], 0
        for _, features in self._pairs(catalog, references):
            for _, rows in informative_blocks(features):
                sample.append(rows[(-n_read) % every :: every].copy())  # a view would hold all rows in memory
                n_read += len(rows)
        book = CodeBook.train(np.concatenate(sample), n_rows)
        return book.encode(self._pairs(catalog, references))

    def _plan(self) -> str | None:
        """What is worth its cost: "rebuild" (another code book or none), "merge" all shards, "fold" the small ones."""
        index = self._current
        if index is None or not index.shards:
            return None
        main, added = index.shards[0], index.shards[1:]
        n_removed = sum(map(len, index.shards)) - len(index)
        if isinstance(main, CodedShard):
            if len(index) <= self._exact_rows // 2 or n_lists_for(len(index)) > RETRAIN_FACTOR * main.book.n_lists:
                return "rebuild"
        elif len(index) > self._exact_rows:
            return "rebuild"
        if sum(map(len, added)) > max(SMALL_ROWS, ADDED_SHARE * len(main)):
            return "merge"
        if n_removed > max(SMALL_ROWS, REMOVED_SHARE * len(main)):
            return "merge"
        return "fold" if len(added) >= MAX_ADDED_SHARDS else None

    def _merge(self, plan: str, index: ReferenceIndex) -> list[IndexShard]:
        single_threaded()
        first = 1 if plan == "fold" else 0
        keep = [index.is_present(n) for n in range(first, len(index.shards))]
        flat = [shard for shard in index.shards[first:] if isinstance(shard, FlatShard)]
        coded = [shard for shard in index.shards[first:] if isinstance(shard, CodedShard)]
        if flat:
            return [*index.shards[:first], FlatShard.merge(flat, keep)]
        merged = merge_coded(coded, keep)
        return [*index.shards[:first], merged if first else self._files.write(merged)]

    def _rebuild(self) -> list[IndexShard]:
        with Catalog.open(self._data_dir) as catalog:
            contents = self._contents(catalog)
            if _n_rows(contents.references) > self._exact_rows:
                return [self._files.write(self._build_main(catalog, contents))]
            return [FlatShard.build(self._pairs(catalog, _by_age(contents.references)))]


def _table(rows: Sequence[NDArray[Any]], k: int, kind: type[T]) -> NDArray[T]:
    """The rows as a matrix with k columns, padded with -1."""
    if all(len(row) == k for row in rows):
        return np.array(rows, kind).reshape(-1, k)
    table = np.full((len(rows), k), -1, kind)
    for n, row in enumerate(rows):
        table[n, : len(row)] = row
    return table


def _best(found: Sequence[ShardHits], n: int) -> ShardHits:
    """The n most similar seconds of all shards."""
    similarity = np.concatenate([np.empty(0, np.float32), *(one.similarity for one in found)])
    place = np.concatenate([np.empty(0, np.int64), *(one.place for one in found)])
    second = np.concatenate([np.empty(0, np.int64), *(one.second for one in found)])
    best = np.argsort(-similarity, kind="stable")[:n]
    return ShardHits(similarity[best], place[best], second[best])


def _n_rows(references: Sequence[Reference]) -> int:
    return sum(reference.n_seconds - reference.n_uninformative for reference in references)


def _by_age(references: Iterable[Reference]) -> list[Reference]:
    """The oldest first: of equally similar seconds, the older reference's are found first."""
    return sorted(references, key=lambda reference: (reference.added_at, reference.id))


def _file_fault(path: Path, reference: Reference) -> str | None:
    """The fault of a feature file, if any."""
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == reference.features_sha256:
                return None
            return "its feature file has changed on disk"
    except OSError as error:
        return f"its feature file cannot be read ({error.strerror})"
