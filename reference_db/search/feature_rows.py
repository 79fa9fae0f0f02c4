"""Feature rows of references, read from their files as they are asked for.

A library of thousands of hours does not fit in memory, and only the few references that may be on air are ever
compared second by second. So rows stay on disk (the system keeps in memory what is used) and are read by position,
from files that were verified when the index took them in. They are read and not mapped: a file that is cut short
under us is then a row of zeros, which matches nothing, and not the end of the process.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reference_db.store.references import FEATURE_SIZE, Reference, ReferenceFeatures, ReferenceId

ROW_BYTES = 2 * FEATURE_SIZE
MAX_FILES = 1 << 16  # open files that we ask the system for; usually a process has 1,024 unless it asks
KEPT_BITS = np.int32(-0x70002000)  # sign, and the 15 bits of a float16 moved up by 13
EXPONENT_SHIFT = np.float32(2.0**112)  # between the two kinds' ways to write an exponent
OUR_SHARE = 4  # a quarter of the open files that we may have is for features

Key = tuple[ReferenceId, str]  # a reference's id and the hash of its features


class ReferenceRows(Protocol):
    """The rows [seconds, 512] of one reference: what of an array the matching needs."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int | slice | NDArray[np.int64], /) -> NDArray[np.float32]: ...


class NearRows:
    """Rows of which a span stays in memory, the newest of the widest asked for: most of what is asked lies in it."""

    def __init__(self, rows: ReferenceRows) -> None:
        self._rows = rows
        self._start = 0
        self._near = np.empty((0, FEATURE_SIZE), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int | slice | NDArray[np.int64], /) -> NDArray[np.float32]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if not self._has(start, stop):
                if stop - start < len(self._near):
                    return self._rows[at]
                self._near, self._start = self._rows[start:stop], start
                self._near.flags.writeable = False
            return self._near[start - self._start : stop - self._start : step]
        if isinstance(at, np.ndarray):
            is_near = len(at) > 0 and self._has(int(at.min()), int(at.max()) + 1)
        else:
            is_near = self._has(at, at + 1)
        return self._near[at - self._start] if is_near else self._rows[at]

    def _has(self, start: int, stop: int) -> bool:
        return self._start <= start <= stop <= self._start + len(self._near)


class RowSource(Protocol):
    """Where an index finds the rows of its references."""

    def has(self, reference: Reference) -> bool: ...

    def rows(self, reference: Reference) -> ReferenceRows: ...

    def informative(self, reference: Reference) -> NDArray[np.bool_]: ...

    def similarity(
        self, row: NDArray[np.float32], keys: Sequence[Key], seconds: Sequence[int]
    ) -> NDArray[np.float32]: ...


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

    def similarity(self, row: NDArray[np.float32], keys: Sequence[Key], seconds: Sequence[int]) -> NDArray[np.float32]:
        """The product of this row with that of each of these seconds."""
        rows = [self._features[id].rows[second] for (id, _), second in zip(keys, seconds, strict=True)]
        return _products(np.array(rows, np.float32).reshape(-1, FEATURE_SIZE), row)


class StoredRows:
    """The rows of one feature file; it stays open, so a reference that is removed can be read to its end."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        length = int.from_bytes(os.pread(self.file, 8, 0), "little")
        header = json.loads(os.pread(self.file, length, 8))
        self._n_seconds = int(header["rows"]["shape"][0])
        self.at = 8 + length + header["rows"]["data_offsets"][0]  # of row 0, in bytes
        begin, end = header["informative"]["data_offsets"]
        self.informative = np.frombuffer(os.pread(self.file, end - begin, 8 + length + begin), np.bool_)

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
        return widened(rows)


class FeatureFolder:
    """The rows of a library's references; safe in any thread.

    Re-ranking reads single rows of many references: their files are kept open, as many as the process may have.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[Key, StoredRows] = OrderedDict()  # in the order in which they were opened
        self._n_files = most_open_files() // OUR_SHARE
        self._room = np.zeros((0, FEATURE_SIZE), np.float16)  # that rows are read to, and made wide in
        self._wide = np.zeros((0, FEATURE_SIZE), np.float32)
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
        key = (reference.id, reference.features_sha256)
        with self._lock:
            return self._open.get(key) or self._opened(key)

    def informative(self, reference: Reference) -> NDArray[np.bool_]:
        return self.rows(reference).informative

    def similarity(self, row: NDArray[np.float32], keys: Sequence[Key], seconds: Sequence[int]) -> NDArray[np.float32]:
        """The product of this row with that of each of these seconds; 0 where a reference has just been removed."""
        n_rows = len(keys)
        with self._lock:
            if n_rows > len(self._room):
                self._room = np.zeros((n_rows, FEATURE_SIZE), np.float16)
                self._wide = np.zeros((n_rows, FEATURE_SIZE), np.float32)
            room = memoryview(self._room.data).cast("B")
            for n, (key, second) in enumerate(zip(keys, seconds, strict=True)):
                try:
                    stored = self._open.get(key) or self._opened(key)
                    place = room[n * ROW_BYTES : (n + 1) * ROW_BYTES]
                    is_read = os.preadv(stored.file, [place], stored.at + second * ROW_BYTES) == ROW_BYTES
                except (OSError, ValueError, KeyError):
                    is_read = False
                if not is_read:
                    self._room[n] = 0
            return _products(widened(self._room[:n_rows], self._wide[:n_rows]), row)

    def keep_open(self, keys: Set[Key]) -> None:
        """Closes the files of all other references: the disk has their room back."""
        with self._lock:
            for key in self._open.keys() - keys:
                del self._open[key]

    def _opened(self, key: Key) -> StoredRows:
        """Opens the file; where the process may open no more, those opened first are closed for it."""
        while len(self._open) >= self._n_files:
            self._open.popitem(last=False)
        while True:
            try:
                stored = self._open[key] = StoredRows(f"{self._folder}/{key[0]}.{key[1][:16]}.safetensors")
                return stored
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                    raise
                self._open.popitem(last=False)


def most_open_files() -> int:
    """How many files this process may have open; the system is asked for as many as we could use."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(MAX_FILES, most)
    if allowed == resource.RLIM_INFINITY or allowed >= wanted:
        return MAX_FILES if allowed == resource.RLIM_INFINITY else allowed
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return wanted


def widened(rows: NDArray[np.float16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The same finite numbers as float32, three times as fast as `astype`: sign, exponent and fraction moved in place,
    and the exponent put right by a product."""
    out = np.empty(rows.shape, np.float32) if out is None else out
    bits = out.view(np.int32)
    np.copyto(bits, rows.view(np.int16))
    bits <<= 13
    bits &= KEPT_BITS
    out *= EXPONENT_SHIFT
    return out


def _products(rows: NDArray[np.float32], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row's product, summed by itself whatever is beside it, as a matrix product would not."""
    products: NDArray[np.float32] = np.einsum("ij,j->i", rows, row)
    return products
