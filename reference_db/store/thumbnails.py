"""A reference's thumbnails in one file: a table with the offset of each JPEG, followed by the JPEGs.

There are two per second, at its beginning and at its middle. Files of earlier versions have one, at its middle; the
offset of the first JPEG is the length of the table and tells which it is.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

THUMBNAIL = struct.Struct("<QII")  # offset, length and CRC-32 of one JPEG; length 0 if there is none


def thumbnail_chunks(thumbnails: Sequence[bytes]) -> Iterator[bytes]:
    """The content of the file in pieces; each checksum is seeded with its number, so that swapped entries are detected.

    Reads the thumbnails twice: for the table, and for the JPEGs after it.
    """
    table, offset = bytearray(), THUMBNAIL.size * len(thumbnails)
    for number, jpeg in enumerate(thumbnails):
        table += THUMBNAIL.pack(offset, len(jpeg), zlib.crc32(jpeg, number))
        offset += len(jpeg)
    yield bytes(table)
    yield from thumbnails


def thumbnails_per_second(pack: BinaryIO, n_seconds: int) -> int:
    """1 or 2, by the length of the table of a reference of so many seconds; ValueError if it cannot be read.

    The first entry states that length, and the second one too: a damaged byte costs one picture, not all.
    """
    first, length, _ = _entry(pack, 0)
    second = _entry(pack, 1)[0] - length if n_seconds > 1 else first
    for offset in (first, second):
        for per_second in (1, 2):
            if offset == per_second * n_seconds * THUMBNAIL.size:
                return per_second
    raise ValueError("its thumbnails cannot be read")


def read_thumbnail(pack: BinaryIO, number: int) -> bytes:
    """The JPEG of this number, empty if there is none; ValueError if it does not match its checksum."""
    offset, length, checksum = _entry(pack, number)
    try:
        pack.seek(offset)
        jpeg = pack.read(length)
    except (OverflowError, ValueError) as error:
        raise ValueError("its thumbnails cannot be read") from error
    if len(jpeg) != length or zlib.crc32(jpeg, number) != checksum:
        raise ValueError(f"its thumbnail {number} has changed on disk")
    return jpeg


def _entry(pack: BinaryIO, number: int) -> tuple[int, int, int]:
    pack.seek(number * THUMBNAIL.size)
    entry = pack.read(THUMBNAIL.size)
    if len(entry) != THUMBNAIL.size:
        raise ValueError("its thumbnails cannot be read")
    offset, length, checksum = THUMBNAIL.unpack(entry)
    return offset, length, checksum
