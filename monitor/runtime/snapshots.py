"""Snapshots: plain state to bytes and back, so that thinking can stop in one process and go on in another.

State is dataclasses of numbers, words, tuples, lists, dicts, sets, ranges, times and arrays; what is stored follows
from their annotations. The bytes are

    MAGIC, SHA-256 of all that follows, length of the head, the head (JSON, deflated), the arrays' bytes

The head carries a stamp: which version of the program and which shape of state made it, and whatever else the caller
says must be the same (its models). Bytes that were damaged, are too many or bear another stamp are refused with a
reason, never half read. Nothing in them is run: there is no pickle.
"""

from __future__ import annotations

import hashlib
import json
import struct
import types
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import Any, NewType, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from monitor import __version__
from monitor.errors import SnapshotRefused

MAGIC = b"copywatch-state-1\n"
MAX_BYTES = 8 << 20  # a channel's state is some 0.2 MB; more than this was not made by us
MAX_HEAD_BYTES = 32 << 20  # of the head once inflated
HASH_BYTES = hashlib.sha256().digest_size
LENGTH = struct.Struct("<I")
FAST = 1  # of zlib's levels: the head is written every other second

AS_IT_IS = (int, float, str, bool)

T = TypeVar("T")
Notes = Mapping[str, Any]  # JSON-able


def _number(value: Any) -> int | float:
    """A number of numpy's as Python has it."""
    if isinstance(value, np.integer | np.floating):
        plain: int | float = value.item()
        return plain
    raise TypeError(f"a snapshot has no {type(value).__name__}")


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_number)


def pack(state: object, stamp: Mapping[str, str], notes: Notes) -> bytes:
    """The state as bytes. `notes` travel with it and can be read even where the stamp is another's."""
    arrays = _Arrays()
    kind: Any = type(state)
    flatten = _flattener(kind)
    assert flatten is not None, "state is a dataclass"
    flat = flatten(state, arrays)
    buffers = arrays.joined()
    head = {
        "stamp": _whole_stamp(type(state), stamp),
        "notes": dict(notes),
        "arrays": [[dtype, len(buffer)] for dtype, buffer in buffers.items()],
        "state": flat,
    }
    head_bytes = zlib.compress(_JSON.encode(head).encode(), FAST)
    body = b"".join([LENGTH.pack(len(head_bytes)), head_bytes, *(buffer.tobytes() for buffer in buffers.values())])
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(kind: type[T], content: bytes, stamp: Mapping[str, str]) -> tuple[T, dict[str, Any]]:
    """State and notes. Raises SnapshotRefused; where only the stamp is another's, it carries the notes."""
    head, body = _opened(content)
    try:
        notes, found = dict(head["notes"]), dict(head["stamp"])
        buffers, at = {}, 0
        for dtype, length in head["arrays"]:
            buffers[dtype] = np.frombuffer(body, np.dtype(dtype), length, at)
            at += buffers[dtype].nbytes
        flat = head["state"]
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotRefused(f"it is not built as a snapshot is ({error})") from error
    for name, wanted in _whole_stamp(kind, stamp).items():
        if found.get(name) != wanted:
            raise SnapshotRefused(f"its {name} is {found.get(name)}, not {wanted}", notes)
    try:
        return _built(kind, flat, buffers), notes
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SnapshotRefused(f"its state cannot be read ({error})", notes) from error


