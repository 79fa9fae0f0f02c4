"""A reference's thumbnails in one file: a table with the offset of each second's JPEG, followed by the JPEGs."""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

THUMBNAIL = struct.Struct("<QII")  # offset, length and CRC-32 of one second's JPEG; length 0 if it has none


def thumbnail_chunks(thumbnails: Sequence[bytes]) -> Iterator[bytes]:
    """The content of the file in pieces; each checksum is seeded with its second, so that swapped entries are detected.

    Reads the thumbnails twice: for the table, and for the JPEGs after it.
    """
    table, offset = bytearray(), THUMBNAIL.size * len(thumbnails)
    for second, jpeg in enumerate(thumbnails):
        table += THUMBNAIL.pack(offset, len(jpeg), zlib.crc32(jpeg, second))
        offset += len(jpeg)
    yield bytes(table)
    yield from thumbnails


def read_thumbnail(pack: BinaryIO, second: int) -> bytes:
    """The JPEG of this second, empty if it has none; ValueError if it does not match its checksum."""
    pack.seek(second * THUMBNAIL.size)
    entry = pack.read(THUMBNAIL.size)
    if len(entry) != THUMBNAIL.size:
        raise ValueError("its thumbnails cannot be read")
    offset, length, checksum = THUMBNAIL.unpack(entry)
    try:
        pack.seek(offset)
        jpeg = pack.read(length)
    except (OverflowError, ValueError) as error:
        raise ValueError("its thumbnails cannot be read") from error
    if len(jpeg) != length or zlib.crc32(jpeg, second) != checksum:
        raise ValueError(f"its thumbnail of second {second} has changed on disk")
    return jpeg
