"""A reference's thumbnails in one file: a table of where each second's JPEG is, and the JPEGs behind it."""

import struct
import zlib
from collections.abc import Sequence
from typing import BinaryIO

THUMBNAIL = struct.Struct("<QII")  # offset, length and CRC-32 of one second's JPEG; length 0 where there is none


def packed_thumbnails(thumbnails: Sequence[bytes]) -> bytes:
    """The JPEGs behind a table of where each is; the checksum begins at the second, so that none stands for another."""
    table, offset = bytearray(), THUMBNAIL.size * len(thumbnails)
    for second, jpeg in enumerate(thumbnails):
        table += THUMBNAIL.pack(offset, len(jpeg), zlib.crc32(jpeg, second))
        offset += len(jpeg)
    return bytes(table) + b"".join(thumbnails)


def thumbnail_in(pack: BinaryIO, second: int) -> bytes:
    """The JPEG of this second, empty where there is none; ValueError where it is not as it was written."""
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
