"""A library with the longest reference that is allowed, and the memory of the process that serves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from reference_db.store.catalog import Catalog, ReferenceFeatures, ReferenceId
from tests.support.sample_references import some_reference

LONG_S = 249_000  # of 250,000
SHOT_S = 5000  # after which its rows repeat: random numbers for all of it would take a minute


def long_features(n_seconds: int = LONG_S, seed: int = 0) -> ReferenceFeatures:
    rows = np.random.default_rng(seed).standard_normal((min(SHOT_S, n_seconds), 512)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    repeated = np.resize(rows.astype(np.float16), (n_seconds, 512))
    return ReferenceFeatures(repeated, np.ones(n_seconds, np.bool_))


def add_long_reference(
    data_dir: Path, encoder_id: str, id: str = "long", n_seconds: int = LONG_S, seed: int = 0
) -> None:
    """Adds a reference of this length, with its own random rows."""
    reference = replace(
        some_reference(ReferenceId(id), n_seconds),
        n_uninformative=0,
        encoder_id=encoder_id,
        content_sha256=f"{seed:064x}",
    )
    with Catalog.open(data_dir, write=True) as catalog:
        catalog.add(reference, long_features(n_seconds, seed))


def memory_bytes(pid: int) -> int:
    """The memory that the process uses now."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most memory that it has used since `forget_peak`."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
