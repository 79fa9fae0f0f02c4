"""The feature file of a reference: written and read in pieces, so that its length costs no memory.

The file is safetensors: `rows` (float16) and `informative` (bool), and in its header a record with all the catalogue's
data about the reference and a SHA-256 over record and arrays. So a file describes and verifies itself: the catalogue
can be rebuilt from the files, and `export` and `import` move one of them to another installation. A file from elsewhere
is untrusted input: `check_header` and `read_untrusted` check everything. Files are read and not mapped: one that is
truncated meanwhile gives rows of zeros, and does not kill the process.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_db.errors import CatalogError, NotAReference
from reference_db.store.references import (
    FEATURE_SIZE,
    MAX_SECONDS,
    SHA256_PATTERN,
    UNIT_TOLERANCE,
    Features,
    Reference,
    blocks,
    check_id,
    check_texts,
    record_of,
    reference_from_record,
)

FORMAT = "copywatch-reference-1"
IDENTITY = b"copywatch-features-1"  # begins what `features_id` hashes
MAX_HEADER_BYTES = 1 << 20
ROW_BYTES = 2 * FEATURE_SIZE
PIECE_BYTES = 1 << 20  # read at once
MAX_FILE_BYTES = MAX_SECONDS * (ROW_BYTES + 1) + MAX_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where the arrays of a feature file are; follows from its header."""

    header: dict[str, Any]
    n_seconds: int
    rows_at: int  # position of row 0, in bytes

    @property
    def informative_at(self) -> int:
        return self.rows_at + self.n_seconds * ROW_BYTES

    @property
    def n_bytes(self) -> int:
        """The size of the whole file."""
        return self.informative_at + self.n_seconds


def read_layout(file: int) -> FileLayout:
    """The layout of an open feature file; NotAReference if its header is not that of one, before more is read."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise NotAReference("is not a Copywatch export, or is truncated")
    try:
        header = json.loads(os.pread(file, length, 8))
        n_seconds = header["rows"]["shape"][0]
        arrays = {name: header[name] for name in header if name != "__metadata__"}
        if type(n_seconds) is not int or n_seconds < 0 or arrays != _array_headers(n_seconds):
            raise ValueError("other arrays")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise NotAReference("is damaged or not a Copywatch export: its arrays cannot be read") from error
    if n_seconds > MAX_SECONDS:
        raise NotAReference(f"is longer than the {MAX_SECONDS // 3600} hours that a reference may have")
    return FileLayout(header, n_seconds, 8 + length)


def _array_headers(n_seconds: int) -> dict[str, Any]:
    """The part of the header that describes the arrays."""
    end = n_seconds * ROW_BYTES
    return {
        "rows": {"dtype": "F16", "shape": [n_seconds, FEATURE_SIZE], "data_offsets": [0, end]},
        "informative": {"dtype": "BOOL", "shape": [n_seconds], "data_offsets": [end, end + n_seconds]},
    }


class StoredRows:
    """The rows of an open feature file, read by spans; like an array, as far as `Features` needs it."""

    def __init__(self, file: int, layout: FileLayout) -> None:
        self._file, self._layout = file, layout

    def __len__(self) -> int:
        return self._layout.n_seconds

    def __getitem__(self, span: slice, /) -> NDArray[np.float16]:
        start, stop, step = span.indices(len(self))
        rows = np.zeros((max(0, stop - start), FEATURE_SIZE), np.float16)
        if len(rows):
            os.preadv(self._file, [memoryview(rows.data).cast("B")], self._layout.rows_at + start * ROW_BYTES)
        return rows[::step]


class StoredFeatures:
    """The features in a file that stays open as long as this object: `Features` that are not in memory."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and NotAReference for a file with another header; the content is not checked."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.layout = read_layout(self._file)
        if os.fstat(self._file).st_size != self.layout.n_bytes:
            raise NotAReference("is truncated, or has more content than its header describes")
        self.rows = StoredRows(self._file, self.layout)
        flags = os.pread(self._file, self.layout.n_seconds, self.layout.informative_at)
        self.informative: NDArray[np.bool_] = np.zeros(self.layout.n_seconds, np.bool_)
        self.informative[: len(flags)] = np.frombuffer(flags, np.uint8) != 0

    def sha256(self) -> str:
        """The hash of the whole file, read in pieces."""
        digest, at = hashlib.sha256(), 0
        while piece := os.pread(self._file, PIECE_BYTES, at):
            digest.update(piece)
            at += len(piece)
        return digest.hexdigest()


def file_header(reference: Reference, features: Features) -> bytes:
    """The header of the reference's feature file; reads all features for their hash."""
    record = record_of(reference)
    stamp = {"format": FORMAT, "record": record, "sha256": _digest(record, features)}
    # As safetensors writes it: one key of metadata, then the arrays, padded to a multiple of eight bytes.
    header = {"__metadata__": {"copywatch": json.dumps(stamp)}, **_array_headers(len(features.rows))}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_chunks(header: bytes, features: Features) -> Iterator[bytes]:
    """The content of a feature file in pieces; deterministic."""
    yield header
    for _, rows in blocks(features.rows):
        yield rows.tobytes()
    yield features.informative.tobytes()


