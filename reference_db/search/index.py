"""The index: all informative reference seconds of one generation of the library, searched by likeness.

A generation is some parts (a large one, and small ones of what was added since) and which of their references are
still there. It never changes once it is made; the keeper makes the next one beside it. What a row finds depends on
the references alone, not on the rows searched with it nor on the part that a reference is in: equally similar seconds
aside, a library gives the same hits before and after its parts are merged. In a large library that holds for as long
as it has the same code book, which is learned once and kept with the large part.
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
from reference_db.search.feature_rows import FeatureFolder, HeldRows, Key, ReferenceRows, RowSource
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
    lists_for,
    merge_coded,
    single_threaded,
)
from reference_db.search.shard_files import ShardFiles
from reference_db.store.catalog import Catalog, Contents, Reference, ReferenceFeatures, ReferenceId

logger = logging.getLogger(__name__)

T = TypeVar("T", np.int32, np.float32)

EXACT_ROWS = 50_000  # seconds up to which a library is searched exactly; at 100,000 that is eight times as slow
AT_ONCE_ROWS = 40_000  # seconds that one refresh takes in, so that the first are found soon when many come
MAX_PARTS = 8
SMALL_ROWS = 20_000  # added or removed seconds that are never worth a merge by themselves
ADDED_SHARE, REMOVED_SHARE = 1 / 8, 1 / 4  # of the large part, from which a merge is worth it
OUTGROWN = 4  # a code book is learned anew when the library should have so many times its lists
NAMED = 5  # how many references a message names before it only counts


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """The most similar reference seconds of each row, the best first; reference -1 where there were no more."""

    reference: NDArray[np.int32]  # [n, k] index into ReferenceIndex.references
    second: NDArray[np.int32]  # [n, k] second of that reference
    similarity: NDArray[np.float32]  # [n, k] cosine


class ReferenceIndex:
    """All references of one generation; read-only and safe in any thread."""

    def __init__(
        self,
        references: Sequence[Reference],
        generation: int,
        parts: Sequence[IndexShard],
        source: RowSource,
        damaged: Mapping[ReferenceId, str] | None = None,
    ) -> None:
        self.references = tuple(references)
        self.generation = generation
        self.damaged = dict(damaged or {})  # references that are left out, each with what is wrong
        self.parts = tuple(parts)
        self._source = source
        self._places = {reference.id: i for i, reference in enumerate(self.references)}
        self._keys = [key_of(reference) for reference in self.references]
        self._standing = [self._places_of(part) for part in self.parts]
        self._exact = all(isinstance(part, FlatShard) for part in self.parts)
        self._n_rows = sum(reference.n_seconds - reference.n_uninformative for reference in self.references)

    @classmethod
    def build(cls, catalog: Catalog, encoder_id: str) -> "ReferenceIndex":
        """The catalogue's references as they are now; EncoderMismatch where another encoder made some of them.

        A damaged one is left out and named in `damaged`.
        """
        return IndexKeeper(catalog.data_dir, encoder_id).refresh()

    @classmethod
    def from_features(
        cls, pairs: Sequence[tuple[Reference, ReferenceFeatures]], generation: int = 0
    ) -> "ReferenceIndex":
        """An index of references at hand."""
        return cls([reference for reference, _ in pairs], generation, [FlatShard.of(pairs)], HeldRows(pairs))

    def __len__(self) -> int:
        """How many seconds can be found."""
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
        """Which of `references` has this id; None where none has, or where it was removed just now."""
        place = self._places.get(reference)
        return place if place is not None and self._source.has(self.references[place]) else None

    def rows(self, i: int) -> ReferenceRows:
        """The feature rows [n, 512] of reference i, the uninformative too, as long as `place` tells it."""
        return self._source.rows(self.references[i])

    def informative(self, i: int) -> NDArray[np.bool_]:
        """Which seconds of reference i can be found."""
        return self._source.informative(self.references[i])

    def stands(self, n: int) -> NDArray[np.bool_]:
        """Which references of part n are still there."""
        return self._standing[n][:-1] >= 0

    def _places_of(self, part: IndexShard) -> NDArray[np.int64]:
        """The place in this generation of each of the part's references, -1 where it is gone or another has its id."""
        places = np.full(len(part.keys) + 1, -1, np.int64)  # one more, for a part without any
        for n, key in enumerate(part.keys):
            place = None if key is None else self._places.get(key[0])
            if place is not None and self._keys[place] == key:
                places[n] = place
        return places

    def _search(self, row: NDArray[np.float32], k: int) -> ShardHits:
        n = k if self._exact else max(k, SHORTLIST)
        found = [self._alive(part, places, row, n) for part, places in zip(self.parts, self._standing, strict=True)]
        best = found[0] if len(found) == 1 else _best(found, n)
        return best if self._exact else self._ranked_again(best, row, k)

    def _alive(self, part: IndexShard, places: NDArray[np.int64], row: NDArray[np.float32], n: int) -> ShardHits:
        """What the part finds among its references that are still there; asks for more where others are in the way."""
        asked = n
        while True:
            found = part.search(row, asked)
            place = places[found.place]
            alive = place >= 0
            n_alive = np.count_nonzero(alive)
            if n_alive == len(alive):
                return ShardHits(found.similarity[:n], place[:n], found.second[:n])
            if n_alive >= n or len(place) < asked or asked >= len(part):
                kept = np.flatnonzero(alive)[:n]
                return ShardHits(found.similarity[kept], place[kept], found.second[kept])
            asked = min(4 * asked, len(part))

    def _ranked_again(self, found: ShardHits, row: NDArray[np.float32], k: int) -> ShardHits:
        """The k best of these by their features themselves; of equal ones in the order of the library."""
        keys = [self._keys[place] for place in found.place.tolist()]
        similarity = self._source.similarity(row, keys, found.second.tolist())
        best = np.lexsort((found.second, found.place, -similarity))[:k]
        return ShardHits(similarity[best], found.place[best], found.second[best])


