"""Feature rows: read from disk on demand, converted exactly, with few open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_db.search.feature_rows import CachedRows, to_float32
from reference_db.store.catalog import ReferenceId
from tests.support.indexed_films import LENGTH, add, film, found, keeper, remove


def test_rows_are_read_from_disk_unchanged(tmp_path: Path) -> None:
    add(tmp_path, 1)
    index = keeper(tmp_path).refresh()
    rows, wanted = index.rows(0), film(1).rows.astype(np.float32)
    assert len(rows) == LENGTH
    assert np.array_equal(rows[:], wanted)
    assert np.array_equal(rows[140:170], wanted[140:])
    assert np.array_equal(rows[20:10], wanted[20:10])
    assert np.array_equal(rows[np.array([7, 3, 7, 149])], wanted[[7, 3, 7, 149]])
    assert np.array_equal(rows[np.array([], np.int64)], wanted[:0])
    assert np.array_equal(rows[12], wanted[12])
    assert np.array_equal(index.informative(0), film(1).informative)
    with pytest.raises(IndexError):
        rows[LENGTH]
    remove(tmp_path, 1)
    assert np.array_equal(rows[:], wanted)  # an open file can be read to its end


def test_a_truncated_file_gives_zeros_and_a_missing_one_has_no_place(tmp_path: Path) -> None:
    add(tmp_path, 1, 2)
    index = keeper(tmp_path).refresh()
    path = next((tmp_path / "features").glob("film-1.*"))
    rows = index.rows(0)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10 * 1024)
    assert np.array_equal(rows[:130], film(1).rows[:130].astype(np.float32))
    assert not rows[145:].any()
    next((tmp_path / "features").glob("film-2.*")).unlink()
    assert index.place(ReferenceId("film-2")) is None


def test_at_the_limit_of_open_files_older_ones_are_closed(tmp_path: Path) -> None:
    add(tmp_path, *range(6))
    wanted = found(keeper(tmp_path).refresh(), *range(6))
    index = keeper(tmp_path).refresh()
    in_use = [index.rows(place) for place in range(3)]
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)  # the next one that would be opened
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, allowed[1]))
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/", os.O_RDONLY)
        del in_use
        assert found(index, *range(6)) == wanted
        assert all(index.place(ReferenceId(f"film-{n}")) == n for n in range(6))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)


def test_a_removed_reference_s_file_is_closed(tmp_path: Path) -> None:
    add(tmp_path, *range(6))
    index_keeper = keeper(tmp_path)
    found(index_keeper.refresh(), *range(6))
    remove(tmp_path, 2)
    index_keeper.refresh()
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [name for name in open_files if str(tmp_path) in name and "(deleted)" in name]
    assert [name for name in open_files if f"{tmp_path}/features/film-3" in name]


def test_every_finite_float16_is_converted_exactly() -> None:
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = numbers[np.isfinite(numbers)]
    assert np.array_equal(to_float32(finite), finite.astype(np.float32))
    out = np.empty(len(finite), np.float32)
    assert to_float32(finite, out) is out
    assert np.array_equal(out, finite.astype(np.float32))


@settings(deadline=None)
@given(requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2)), max_size=12))
def test_cached_rows_are_the_rows(requests: list[tuple[int, int, int]]) -> None:
    rows = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    cached = CachedRows(rows)
    assert len(cached) == 40
    for start, stop, kind in requests:
        if kind == 0:
            assert np.array_equal(cached[start:stop], rows[start:stop])
        elif kind == 1:
            assert np.array_equal(cached[min(start, 39)], rows[min(start, 39)])
        else:
            at = np.array(sorted({min(start, 39), min(stop, 39)}))
            assert np.array_equal(cached[at], rows[at])
