"""The spool of thumbnails: a sequence by second on disk, with no file left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference_db.errors import StorageError
from reference_db.store.picture_spool import PictureSpool


def test_pictures_are_read_back_by_second(tmp_path: Path) -> None:
    spool = PictureSpool(tmp_path)
    assert list(spool) == []
    spool.put(0, b"first")
    spool.put(3, b"third")
    spool.put(0, b"again")
    assert list(spool) == [b"again", b"", b"", b"third"]
    assert spool[2:] == [b"", b"third"]
    with pytest.raises(IndexError):
        spool[4]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be used"):
        PictureSpool(tmp_path / "missing")
