"""The thumbnails of a video while it is registered: in an unnamed file on the library's disk, not in memory.

A day of video has a gigabyte of them. The file vanishes with the process, however it ends.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from reference_db.store.disk import storage_errors


class PictureSpool(Sequence[bytes]):
    """One JPEG per second, in the order of time; empty for seconds that have none."""

    def __init__(self, data_dir: Path) -> None:
        """Raises StorageError if the disk cannot be written."""
        self._data_dir, self._n_bytes, self._n_seconds = data_dir, 0, 0
        self._places: dict[int, tuple[int, int]] = {}  # position and length of each second's JPEG
        with storage_errors(data_dir):
            self._file = tempfile.TemporaryFile(dir=data_dir)  # noqa: SIM115 - closed with this object

    def put(self, second: int, jpeg: bytes) -> None:
        """Stores the picture of this second, in place of an earlier one. Raises StorageError if the disk is full."""
        with storage_errors(self._data_dir):
            self._file.write(jpeg)
            self._file.flush()
        self._places[second] = (self._n_bytes, len(jpeg))
        self._n_bytes += len(jpeg)
        self._n_seconds = max(self._n_seconds, second + 1)

    def __len__(self) -> int:
        return self._n_seconds

    @overload
    def __getitem__(self, second: int) -> bytes: ...

    @overload
    def __getitem__(self, second: slice) -> list[bytes]: ...

    def __getitem__(self, second: int | slice) -> bytes | list[bytes]:
        if isinstance(second, slice):
            return [self[one] for one in range(*second.indices(len(self)))]
        if not 0 <= second < len(self):
            raise IndexError(second)
        at, length = self._places.get(second, (0, 0))
        return os.pread(self._file.fileno(), length, at)
