"""Disks that are full, of bytes or of files, or turn read-only: small tmpfs disks, which only root may mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reference_db.errors import StorageError
from reference_db.store.catalog import Catalog, ReferenceId
from tests.chaos.operations import put, state
from tests.chaos.storage import Tally, place


@contextmanager
def small_disk(size_kb: int, n_files: int = 0) -> Iterator[Path]:
    """A file system of this size, for at most `n_files`; raises CalledProcessError if it cannot be mounted."""
    with place() as home:
        options = f"size={size_kb}k" + (f",nr_inodes={n_files}" if n_files else "")
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", home], check=True, capture_output=True)
        try:
            yield home
        finally:
            subprocess.run(["umount", home], check=True)


def fill_disks(sizes_kb: range) -> Tally:
    """Fills the disks of libraries, removes references, adds others, and reads on a read-only disk."""
    tally = Tally()
    for size_kb in sizes_kb:
        tally.n_trials += 1
        with small_disk(size_kb) as disk:
            try:
                _fill(disk, tally)
            except (AssertionError, StorageError) as failure:
                tally.failures.append(f"{size_kb} kB: {failure}")
    return tally


def use_up_files(limits: range) -> Tally:
    """The same on disks that have space, but no free inodes."""
    tally = Tally()
    for n_files in limits:
        tally.n_trials += 1
        with small_disk(20_000, n_files) as disk:
            try:
                _fill(disk, tally)
            except (AssertionError, StorageError) as failure:
                tally.failures.append(f"{n_files} files: {failure}")
    return tally


def _fill(disk: Path, tally: Tally) -> None:
    library = disk / "library"
    n_added = _add_until_full(library, 0)
    tally.n_hit += 1
    tally.n_acknowledged += n_added
    stored = state(library) if n_added else {}
    assert len(stored) == n_added, f"{n_added} were acknowledged, {len(stored)} are stored"
    if n_added < 4:
        return  # too few to remove some
    for number in range(3):
        with Catalog.open(library, write=True) as catalog:
            catalog.remove(ReferenceId(f"ref-{number}"))
    n_more = _add_until_full(library, n_added)
    assert n_more >= 1, "removed references freed no space"
    left = state(library)
    expected = {id: hash for id, hash in stored.items() if id not in ("ref-0", "ref-1", "ref-2")}
    assert expected.items() <= left.items(), "a reference was lost or changed on a full disk"
    assert len(left) == n_added - 3 + n_more, "an acknowledged reference is missing"
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert state(library) == left, "a library on a read-only disk reads differently"
    try:
        Catalog.open(library, write=True).close()
    except StorageError as refused:
        if "Read-only" not in str(refused):
            raise
    else:
        raise AssertionError("a library on a read-only disk was opened for writing")


def _add_until_full(library: Path, first: int) -> int:
    """Number of references added before the disk was full."""
    n_added = 0
    try:
        with Catalog.open(library, write=True) as catalog:
            while True:
                put(catalog, ReferenceId(f"ref-{first + n_added}"), n_added)
                n_added += 1
    except StorageError as refused:
        if "is full" not in str(refused):
            raise
    return n_added
