"""Feature rows of references, read from their files on demand.

A library of thousands of hours does not fit in memory, and only the few references that may be on air are compared
second by second. So rows stay on disk (the page cache holds what is used) and are read by position, from files that
were verified when they were indexed. They are read and not mapped: a file that is truncated meanwhile gives rows of
zeros, which match nothing, and does not kill the process.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reference_db.errors import NotAReference
from reference_db.store.feature_files import ROW_BYTES, StoredFeatures, features_id, read_layout
from reference_db.store.references import FEATURE_SIZE, Features, Reference, ReferenceId, blocks

MAX_FILES = 1 << 16  # limit of open files that we request; the default is usually 1,024
FLOAT16_BITS = np.int32(-0x70002000)  # sign, and the other 15 bits of a float16 shifted by 13
EXPONENT_SCALE = np.float32(2.0**112)  # the exponent biases differ by 127 - 15
FILE_SHARE = 4  # a quarter of the allowed open files is for features

Key = tuple[ReferenceId, str]  # a reference's id and the hash of its features


class ReferenceRows(Protocol):
    """The rows [seconds, 512] of one reference: the part of an array's interface that matching needs."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int | slice | NDArray[np.int64], /) -> NDArray[np.float32]: ...


class CachedRows:
    """Rows with a cached span, the widest requested so far: most requests lie within it."""

    def __init__(self, rows: ReferenceRows) -> None:
        self._rows = rows
        self._start = 0
        self._cached = np.empty((0, FEATURE_SIZE), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int | slice | NDArray[np.int64], /) -> NDArray[np.float32]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if not self._has(start, stop):
                if stop - start < len(self._cached):
                    return self._rows[at]
                self._cached, self._start = self._rows[start:stop], start
                self._cached.flags.writeable = False
            return self._cached[start - self._start : stop - self._start : step]
        if isinstance(at, np.ndarray):
            is_cached = len(at) > 0 and self._has(int(at.min()), int(at.max()) + 1)
        else:
            is_cached = self._has(at, at + 1)
        return self._cached[at - self._start] if is_cached else self._rows[at]

    def _has(self, start: int, stop: int) -> bool:
        return self._start <= start <= stop <= self._start + len(self._cached)


class RowSource(Protocol):
    """Where an index reads the rows of its references."""

    def has(self, reference: Reference) -> bool: ...

    def rows(self, reference: Reference) -> ReferenceRows: ...

    def informative(self, reference: Reference) -> NDArray[np.bool_]: ...

    def features_id(self, reference: Reference) -> str: ...

    def similarity(
        self, row: NDArray[np.float32], keys: Sequence[Key], seconds: Sequence[int]
    ) -> NDArray[np.float32]: ...


class MemoryRows:
    """The rows of references whose features are in memory."""

    def __init__(self, pairs: Sequence[tuple[Reference, Features]]) -> None:
        self._features = {reference.id: features for reference, features in pairs}

    def has(self, reference: Reference) -> bool:
        return reference.id in self._features

    def rows(self, reference: Reference) -> ReferenceRows:
        return to_float32(self._features[reference.id].rows[:])

    def informative(self, reference: Reference) -> NDArray[np.bool_]:
        return self._features[reference.id].informative

    def features_id(self, reference: Reference) -> str:
        """The identity of the reference's features, computed from them."""
        return features_id(reference.encoder_id, self._features[reference.id])

    def similarity(self, row: NDArray[np.float32], keys: Sequence[Key], seconds: Sequence[int]) -> NDArray[np.float32]:
        """The dot product of this row with the row of each of these seconds."""
        rows = [self._features[id].rows[second : second + 1] for (id, _), second in zip(keys, seconds, strict=True)]
        return _products(np.array(rows, np.float32).reshape(-1, FEATURE_SIZE), row)


