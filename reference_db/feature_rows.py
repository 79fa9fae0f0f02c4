"""Feature rows of references, read from their files as they are asked for.

A library of thousands of hours does not fit in memory, and only the few references that may be on air are ever
compared second by second. So rows stay on disk (the system keeps in memory what is used) and are read by position,
from files that were verified when the index took them in. They are read and not mapped: a file that is cut short
under us is then a row of zeros, which matches nothing, and not the end of the process.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reference_db.references import FEATURE_SIZE, Reference, ReferenceFeatures, ReferenceId

ROW_BYTES = 2 * FEATURE_SIZE
OPEN_FILES = 192  # kept open for re-ranking; a process may usually have 1,024


class ReferenceRows(Protocol):
    """The rows [seconds, 512] of one reference: what of an array the matching needs."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int | slice | NDArray[np.int64], /) -> NDArray[np.float32]: ...


class RowSource(Protocol):
    """Where an index finds the rows of its references."""

    def has(self, reference: Reference) -> bool: ...

    def rows(self, reference: Reference) -> ReferenceRows: ...

    def informative(self, reference: Reference) -> NDArray[np.bool_]: ...

    def gather(self, references: Sequence[Reference], seconds: Sequence[int]) -> NDArray[np.float32]: ...


class HeldRows:
    """The rows of references whose features are in memory."""

    def __init__(self, pairs: Sequence[tuple[Reference, ReferenceFeatures]]) -> None:
        self._features = {reference.id: features for reference, features in pairs}

    def has(self, reference: Reference) -> bool:
        return reference.id in self._features

    def rows(self, reference: Reference) -> ReferenceRows:
        return self._features[reference.id].rows.astype(np.float32)

    def informative(self, reference: Reference) -> NDArray[np.bool_]:
        return self._features[reference.id].informative

    def gather(self, references: Sequence[Reference], seconds: Sequence[int]) -> NDArray[np.float32]:
        """The row of each of these seconds."""
        rows = [self._features[r.id].rows[second] for r, second in zip(references, seconds, strict=True)]
        return np.array(rows, np.float32).reshape(-1, FEATURE_SIZE)


class StoredRows:
    """The rows of one feature file; it stays open, so a reference that is removed can be read to its end."""

    def __init__(self, path: Path, reference: Reference) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._n_seconds = reference.n_seconds
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        header = json.loads(os.pread(self._file, length, 8))
        self._at = 8 + length + header["rows"]["data_offsets"][0]
        begin, end = header["informative"]["data_offsets"]
        self.informative = np.frombuffer(os.pread(self._file, end - begin, 8 + length + begin), np.bool_)

    def __len__(self) -> int:
        return self._n_seconds

    def __getitem__(self, at: int | slice | NDArray[np.int64]) -> NDArray[np.float32]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._n_seconds)
            return self._span(start, max(start, stop))[::step]
        if isinstance(at, np.ndarray):
            if not len(at):
                return np.empty((0, FEATURE_SIZE), np.float32)
            first = int(at.min())
            return self._span(first, int(at.max()) + 1)[at - first]
        row: NDArray[np.float32] = self._span(at, at + 1)[0]
        return row

    def read_into(self, row: memoryview, second: int) -> None:
        """Puts one row, as it is on disk, where there is room for it."""
        os.preadv(self._file, [row], self._at + second * ROW_BYTES)

    def _span(self, start: int, stop: int) -> NDArray[np.float32]:
        if not 0 <= start <= stop <= self._n_seconds:
            raise IndexError(f"seconds {start} to {stop} of {self._n_seconds}")
        rows = np.zeros((stop - start, FEATURE_SIZE), np.float16)
        if stop > start:
            os.preadv(self._file, [memoryview(rows.data).cast("B")], self._at + start * ROW_BYTES)
        return rows.astype(np.float32)


class FeatureFolder:
    """The rows of a library's references, with the files used last kept open; safe in any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[tuple[ReferenceId, str], StoredRows] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, reference: Reference) -> bool:
        """Whether the reference's file is still there and can be read; if so, it can be read for a while."""
        try:
            self.rows(reference)
        except (OSError, ValueError, KeyError):
            return False
        return True

    def rows(self, reference: Reference) -> StoredRows:
        """The reference's rows; OSError where its file is gone."""
        with self._lock:
            return self._rows(reference)

    def informative(self, reference: Reference) -> NDArray[np.bool_]:
        return self.rows(reference).informative

    def gather(self, references: Sequence[Reference], seconds: Sequence[int]) -> NDArray[np.float32]:
        """The row of each of these seconds; zeros where a reference has just been removed."""
        rows = np.zeros((len(references), FEATURE_SIZE), np.float16)
        room = memoryview(rows.data).cast("B")
        with self._lock:
            for n, (reference, second) in enumerate(zip(references, seconds, strict=True)):
                try:
                    self._rows(reference).read_into(room[n * ROW_BYTES : (n + 1) * ROW_BYTES], second)
                except OSError:
                    continue
        return rows.astype(np.float32)

    def _rows(self, reference: Reference) -> StoredRows:
        key = (reference.id, reference.features_sha256)
        rows = self._open.get(key)
        if rows is not None:
            self._open.move_to_end(key)
            return rows
        rows = StoredRows(self._folder / f"{reference.id}.{reference.features_sha256[:16]}.safetensors", reference)
        self._open[key] = rows
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        return rows
