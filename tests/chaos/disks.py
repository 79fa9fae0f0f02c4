"""Disks that are full, of bytes or of files, or turn read-only: small ones in memory, which only root may mount."""

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
    """A file system of this size, for so many files at most; raises CalledProcessError where it may not be mounted."""
    with place() as home:
        options = f"size={size_kb}k" + (f",nr_inodes={n_files}" if n_files else "")
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", home], check=True, capture_output=True)
        try:
            yield home
        finally:
            subprocess.run(["umount", home], check=True)


def fill_disks(sizes_kb: range) -> Tally:
    """Adds to libraries until their disks are full, then removes, adds again, and reads on a read-only disk."""
    tally = Tally()
    for size_kb in sizes_kb:
        tally.n_trials += 1
        with small_disk(size_kb) as disk:
            try:
                _fill(disk, tally)
            except (AssertionError, StorageError) as wrong:
                tally.wrong.append(f"{size_kb} kB: {wrong}")
    return tally


def use_up_files(limits: range) -> Tally:
    """The same on disks that have room enough, but cannot hold more files."""
    tally = Tally()
    for n_files in limits:
        tally.n_trials += 1
        with small_disk(20_000, n_files) as disk:
            try:
                _fill(disk, tally)
            except (AssertionError, StorageError) as wrong:
                tally.wrong.append(f"{n_files} files: {wrong}")
    return tally


def _fill(disk: Path, tally: Tally) -> None:
    library = disk / "library"
    n_added = _add_until_full(library, 0)
    tally.n_hit += 1
    tally.n_acknowledged += n_added
    kept = state(library) if n_added else {}
    assert len(kept) == n_added, f"{n_added} were acknowledged, {len(kept)} are there"
    if n_added < 4:
        return  # not even a few fit: there is nothing to remove
    for number in range(3):
        with Catalog.open(library, write=True) as catalog:
            catalog.remove(ReferenceId(f"ref-{number}"))
    n_more = _add_until_full(library, n_added)
    assert n_more >= 1, "what was removed made no room"
    left = state(library)
    expected = {id: hash for id, hash in kept.items() if id not in ("ref-0", "ref-1", "ref-2")}
    assert expected.items() <= left.items(), "a reference was lost or changed on a full disk"
    assert len(left) == n_added - 3 + n_more, "not all that was acknowledged is there"
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert state(library) == left, "a library on a read-only disk reads otherwise"
    try:
        Catalog.open(library, write=True).close()
    except StorageError as refused:
        if "Read-only" not in str(refused):
            raise
    else:
        raise AssertionError("a library on a read-only disk was opened to write")


def _add_until_full(library: Path, first: int) -> int:
    """How many could be added before the disk was full."""
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
