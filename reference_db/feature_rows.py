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
OPEN_FILES, KEPT_ROWS = 160, 32  # files kept open; a process may usually have 1,024

Key = tuple[ReferenceId, str]  # a reference's id and the hash of its features


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

    def __init__(self, path: str, reference: Reference) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._n_seconds = reference.n_seconds
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        header = json.loads(os.pread(self._file, length, 8))
        self.at = 8 + length + header["rows"]["data_offsets"][0]  # of row 0, in bytes
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

    def _span(self, start: int, stop: int) -> NDArray[np.float32]:
        if not 0 <= start <= stop <= self._n_seconds:
            raise IndexError(f"seconds {start} to {stop} of {self._n_seconds}")
        rows = np.zeros((stop - start, FEATURE_SIZE), np.float16)
        if stop > start:
            os.preadv(self._file, [memoryview(rows.data).cast("B")], self.at + start * ROW_BYTES)
        return rows.astype(np.float32)


class FeatureFolder:
    """The rows of a library's references; safe in any thread.

    Re-ranking reads single rows of many references: their files are opened in turn, and the last ones kept open.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: OrderedDict[Key, StoredRows] = OrderedDict()  # asked for as a whole just now
        self._files: OrderedDict[Key, int] = OrderedDict()  # open for single rows; used and closed under the lock
        self._at: dict[Key, int] = {}  # where row 0 of each file is
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)

    def has(self, reference: Reference) -> bool:
        """Whether the reference's file is still there and can be read; if so, it can be read for a while."""
        try:
            self.rows(reference)
        except (OSError, ValueError, KeyError):
            return False
        return True

    def rows(self, reference: Reference) -> StoredRows:
        """The reference's rows; OSError where its file is gone."""
        key = (reference.id, reference.features_sha256)
        with self._lock:
            rows = self._rows.get(key)
            if rows is None:
                rows = self._rows[key] = StoredRows(self._path(key), reference)
                if len(self._rows) > KEPT_ROWS:
                    self._rows.popitem(last=False)
            return rows

    def informative(self, reference: Reference) -> NDArray[np.bool_]:
        return self.rows(reference).informative

    def gather(self, references: Sequence[Reference], seconds: Sequence[int]) -> NDArray[np.float32]:
        """The row of each of these seconds; zeros where a reference has just been removed."""
        rows = np.zeros((len(references), FEATURE_SIZE), np.float16)
        room = memoryview(rows.data).cast("B")
        with self._lock:
            for n, (reference, second) in enumerate(zip(references, seconds, strict=True)):
                key = (reference.id, reference.features_sha256)
                try:
                    file = self._files.get(key) or self._open(key, reference)
                except (OSError, ValueError, KeyError):
                    continue
                row = room[n * ROW_BYTES : (n + 1) * ROW_BYTES]
                os.preadv(file, [row], self._at[key] + second * ROW_BYTES)
        return rows.astype(np.float32)

    def _open(self, key: Key, reference: Reference) -> int:
        if key not in self._at:
            self._at[key] = StoredRows(self._path(key), reference).at
        if len(self._files) >= OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        file = self._files[key] = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        return file

    def _path(self, key: Key) -> str:
        return f"{self._folder}/{key[0]}.{key[1][:16]}.safetensors"