def _opened(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """The head and the arrays' bytes, once length and hash are right."""
    if len(content) > MAX_BYTES:
        raise SnapshotRefused(f"it has {len(content)} bytes, and {MAX_BYTES} are the most")
    begin = len(MAGIC) + HASH_BYTES
    body = memoryview(content)[begin:]
    if not content.startswith(MAGIC) or len(body) < LENGTH.size:
        raise SnapshotRefused("it does not begin as a snapshot of this format does")
    if hashlib.sha256(body).digest() != content[len(MAGIC) : begin]:
        raise SnapshotRefused("its bytes were damaged")
    (length,) = LENGTH.unpack_from(body)
    inflating = zlib.decompressobj()
    try:
        head = json.loads(inflating.decompress(body[LENGTH.size : LENGTH.size + length], MAX_HEAD_BYTES))
    except (zlib.error, ValueError) as error:
        raise SnapshotRefused(f"its head cannot be read ({error})") from error
    if not inflating.eof or not isinstance(head, dict):
        raise SnapshotRefused("its head is not whole")
    return head, body[LENGTH.size + length :]


def _whole_stamp(kind: type, stamp: Mapping[str, str]) -> dict[str, str]:
    return {"version": __version__, "shape": _shape_hash(kind), **stamp}


@cache
def _shape_hash(kind: type) -> str:
    return hashlib.sha256(_shape(kind, ()).encode()).hexdigest()[:16]


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _shape(kind: Any, within: tuple[type, ...]) -> str:
    """The type in words, down to its last field: another shape of state makes another stamp."""
    if isinstance(kind, NewType):
        return _shape(kind.__supertype__, within)
    if isinstance(kind, type) and is_dataclass(kind):
        if kind in within:
            return kind.__name__
        inner = (f"{name}:{_shape(hint, (*within, kind))}" for name, hint in _hints(kind).items())
        return f"{kind.__name__}({','.join(inner)})"
    if arguments := get_args(kind):
        return f"{get_origin(kind)}[{','.join(_shape(argument, within) for argument in arguments)}]"
    return str(kind)


class _Arrays:
    """Arrays put aside, those of one type in one row."""

    def __init__(self) -> None:
        self._same: dict[str, list[NDArray[Any]]] = {}
        self._sizes: dict[str, int] = {}

    def put(self, array: NDArray[Any]) -> list[Any]:
        """Where it is: type, place and shape."""
        dtype = array.dtype.str
        at = self._sizes.get(dtype, 0)
        self._same.setdefault(dtype, []).append(array)
        self._sizes[dtype] = at + array.size
        return [dtype, at, *array.shape]

    def joined(self) -> dict[str, NDArray[Any]]:
        return {dtype: np.concatenate([array.ravel() for array in same]) for dtype, same in self._same.items()}


Flattener: TypeAlias = Callable[[Any, _Arrays], Any]  # a value as JSON has it; arrays are put aside


@cache
def _flattener(kind: Any) -> Flattener | None:
    """What makes JSON of a value of this type; None where it is JSON as it is."""
    if isinstance(kind, NewType):
        return _flattener(kind.__supertype__)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (_flattener(argument) for argument in arguments if argument is not types.NoneType)
        return inner and (lambda value, arrays: None if value is None else inner(value, arrays))
    if origin is np.ndarray:
        return lambda value, arrays: arrays.put(value)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _flat_fields(tuple, [_flattener(argument) for argument in arguments])
    if origin is dict:
        pair = _flat_fields(list, [_flattener(argument) for argument in arguments]) or (lambda value, arrays: value)
        return lambda value, arrays: [pair(item, arrays) for item in value.items()]
    if origin in (tuple, list, deque, set):
        return _flat_row(origin, _flattener(arguments[0]))
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        values = attrgetter(*hints) if len(hints) > 1 else lambda value: (getattr(value, next(iter(hints))),)
        return _flat_fields(values, [_flattener(hint) for hint in hints.values()]) or (
            lambda value, arrays: values(value)
        )
    if kind is range:
        return lambda value, arrays: [value.start, value.stop]
    if kind is datetime:
        return lambda value, arrays: value.isoformat()
    if kind in AS_IT_IS:
        return None
    raise TypeError(f"a snapshot has no {kind}")


def _flat_fields(values: Callable[[Any], Any], flatteners: list[Flattener | None]) -> Flattener | None:
    """For a few values, each of a type of its own; None where all of them are JSON."""
    if not any(flatteners):
        return None

    def flat(value: Any, arrays: _Arrays) -> list[Any]:
        return [one if f is None else f(one, arrays) for f, one in zip(flatteners, values(value), strict=True)]

    return flat


def _flat_row(origin: Any, inner: Flattener | None) -> Flattener | None:
    """For many values of one type; a set's are in order."""
    if inner is None:
        return {tuple: None, list: None, deque: _listed, set: _sorted}[origin]
    return lambda value, arrays: [inner(one, arrays) for one in value]


def _listed(value: Any, arrays: _Arrays) -> list[Any]:
    return list(value)


def _sorted(value: Any, arrays: _Arrays) -> list[Any]:
    return sorted(value)


def _built(kind: Any, flat: Any, buffers: dict[str, NDArray[Any]]) -> Any:
    """The value of this type; TypeError or ValueError where `flat` is none."""
    if isinstance(kind, NewType):
        return _built(kind.__supertype__, flat, buffers)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if flat is None and types.NoneType in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return _built(inner, flat, buffers)
    if origin is np.ndarray:
        return _array(np.dtype(get_args(arguments[1])[0]), flat, buffers)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_built(inner, one, buffers) for inner, one in zip(arguments, flat, strict=True))
    if origin in (tuple, list, set, deque):
        return origin(_built(arguments[0], one, buffers) for one in flat)
    if origin is dict:
        return {_built(arguments[0], key, buffers): _built(arguments[1], one, buffers) for key, one in flat}
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        values = [_built(hint, one, buffers) for hint, one in zip(hints.values(), flat, strict=True)]
        return kind(**dict(zip(hints, values, strict=True)))  # type: ignore[operator]
    return _plain(kind, flat)


def _plain(kind: Any, flat: Any) -> Any:
    if kind is range:
        return range(*flat)
    if kind is datetime:
        return datetime.fromisoformat(flat)
    right = isinstance(flat, int | float) if kind is float else isinstance(flat, kind)
    if not right or (isinstance(flat, bool) and kind is not bool):
        raise TypeError(f"expected {kind.__name__}, got {type(flat).__name__}")
    return flat


def _array(dtype: np.dtype[Any], flat: Any, buffers: dict[str, NDArray[Any]]) -> NDArray[Any]:
    name, at, *shape = flat
    if np.dtype(name) != dtype:
        raise TypeError(f"expected an array of {dtype}, got {name}")
    size = int(np.prod(shape))
    array = buffers[name][at : at + size].reshape(shape)
    array.flags.writeable = False
    return array
