"""The index: a read-only snapshot of all informative reference seconds, searched by likeness.

A catalogue goes in; out come, for each live row, the most similar reference seconds. The index is a cache: it can
always be built again from the catalogue, and a generation never changes once it is built. What a row finds does not
depend on the rows searched with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from reference_db.catalog import FEATURE_SIZE, Catalog, Reference, ReferenceFeatures, ReferenceId
from reference_db.errors import DamagedReference, EncoderMismatch, UnknownReference

NAMED = 5  # how many references a message names before it only counts


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """The most similar reference seconds of each row, the best first; reference -1 where there were no more."""

    reference: NDArray[np.int32]  # [n, k] index into ReferenceIndex.references
    second: NDArray[np.int32]  # [n, k] second of that reference
    similarity: NDArray[np.float32]  # [n, k] cosine


class ReferenceIndex:
    """All references of one generation; made by `build` or `from_features`, then read-only and safe in any thread."""

    def __init__(
        self,
        pairs: Sequence[tuple[Reference, ReferenceFeatures]],
        generation: int,
        damaged: Mapping[ReferenceId, str] | None = None,
    ) -> None:
        self.damaged = dict(damaged or {})  # references that are left out, each with what is wrong
        self.references = tuple(reference for reference, _ in pairs)
        self.generation = generation
        self._features = tuple(features for _, features in pairs)
        self._places = {reference.id: i for i, reference in enumerate(self.references)}
        seconds = [np.flatnonzero(features.informative).astype(np.int32) for features in self._features]
        owners = [np.full(len(s), i, np.int32) for i, s in enumerate(seconds)]
        self._second = np.concatenate([*seconds, np.empty(0, np.int32)])
        self._owner = np.concatenate([*owners, np.empty(0, np.int32)])
        self._flat: Any = faiss.IndexFlatIP(FEATURE_SIZE)
        for features, informative in zip(self._features, seconds, strict=True):
            self._flat.add(features.rows[informative].astype(np.float32))

    @classmethod
    def build(cls, catalog: Catalog, encoder_id: str) -> "ReferenceIndex":
        """The catalogue's references as they are now; EncoderMismatch where another encoder made some of them.

        A damaged one is left out and named in `damaged`.
        """
        contents = catalog.contents()
        references, damaged = contents.references, dict(contents.damaged)
        foreign = [reference.id for reference in references if reference.encoder_id != encoder_id]
        if foreign:
            names = ", ".join(foreign[:NAMED]) + (f" and {len(foreign) - NAMED} more" if len(foreign) > NAMED else "")
            raise EncoderMismatch(
                f"Another encoder made the features of {names}; run `copywatch refs add FILE` again with the video of "
                f"each, which replaces them by this encoder's ({encoder_id}), or `copywatch refs rm ID`."
            )
        pairs = []
        for reference in references:
            try:
                pairs.append((reference, catalog.features(reference.id)))
            except UnknownReference:
                continue  # removed while we were loading
            except DamagedReference as error:
                damaged[reference.id] = error.what
        return cls(pairs, contents.generation, damaged)

    @classmethod
    def from_features(
        cls, pairs: Sequence[tuple[Reference, ReferenceFeatures]], generation: int = 0
    ) -> "ReferenceIndex":
        """An index of references at hand."""
        return cls(pairs, generation)

    def __len__(self) -> int:
        """How many seconds can be found."""
        return len(self._second)

    def search(self, rows: NDArray[np.float32], k: int) -> Hits:
        """The k most similar informative reference seconds of each row [n, 512]."""
        shape = (len(rows), k)
        if len(self) == 0 or len(rows) == 0:
            none = np.full(shape, -1, np.int32)
            return Hits(none, none.copy(), np.full(shape, -1, np.float32))
        faiss.omp_set_num_threads(1)  # it holds for the calling thread only
        # Batches of 20 and more would go through BLAS, whose sums depend on the size of the batch.
        faiss.cvar.distance_compute_blas_threshold = 1 << 30
        similarity, found = self._flat.search(np.ascontiguousarray(rows, np.float32), k)
        is_none = found < 0
        owner, second = self._owner[found], self._second[found]
        owner[is_none] = second[is_none] = -1
        similarity[is_none] = -1
        return Hits(owner, second, similarity)

    def place(self, reference: ReferenceId) -> int | None:
        """Which of `references` has this id; None where none has."""
        return self._places.get(reference)

    def rows(self, i: int) -> NDArray[np.float32]:
        """All feature rows [n, 512] of reference i, the uninformative too."""
        return self._features[i].rows.astype(np.float32)

    def informative(self, i: int) -> NDArray[np.bool_]:
        """Which seconds of reference i can be found."""
        return self._features[i].informative