class IndexKeeper:
    """The index of one library, from generation to generation; `refresh` and `compact` may run in two threads.

    New references join as a small part of their own and removed ones are merely left out, so neither makes the large
    part anew; `compact` merges parts once it is worth it, while the old ones go on being searched.
    """

    def __init__(self, data_dir: Path, encoder_id: str, *, exact_rows: int = EXACT_ROWS) -> None:
        self._data_dir = data_dir
        self._encoder_id = encoder_id
        self._exact_rows = exact_rows
        self._files = ShardFiles(data_dir / "index", encoder_id)
        self._source = FeatureFolder(data_dir / "features")
        self._lock = threading.RLock()
        self._parts: list[IndexShard] = []
        self._damaged: dict[Key, str] = {}  # references whose features were found damaged
        self._current: ReferenceIndex | None = None
        self._made_of = (0, "")  # generation and tally of the catalogue that the current index was made of
        self._is_whole = False  # whether the current generation has all that the catalogue had

    def refresh(self) -> ReferenceIndex:
        """The newest generation; the same object as before where nothing changed.

        Raises EncoderMismatch where another encoder made some references, and StorageError.
        """
        was_there = self._current is not None and self._current.generation != 0
        with self._lock, Catalog.open(self._data_dir, must_exist=was_there) as catalog:
            of_now = (catalog.generation(), catalog.checksum())
            if self._current is not None and self._is_whole and of_now == self._made_of:
                return self._current
            contents = self._contents(catalog)
            if self._current is None and _n_rows(contents.references) > self._exact_rows:
                self._parts = [self._large(catalog, contents)]
            self._recover(catalog, contents)
            self._take_in(catalog, contents, None if self._current is None else AT_ONCE_ROWS)
            return self._publish(contents)

    @property
    def is_whole(self) -> bool:
        """Whether the newest generation has all that the catalogue had when it was last read."""
        return self._is_whole

    @property
    def wants_compaction(self) -> bool:
        """Whether merging parts is worth its cost now."""
        with self._lock:
            return self._plan() is not None

    def compact(self) -> ReferenceIndex | None:
        """A generation of the same references with fewer parts, made aside; None where it is not worth it now.

        Only one process of a library does it at a time.
        """
        with self._lock:
            plan, index = self._plan(), self._current
        if plan is None or index is None:
            return None
        with self._files.locked() as ours:
            if not ours:
                return None
            return self._swapped(self._made_anew() if plan == "learn" else self._merged(plan, index))

    def settled(self) -> ReferenceIndex:
        """The newest generation with all that is there, its parts merged where it is worth it: for who can wait."""
        index = self.refresh()
        while not self._is_whole:
            index = self.refresh()
        return self.compact() or index

    def reindex(self) -> ReferenceIndex:
        """The index made anew from the features, a large one with a code book learned anew; StorageError if busy."""
        with self._files.locked() as ours:
            if not ours:
                raise CatalogLocked(f"Another process is writing the index in {self._files.folder}; try again later.")
            return self._swapped(self._made_anew())

    def _swapped(self, parts: list[IndexShard]) -> ReferenceIndex:
        """The generation of these parts and of what came while they were made."""
        with self._lock, Catalog.open(self._data_dir) as catalog:
            contents = self._contents(catalog)
            self._parts = parts
            self._take_in(catalog, contents, None)
            return self._publish(contents)

    # --- from catalogue to generation ---------------------------------------------------------------------------------

    def _contents(self, catalog: Catalog) -> Contents:
        contents = catalog.contents()
        if contents.problem:
            logger.error("the catalogue is damaged: %s; run `copywatch refs verify --repair`", contents.problem)
        foreign = [reference.id for reference in contents.references if reference.encoder_id != self._encoder_id]
        if foreign:
            names = ", ".join(foreign[:NAMED]) + (f" and {len(foreign) - NAMED} more" if len(foreign) > NAMED else "")
            raise EncoderMismatch(
                f"Another encoder made the features of {names}; run `copywatch refs add FILE` again with the video of "
                f"each, which replaces them by this encoder's ({self._encoder_id}), or `copywatch refs rm ID`."
            )
        return contents

    def _take_in(self, catalog: Catalog, contents: Contents, at_most: int | None) -> None:
        """Adds a part of the references that no part has yet, the oldest first."""
        held = self._held() | self._damaged.keys()
        new = _in_order(reference for reference in contents.references if key_of(reference) not in held)
        taken, n_rows = 0, 0
        while taken < len(new) and (at_most is None or not taken or n_rows + new[taken].n_seconds <= at_most):
            n_rows += new[taken].n_seconds
            taken += 1
        self._is_whole = taken == len(new)
        if taken:
            pairs = self._pairs(catalog, new[:taken])
            book = next((part.book for part in self._parts if isinstance(part, CodedShard)), None)
            self._parts = [*self._parts, FlatShard.of(pairs) if book is None else book.encoded(pairs)]

    def _pairs(self, catalog: Catalog, references: Sequence[Reference]) -> Iterator[Pair]:
        """Each reference with its features; a damaged one is remembered, one that is gone meanwhile is left out."""
        for reference in references:
            try:
                yield reference, catalog.exact_features(reference)
            except UnknownReference:
                continue
            except DamagedReference as error:
                self._damaged[key_of(reference)] = error.what

    def _recover(self, catalog: Catalog, contents: Contents) -> None:
        """Forgets the damage of references that are gone or whole again."""
        damaged = [reference for reference in contents.references if key_of(reference) in self._damaged]
        self._damaged = {}
        for _ in self._pairs(catalog, damaged):
            pass

    def _publish(self, contents: Contents) -> ReferenceIndex:
        held = self._held() - self._damaged.keys()
        damaged = dict(contents.damaged)
        damaged |= {r.id: self._damaged[key_of(r)] for r in contents.references if key_of(r) in self._damaged}
        references = [reference for reference in contents.references if key_of(reference) in held]
        generation = contents.generation if self._is_whole or self._current is None else self._current.generation
        if 0 <= contents.generation < self._made_of[0]:
            logger.warning(
                "the library went back from generation %d to %d, as by a backup; what it has no more is not searched",
                self._made_of[0],
                contents.generation,
            )
        self._made_of = (contents.generation, contents.checksum)
        self._source.keep_open({key_of(reference) for reference in references})
        self._current = ReferenceIndex(references, generation, self._parts, self._source, damaged)
        return self._current

    def _held(self) -> set[Key]:
        return {key for part in self._parts for key in part.keys if key is not None}

    # --- the large part -----------------------------------------------------------------------------------------------

    def _large(self, catalog: Catalog, contents: Contents) -> CodedShard:
        """The large part from disk, the features of its references verified; made again where there is none."""
        part = self._files.read()
        if part is None:
            with self._files.locked() as ours:
                part = self._made(catalog, contents)
                return self._files.write(part) if ours else part
        held = {key for key in part.keys if key is not None}
        for reference in contents.references:
            if key_of(reference) in held and (what := _damage(catalog.features_path(reference), reference)):
                self._damaged[key_of(reference)] = what
        return part

    def _made(self, catalog: Catalog, contents: Contents) -> CodedShard:
        """The large part, learned and made from the features of all references."""
        references = _in_order(contents.references)
        n_rows = _n_rows(references)
        logger.info("making the index of %d references, %d s; this takes a while", len(references), n_rows)
        every = max(1, n_rows // (LIST_SAMPLE * lists_for(n_rows)))
        sample, n_seen = [], 0
        for _, features in self._pairs(catalog, references):
            rows = features.rows[features.informative]
            sample.append(rows[(-n_seen) % every :: every].copy())  # a view would keep all of them
            n_seen += len(rows)
        book = CodeBook.learned(np.concatenate(sample).astype(np.float32), n_rows)
        return book.encoded(self._pairs(catalog, references))

    def _plan(self) -> str | None:
        """What is worth doing: begin anew with another code book or none, merge all parts, fold the small ones."""
        index = self._current
        if index is None or not index.parts:
            return None
        main, added = index.parts[0], index.parts[1:]
        n_removed = sum(map(len, index.parts)) - len(index)
        if isinstance(main, CodedShard):
            if len(index) <= self._exact_rows // 2 or lists_for(len(index)) > OUTGROWN * main.book.n_lists:
                return "learn"
        elif len(index) > self._exact_rows:
            return "learn"
        if sum(map(len, added)) > max(SMALL_ROWS, ADDED_SHARE * len(main)):
            return "merge"
        if n_removed > max(SMALL_ROWS, REMOVED_SHARE * len(main)):
            return "merge"
        return "fold" if len(added) >= MAX_PARTS else None

    def _merged(self, plan: str, index: ReferenceIndex) -> list[IndexShard]:
        single_threaded()
        first = 1 if plan == "fold" else 0
        keep = [index.stands(n) for n in range(first, len(index.parts))]
        flat = [part for part in index.parts[first:] if isinstance(part, FlatShard)]
        coded = [part for part in index.parts[first:] if isinstance(part, CodedShard)]
        if flat:
            return [*index.parts[:first], FlatShard.merged(flat, keep)]
        merged = merge_coded(coded, keep)
        return [*index.parts[:first], merged if first else self._files.write(merged)]

    def _made_anew(self) -> list[IndexShard]:
        with Catalog.open(self._data_dir) as catalog:
            contents = self._contents(catalog)
            if _n_rows(contents.references) > self._exact_rows:
                return [self._files.write(self._made(catalog, contents))]
            return [FlatShard.of(self._pairs(catalog, _in_order(contents.references)))]


def _table(rows: Sequence[NDArray[Any]], k: int, kind: type[T]) -> NDArray[T]:
    """The rows below each other, each made k long by -1."""
    if all(len(row) == k for row in rows):
        return np.array(rows, kind).reshape(-1, k)
    table = np.full((len(rows), k), -1, kind)
    for n, row in enumerate(rows):
        table[n, : len(row)] = row
    return table


def _best(found: Sequence[ShardHits], n: int) -> ShardHits:
    """The n most similar seconds of all parts."""
    similarity = np.concatenate([np.empty(0, np.float32), *(one.similarity for one in found)])
    place = np.concatenate([np.empty(0, np.int64), *(one.place for one in found)])
    second = np.concatenate([np.empty(0, np.int64), *(one.second for one in found)])
    best = np.argsort(-similarity, kind="stable")[:n]
    return ShardHits(similarity[best], place[best], second[best])


def _n_rows(references: Sequence[Reference]) -> int:
    return sum(reference.n_seconds - reference.n_uninformative for reference in references)


def _in_order(references: Iterable[Reference]) -> list[Reference]:
    """As they were added: of seconds that are equally similar, the older reference's come first."""
    return sorted(references, key=lambda reference: (reference.added_at, reference.id))


def _damage(path: Path, reference: Reference) -> str | None:
    """What is wrong with a feature file, if anything."""
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == reference.features_sha256:
                return None
            return "its feature file has changed on disk"
    except OSError as error:
        return f"its feature file cannot be read ({error.strerror})"
