"""Sample references with random features, for tests of store, index and rights."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from reference_db.store.references import Reference, ReferenceFeatures, ReferenceId

FILM, NEWS = ReferenceId("film-1"), ReferenceId("news")


def some_features(n_seconds: int, seed: int = 0) -> ReferenceFeatures:
    """Random unit rows; every fifth second is uninformative."""
    rows = np.random.default_rng(seed).standard_normal((n_seconds, 512))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return ReferenceFeatures(rows.astype(np.float16), np.arange(n_seconds) % 5 != 4)


def some_reference(id: ReferenceId = FILM, n_seconds: int = 10) -> Reference:
    when = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    tags = {"year": "1999", "Ä": "ö"}
    return Reference(id, "A Film", "Owner & Söhne", tags, "c" * 64, n_seconds, n_seconds // 5, "enc-1", "", when)