def features_id(encoder_id: str, features: Features) -> str:
    """The identity of features: a hash of encoder, rows and information flags; not of ids, texts or times.

    Two machines that register the same video agree on it, whatever else their files and rows say.
    """
    digest = hashlib.sha256(b"\0".join((IDENTITY, encoder_id.encode(), str(len(features.rows)).encode(), b"")))
    for _, rows in blocks(features.rows):
        digest.update(rows.tobytes())
    digest.update(features.informative.tobytes())
    return digest.hexdigest()


def pack(reference: Reference, features: Features) -> bytes:
    """The content of the reference's feature file as a whole."""
    return b"".join(file_chunks(file_header(reference, features), features))


def check_header(path: Path) -> Reference:
    """The reference of an untrusted file by its header and flags, 1 MB at most; raises NotAReference and OSError."""
    return _reference_of(StoredFeatures(path))


def read_untrusted(path: Path) -> tuple[Reference, StoredFeatures]:
    """The reference and the features in an untrusted file, all of it checked; raises NotAReference and OSError."""
    features = StoredFeatures(path)
    reference = replace(_reference_of(features), features_sha256=features.sha256())
    stamp = _read_stamp(features.layout)
    digest = hashlib.sha256(stamp["record"].encode() + b"\0")
    for start, rows in blocks(features.rows):
        digest.update(rows.data)
        lengths = np.linalg.norm(rows[features.informative[start : start + len(rows)]].astype(np.float32), axis=1)
        # A comparison with NaN is false, so numbers that are not finite fail it as well.
        if not (np.abs(lengths - 1) <= UNIT_TOLERANCE).all() or not np.isfinite(rows).all():
            raise NotAReference("has rows that no encoder produces: an informative row has length 1")
    digest.update(features.informative.data)
    if stamp["sha256"] != digest.hexdigest():
        raise NotAReference("is damaged: its content does not match its SHA-256")
    return replace(reference, features_id=features_id(reference.encoder_id, features)), features


def _reference_of(features: StoredFeatures) -> Reference:
    """The reference that the header describes, without the hash of the file."""
    reference = _check_record(_read_stamp(features.layout)["record"])
    n_uninformative = int((~features.informative).sum())
    if (len(features.rows), n_uninformative) != (reference.n_seconds, reference.n_uninformative):
        raise NotAReference("is inconsistent: its arrays do not have the length that its record states")
    if not features.informative.any():
        raise NotAReference("has rows that no encoder produces: none of them is informative")
    return reference


def _read_stamp(layout: FileLayout) -> dict[str, str]:
    """The stamp in the file's header; only its types are checked."""
    try:
        stamp = json.loads(layout.header["__metadata__"]["copywatch"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotAReference("is not a Copywatch export") from error
    if not isinstance(stamp, dict) or not all(
        isinstance(stamp.get(key), str) for key in ("format", "record", "sha256")
    ):
        raise NotAReference("is not a Copywatch export")
    if not stamp["record"].isascii():
        raise NotAReference("is not a Copywatch export")
    if stamp["format"] != FORMAT:
        raise NotAReference(f"has the format {stamp['format'][:40]!a}; this Copywatch reads {FORMAT}")
    return stamp


def _check_record(record: str) -> Reference:
    """The reference of an untrusted record."""
    try:
        values: Any = json.loads(record)
        derived = {"features_sha256", "features_id"}
        kinds = {name: kind for name, kind in Reference.__annotations__.items() if name not in derived}
        if values.keys() != kinds.keys():
            raise ValueError("unexpected keys")
        for name, kind in kinds.items():
            expected = {int: int, bool: bool, dict[str, str]: dict}.get(kind, str)
            if type(values[name]) is not expected:
                raise ValueError(f"wrong type of {name}")
        if not all(isinstance(value, str) for value in values["tags"].values()):
            raise ValueError("tags must be text")
        reference = reference_from_record(record, "")
        check_id(reference.id)
        check_texts(reference.title, reference.owner, reference.tags)
        check_texts(reference.encoder_id, "", {})
        if not SHA256_PATTERN.fullmatch(reference.content_sha256):
            raise ValueError("invalid hash")
        if reference.thumbnails_sha256 and not SHA256_PATTERN.fullmatch(reference.thumbnails_sha256):
            raise ValueError("invalid hash")
        if reference.added_at.tzinfo is None or record_of(reference) != record:
            raise ValueError("not in canonical form")
    except (ValueError, TypeError, AttributeError, RecursionError, CatalogError, OverflowError) as error:
        raise NotAReference(f"has an invalid record ({error})") from error
    return reference


def _digest(record: str, features: Features) -> str:
    digest = hashlib.sha256(record.encode() + b"\0")
    for _, rows in blocks(features.rows):
        digest.update(rows.tobytes())
    digest.update(features.informative.tobytes())
    return digest.hexdigest()
