"""Snapshots: a channel's state to bytes and back, so that matching can stop in one process and resume in another.

State is dataclasses of numbers, strings, tuples, lists, dicts, ranges, times and arrays; msgspec encodes it by their
annotations. The bytes are

    MAGIC, SHA-256 of all that follows, length of the head, the head (msgpack, deflated), the large arrays

The head carries a stamp: the version of the program, the shape of the state, and what else the caller says must be
equal (its models). Bytes that are damaged, too long or stamped otherwise are refused with a reason, never half read.
Nothing in them is executed: there is no pickle.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from monitor import __version__
from monitor.errors import SnapshotRefused

MAGIC = b"copywatch-state-2\n"
MAGIC_1 = b"copywatch-state-1\n"  # of version 0.1.0: the same frame around a head of JSON, whose notes can be read
MAX_BYTES = 8 << 20  # a channel's state is some 0.2 MB; larger ones are not ours
MAX_HEAD_BYTES = 32 << 20  # of the head once inflated
HASH_BYTES = hashlib.sha256().digest_size
LENGTH = struct.Struct("<I")
FAST = 1  # zlib level: a head is written every other second
SMALL_BYTES = 256  # arrays up to this size are deflated with the head; feature rows would not get smaller

T = TypeVar("T")
Notes = Mapping[str, Any]  # plain values


class _Head(msgspec.Struct, array_like=True):
    stamp: dict[str, str]
    notes: dict[str, Any]
    state: msgspec.Raw  # decoded only if the stamp is ours


class _Head1(msgspec.Struct):
    stamp: dict[str, str]
    notes: dict[str, Any]


def pack(state: object, stamp: Mapping[str, str], notes: Notes) -> bytes:
    """The state as bytes. `notes` are stored with it and can be read even if the stamp differs."""
    large: list[bytes] = []
    full_stamp = _full_stamp(type(state), stamp)
    head = msgspec.msgpack.encode((full_stamp, notes, state), enc_hook=partial(_to_plain, large))
    deflated = zlib.compress(head, FAST)
    body = b"".join([LENGTH.pack(len(deflated)), deflated, *large])
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(kind: type[T], content: bytes, stamp: Mapping[str, str]) -> tuple[T, dict[str, Any]]:
    """State and notes. Raises SnapshotRefused, with the notes if only the stamp or the state is at fault."""
    head, large = _open(content)
    for name, wanted in _full_stamp(kind, stamp).items():
        if head.stamp.get(name) != wanted:
            raise SnapshotRefused(f"its {name} is {head.stamp.get(name)}, not {wanted}", head.notes)
    try:
        return msgspec.msgpack.decode(head.state, type=kind, dec_hook=partial(_from_plain, large)), head.notes
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise SnapshotRefused(f"its state is invalid ({error})", head.notes) from error


def _open(content: bytes) -> tuple[_Head, memoryview]:
    """The head and the large arrays, once length and hash are checked."""
    if len(content) > MAX_BYTES:
        raise SnapshotRefused(f"it has {len(content)} bytes, more than the limit of {MAX_BYTES}")
    begin = len(MAGIC) + HASH_BYTES
    body = memoryview(content)[begin:]
    if not content.startswith((MAGIC, MAGIC_1)) or len(body) < LENGTH.size:
        raise SnapshotRefused("it is no snapshot")
    if hashlib.sha256(body).digest() != content[len(MAGIC) : begin]:
        raise SnapshotRefused("its bytes are damaged")
    (length,) = LENGTH.unpack_from(body)
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(body[LENGTH.size : LENGTH.size + length], MAX_HEAD_BYTES)
        if content.startswith(MAGIC):
            return msgspec.msgpack.decode(inflated, type=_Head), body[LENGTH.size + length :]
        old = msgspec.json.decode(inflated, type=_Head1)
    except (zlib.error, msgspec.MsgspecError, ValueError) as error:
        raise SnapshotRefused(f"its head is invalid ({error})") from error
    raise SnapshotRefused(f"its format is an old one, written by version {old.stamp.get('version')}", old.notes)


def _to_plain(large: list[bytes], value: Any) -> Any:
    """A value that msgpack does not know, as the head has it: of an array its type, shape, and bytes or place."""
    if isinstance(value, np.ndarray):
        content = value.tobytes()
        if len(content) <= SMALL_BYTES:
            return value.dtype.str, value.shape, content
        place = sum(map(len, large))
        large.append(content)
        return value.dtype.str, value.shape, place
    if isinstance(value, range):
        return value.start, value.stop
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a snapshot cannot hold {type(value).__name__}")


def _from_plain(large: memoryview, kind: Any, value: Any) -> Any:
    """The reverse; TypeError or ValueError if the value is not of this kind."""
    if kind is range:
        return range(*value)
    _, dtype = get_args(kind)  # of an NDArray
    (wanted,) = get_args(dtype)
    name, shape, stored = value
    if np.dtype(name) != wanted or min(shape, default=0) < 0:
        raise TypeError(f"expected an array of {wanted.__name__}, got {name} {shape}")
    content, place = (stored, 0) if isinstance(stored, bytes) else (large, stored)
    return np.frombuffer(content, wanted, math.prod(shape), place).reshape(shape)


def _full_stamp(kind: type, stamp: Mapping[str, str]) -> dict[str, str]:
    return {"version": __version__, "shape": _shape(kind), **stamp}


@cache
def _shape(kind: type) -> str:
    """A hash of the type down to its last field: a changed state class is another shape."""
    return hashlib.sha256(repr(msgspec.inspect.type_info(kind)).encode()).hexdigest()[:16]
