"""Files on disk: whole or not at all, with the permissions that were asked for."""

from __future__ import annotations

import os
from pathlib import Path

import apsw
import pytest

from reference_db.errors import CatalogLocked, StorageError
from reference_db.store.disk import atomic_file, lock_for_writing, storage_errors, write_file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"old")
    write_file(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"new"}


def test_a_block_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"old")

    def write_half(path: Path) -> None:
        with atomic_file(path) as file:
            file.write(b"half of the ne")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half(tmp_path / "file")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_permissions_are_set_before_the_content(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file.part").write_bytes(b"left by a killed writer")
    (tmp_path / "file.part").chmod(0o644)
    umask = os.umask(0o077)
    try:
        with atomic_file(tmp_path / "file", mode=mode) as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == mode
            assert os.fstat(file.fileno()).st_size == 0
            file.write(b"secret")
    finally:
        os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert (tmp_path / "file").read_bytes() == b"secret"


def test_without_a_mode_the_umask_decides(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        write_file(tmp_path / "file", b"content")
    finally:
        os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"untouched")
    (tmp_path / "file.part").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        write_file(tmp_path / "file", b"content")
    assert (tmp_path / "victim").read_bytes() == b"untouched"


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    handle = lock_for_writing(tmp_path)
    with pytest.raises(CatalogLocked, match="Another process is changing the library"):
        lock_for_writing(tmp_path)
    os.close(handle)
    os.close(lock_for_writing(tmp_path))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), "is full; free some space"),
        (apsw.FullError("database or disk is full"), "is full; free some space"),
        (apsw.CorruptError("malformed"), "catalog.sqlite is damaged; run `copywatch refs verify --repair`"),
        (PermissionError(13, "Permission denied"), r"cannot be used \(Permission denied\); check the path"),
    ],
)
def test_errors_of_the_disk_become_sentences_that_say_what_to_do(
    tmp_path: Path, error: Exception, sentence: str
) -> None:
    with pytest.raises(StorageError, match=sentence), storage_errors(tmp_path):
        raise error
