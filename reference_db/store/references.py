"""A reference and its feature file: the metadata of a registered video, and one feature row per second of it.

The file is safetensors: `rows` (float16) and `informative` (bool), and in its header a record with all the catalogue's
data about the reference and a SHA-256 over record and arrays. So a file describes and verifies itself: the catalogue
can be rebuilt from the files, and `export` and `import` move one of them to another installation. A file from elsewhere
is untrusted input: `unpack` checks everything.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from reference_db.errors import CatalogError, NotAReference

FEATURE_SIZE = 512
FORMAT = "copywatch-reference-1"
ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
# Control characters, line breaks, surrogates, and marks that change the writing direction.
UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
MAX_HEADER_BYTES = 1 << 20
MAX_SECONDS = 250_000  # of an exported reference: 69 hours, a file of 256 MB
MAX_TEXT_LENGTH, MAX_TAGS = 1000, 100  # characters of a title, owner, tag or encoder id; tags of one reference
UNIT_TOLERANCE = 0.01  # how far from 1 the length of a float16 row may be

ReferenceId = NewType("ReferenceId", str)


@dataclass(frozen=True, slots=True)
class Reference:
    """A registered video."""

    id: ReferenceId
    title: str
    owner: str
    tags: dict[str, str]
    content_sha256: str  # of the video file
    n_seconds: int
    n_uninformative: int  # seconds that cannot be recognised: black, flat or missing
    encoder_id: str
    features_sha256: str  # of its feature file; set by Catalog.add
    added_at: datetime  # aware UTC
    thumbnails_sha256: str = ""  # of its thumbnail file, empty if it has none; set by Catalog.add
    imported: bool = False  # its features came from an export, so its video was not decoded here


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceFeatures:
    """One feature row per second of a reference; a second without a picture has zeros and is uninformative."""

    rows: NDArray[np.float16]  # [seconds, 512]
    informative: NDArray[np.bool_]  # [seconds]

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape[1] != FEATURE_SIZE or self.rows.dtype != np.float16:
            raise ValueError(f"rows must be float16 [n, {FEATURE_SIZE}], got {self.rows.dtype} {self.rows.shape}")
        if self.informative.shape != self.rows.shape[:1] or self.informative.dtype != np.bool_:
            raise ValueError(f"informative must be bool [{len(self.rows)}], got {self.informative.shape}")
        if not np.isfinite(self.rows).all():
            raise ValueError("rows must be finite numbers")
        self.rows.flags.writeable = False
        self.informative.flags.writeable = False


def check_id(id: str) -> ReferenceId:
    """The id as a ReferenceId; raises CatalogError if it could not be a file name."""
    if not ID_PATTERN.fullmatch(id):
        raise CatalogError(f"{id!r} cannot be an id: use up to 128 letters, digits, dots, dashes and underscores.")
    return ReferenceId(id)


def check_texts(title: str, owner: str, tags: Mapping[str, str]) -> None:
    """Raises CatalogError for text that is too long, or that a terminal or a log could not print unchanged."""
    for name, text in [("title", title), ("owner", owner), *(("tag", text) for pair in tags.items() for text in pair)]:
        if len(text) > MAX_TEXT_LENGTH or UNPRINTABLE.search(text):
            raise CatalogError(
                f"The {name} {text[:40]!a} is invalid: use up to {MAX_TEXT_LENGTH} printable characters."
            )
    if len(tags) > MAX_TAGS:
        raise CatalogError(f"{len(tags)} tags are too many: use up to {MAX_TAGS}.")


def printable(text: str) -> str:
    """The text as `check_texts` accepts it: unprintable characters replaced, cut to the maximum length."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)[:MAX_TEXT_LENGTH]


def record_of(reference: Reference) -> str:
    """All data of the reference but the hash of its file, as deterministic JSON."""
    values = asdict(reference)
    del values["features_sha256"]
    values["added_at"] = reference.added_at.astimezone(UTC).isoformat()
    return json.dumps(values, sort_keys=True)


def reference_from_record(text: str, features_sha256: str) -> Reference:
    """The reference of a record whose hash was verified."""
    values = json.loads(text)
    return Reference(
        **values | {"added_at": datetime.fromisoformat(values["added_at"])}, features_sha256=features_sha256
    )


def pack(reference: Reference, features: ReferenceFeatures) -> bytes:
    """The content of the reference's feature file; deterministic."""
    arrays = {"rows": features.rows, "informative": features.informative}
    record = record_of(reference)
    stamp = {"format": FORMAT, "record": record, "sha256": _digest(record, features)}
    # One key only: safetensors would write several in random order.
    return save(arrays, metadata={"copywatch": json.dumps(stamp)})


def read_features(content: bytes) -> ReferenceFeatures:
    """The features in a file whose SHA-256 was verified."""
    arrays = load(content)
    return ReferenceFeatures(arrays["rows"], arrays["informative"])


def unpack(content: bytes) -> tuple[Reference, ReferenceFeatures]:
    """The reference and the features in an untrusted file; raises NotAReference."""
    stamp = _read_stamp(content)
    try:
        features = read_features(content)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise NotAReference("is damaged or not a Copywatch export: its arrays cannot be read") from error
    if stamp["sha256"] != _digest(stamp["record"], features):
        raise NotAReference("is damaged: its content does not match its SHA-256")
    reference = _check_record(stamp["record"], hashlib.sha256(content).hexdigest())
    n_seconds, n_uninformative = len(features.rows), int((~features.informative).sum())
    if (n_seconds, n_uninformative) != (reference.n_seconds, reference.n_uninformative):
        raise NotAReference("is inconsistent: its arrays do not have the length that its record states")
    lengths = np.linalg.norm(features.rows[features.informative].astype(np.float32), axis=1)
    if not len(lengths) or (np.abs(lengths - 1) > UNIT_TOLERANCE).any():
        raise NotAReference("has rows that no encoder produces: an informative row has length 1")
    return reference, features


def _read_stamp(content: bytes) -> dict[str, str]:
    """The stamp in the file's header; only its types are checked."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise NotAReference("is not a Copywatch export, or is truncated")
    try:
        stamp = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["copywatch"])
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


def _check_record(record: str, features_sha256: str) -> Reference:
    """The reference of an untrusted record."""
    try:
        values: Any = json.loads(record)
        kinds = {name: kind for name, kind in Reference.__annotations__.items() if name != "features_sha256"}
        if values.keys() != kinds.keys():
            raise ValueError("unexpected keys")
        for name, kind in kinds.items():
            expected = {int: int, bool: bool, dict[str, str]: dict}.get(kind, str)
            if type(values[name]) is not expected:
                raise ValueError(f"wrong type of {name}")
        if not all(isinstance(value, str) for value in values["tags"].values()):
            raise ValueError("tags must be text")
        reference = reference_from_record(record, features_sha256)
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


def _digest(record: str, features: ReferenceFeatures) -> str:
    digest = hashlib.sha256(record.encode() + b"\0")
    digest.update(np.ascontiguousarray(features.rows).data)
    digest.update(np.ascontiguousarray(features.informative).data)
    return digest.hexdigest()