class FileRows:
    """The rows of one feature file; it stays open, so a removed reference can still be read."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        layout = read_layout(self.file)
        self._n_seconds = layout.n_seconds
        self.at = layout.rows_at  # of row 0, in bytes
        flags = os.pread(self.file, layout.n_seconds, layout.informative_at)
        self.informative = np.frombuffer(flags, np.bool_)

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
            os.preadv(self.file, [memoryview(rows.data).cast("B")], self.at + start * ROW_BYTES)
        return to_float32(rows)


class FeatureFolder:
    """The rows of a library's references; thread-safe.

    Re-ranking reads single rows of many references, so their files stay open, up to a share of the process's limit.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[Key, FileRows] = OrderedDict()  # in the order of opening
        self._max_files = raise_file_limit() // FILE_SHARE
        self._rows16 = np.zeros((0, FEATURE_SIZE), np.float16)  # buffers of `similarity`: rows as read, and as float32
        self._rows32 = np.zeros((0, FEATURE_SIZE), np.float32)
        self._lock = threading.Lock()

    def has(self, reference: Reference) -> bool:
        """Whether the reference's file can be read; opens it, so that it can be read even if it is removed."""
        try:
            self.rows(reference)
        except (OSError, NotAReference):
            return False
        return True

    def rows(self, reference: Reference) -> FileRows:
        """The reference's rows; OSError if its file is missing."""
        key = (reference.id, reference.features_sha256)
        with self._lock:
            return self._open.get(key) or self._open_file(key)

    def informative(self, reference: Reference) -> NDArray[np.bool_]:
        return self.rows(reference).informative

    def features_id(self, reference: Reference) -> str:
        """The identity of the reference's features, computed from its file."""
        return features_id(reference.encoder_id, StoredFeatures(self._path((reference.id, reference.features_sha256))))

    def similarity(self, row: NDArray[np.float32], keys: Sequence[Key], seconds: Sequence[int]) -> NDArray[np.float32]:
        """The dot product of this row with the row of each of these seconds; 0 if a reference was just removed."""
        n_rows = len(keys)
        with self._lock:
            if n_rows > len(self._rows16):
                self._rows16 = np.zeros((n_rows, FEATURE_SIZE), np.float16)
                self._rows32 = np.zeros((n_rows, FEATURE_SIZE), np.float32)
            buffer = memoryview(self._rows16.data).cast("B")
            for n, (key, second) in enumerate(zip(keys, seconds, strict=True)):
                try:
                    file_rows = self._open.get(key) or self._open_file(key)
                    target = buffer[n * ROW_BYTES : (n + 1) * ROW_BYTES]
                    is_read = os.preadv(file_rows.file, [target], file_rows.at + second * ROW_BYTES) == ROW_BYTES
                except (OSError, NotAReference):
                    is_read = False
                if not is_read:
                    self._rows16[n] = 0
            return _products(to_float32(self._rows16[:n_rows], self._rows32[:n_rows]), row)

    def close_except(self, keys: Set[Key]) -> None:
        """Closes the files of all other references, so that the disk space of removed ones is freed."""
        with self._lock:
            for key in self._open.keys() - keys:
                del self._open[key]

    def _open_file(self, key: Key) -> FileRows:
        """Opens the file; at the limit of open files, closes those opened first."""
        while len(self._open) >= self._max_files:
            self._open.popitem(last=False)
        while True:
            try:
                rows = self._open[key] = FileRows(str(self._path(key)))
                return rows
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                    raise
                self._open.popitem(last=False)

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key[0]}.{key[1][:16]}.safetensors"


def raise_file_limit() -> int:
    """Raises the process's limit of open files as far as useful and allowed; the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def informative_blocks(features: Features) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """The informative seconds and their rows [n, 512], a block at a time."""
    for start, rows in blocks(features.rows):
        at = np.flatnonzero(features.informative[start : start + len(rows)])
        if len(at):
            yield at + start, to_float32(rows[at])


def to_float32(rows: NDArray[np.float16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The same finite numbers as float32: shifts the bits into place, then corrects the exponent by a product.

    numpy's `astype` has no vector code for float16: it takes 120 us for the 40 rows of a shortlist and 3.3 ms for 1,000
    rows, this 17 us and 0.1 ms (AMD EPYC, numpy 2.4).
    """
    out = np.empty(rows.shape, np.float32) if out is None else out
    bits = out.view(np.int32)
    np.copyto(bits, rows.view(np.int16))
    bits <<= 13
    bits &= FLOAT16_BITS
    out *= EXPONENT_SCALE
    return out


def _products(rows: NDArray[np.float32], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row's dot product, independent of the other rows; the sums of a matrix product would depend on them."""
    products: NDArray[np.float32] = np.einsum("ij,j->i", rows, row)
    return products
