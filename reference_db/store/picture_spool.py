"""The thumbnails of a video while it is registered: in an unnamed file on the library's disk, not in memory.

A day of video has gigabytes of them. The file vanishes with the process, however it ends.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from reference_db.store.disk import storage_errors


class PictureSpool(Sequence[bytes]):
    """JPEGs by number, in the order of time; empty for numbers that have none."""

    def __init__(self, data_dir: Path) -> None:
        """Raises StorageError if the disk cannot be written."""
        self._data_dir, self._n_bytes, self._length = data_dir, 0, 0
        self._places: dict[int, tuple[int, int]] = {}  # position and length of each JPEG
        with storage_errors(data_dir):
            self._file = tempfile.TemporaryFile(dir=data_dir)  # noqa: SIM115 - closed with this object

    def put(self, number: int, jpeg: bytes) -> None:
        """Stores the picture of this number, in place of an earlier one. Raises StorageError if the disk is full."""
        with storage_errors(self._data_dir):
            self._file.write(jpeg)
            self._file.flush()
        self._places[number] = (self._n_bytes, len(jpeg))
        self._n_bytes += len(jpeg)
        self.extend(number + 1)

    def extend(self, length: int) -> None:
        """Has at least this length; pictures that were not put are empty."""
        self._length = max(self._length, length)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, number: int) -> bytes: ...

    @overload
    def __getitem__(self, number: slice) -> list[bytes]: ...

    def __getitem__(self, number: int | slice) -> bytes | list[bytes]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        at, length = self._places.get(number, (0, 0))
        return os.pread(self._file.fileno(), length, at)
