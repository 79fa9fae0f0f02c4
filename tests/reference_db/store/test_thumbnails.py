"""The thumbnail file: every second's JPEG, each with a checksum that holds for its second only."""

from __future__ import annotations

import io

import pytest

from reference_db.store.thumbnails import THUMBNAIL, read_thumbnail, thumbnail_chunks, thumbnails_per_second

JPEGS = [b"first", b"", b"third", b"fourth"]


def test_each_second_is_read_back() -> None:
    file = io.BytesIO(b"".join(thumbnail_chunks(JPEGS)))
    assert [read_thumbnail(file, second) for second in range(4)] == JPEGS


def test_the_table_tells_how_many_there_are_per_second() -> None:
    content = b"".join(thumbnail_chunks(JPEGS))
    assert thumbnails_per_second(io.BytesIO(content), 4) == 1
    assert thumbnails_per_second(io.BytesIO(content), 2) == 2
    assert thumbnails_per_second(io.BytesIO(b"".join(thumbnail_chunks([b"only"]))), 1) == 1
    damaged = b"\xff" + content[1:]
    assert thumbnails_per_second(io.BytesIO(damaged), 2) == 2
    for broken in (b"", b"short", content[: THUMBNAIL.size], THUMBNAIL.pack(1, 0, 0) + content[THUMBNAIL.size :]):
        with pytest.raises(ValueError, match="its thumbnails cannot be read"):
            thumbnails_per_second(io.BytesIO(broken), 3)


def test_swapped_entries_are_detected() -> None:
    content = bytearray(b"".join(thumbnail_chunks([b"same size", b"size same"])))
    first, second = content[: THUMBNAIL.size], content[THUMBNAIL.size : 2 * THUMBNAIL.size]
    content[: 2 * THUMBNAIL.size] = second + first
    for number in range(2):
        with pytest.raises(ValueError, match=f"its thumbnail {number} has changed on disk"):
            read_thumbnail(io.BytesIO(content), number)


@pytest.mark.parametrize("size", [0, 10, THUMBNAIL.size * 4 + 3])
def test_a_truncated_file_is_detected(size: int) -> None:
    with pytest.raises(ValueError, match=r"cannot be read|has changed on disk"):
        read_thumbnail(io.BytesIO(b"".join(thumbnail_chunks(JPEGS))[:size]), 2)


def test_an_offset_beyond_any_file_is_detected() -> None:
    content = THUMBNAIL.pack((1 << 64) - 1, 5, 0)
    with pytest.raises(ValueError, match=r"its thumbnails cannot be read"):
        read_thumbnail(io.BytesIO(content), 0)
