"""Films with synthetic features in a library on disk, and what its index finds of their copies."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference_db.search.index import Hits, IndexKeeper, ReferenceIndex
from reference_db.store.catalog import Catalog, ReferenceFeatures, ReferenceId
from tests.support.sample_references import some_reference

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
