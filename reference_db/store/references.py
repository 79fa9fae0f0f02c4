"""A reference and its file: what is known of a registered video, and one feature row per second of it.

The file is safetensors: `rows` (float16) and `informative` (bool), and in its header a record that says all that the
catalogue knows of the reference, with a SHA-256 over record and arrays. So a file explains and proves itself: the
catalogue can be made again from its files, and `export` and `import` move one of them from house to house. A file that
comes from elsewhere is read as hostile: `unpacked` believes nothing that it has not checked.
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
# Control characters, line breaks, halves of characters, and what turns the direction of writing.
UNSHOWABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
MAX_HEADER_BYTES = 1 << 20
MAX_SECONDS = 250_000  # of a reference that is moved: 69 hours, a file of 256 MB
MAX_WORDS, MAX_TAGS = 1000, 100  # characters of a title, owner, tag or encoder's name; tags of one reference
UNIT_SLACK = 0.01  # how far from 1 the length of a float16 row may be

ReferenceId = NewType("ReferenceId", str)


@dataclass(frozen=True, slots=True)
class Reference:
    """A registered video."""

    id: ReferenceId
    title: str
    owner: str
    tags: dict[str, str]
    content_sha256: str  # of the file it was made from
    n_seconds: int
    n_uninformative: int  # seconds that nothing can be recognised by: black, flat, or missing
    encoder_id: str
    features_sha256: str  # of its feature file; set by Catalog.add
    added_at: datetime  # aware UTC
    thumbnails_sha256: str = ""  # of its thumbnails' file, empty where none are kept; set by Catalog.add
    imported: bool = False  # its features came from elsewhere, so its video was never seen here


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceFeatures:
    """One feature row per second of a reference; a second that was not seen has zeros and is uninformative."""

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
    """The id as a ReferenceId; raises CatalogError for one that could not be a file's name."""
    if not ID_PATTERN.fullmatch(id):
        raise CatalogError(f"{id!r} cannot be an id: use up to 128 letters, digits, dots, dashes and underscores.")
    return ReferenceId(id)


def check_words(title: str, owner: str, tags: Mapping[str, str]) -> None:
    """Raises CatalogError for words that are too long, or that a terminal or a log could not show as they are."""
    for what, words in [("title", title), ("owner", owner), *(("tag", word) for pair in tags.items() for word in pair)]:
        if len(words) > MAX_WORDS or UNSHOWABLE.search(words):
            raise CatalogError(f"The {what} {words[:40]!a} cannot be kept: up to {MAX_WORDS} printable characters can.")
    if len(tags) > MAX_TAGS:
        raise CatalogError(f"{len(tags)} tags are too many: up to {MAX_TAGS} can be kept.")


def showable(words: str) -> str:
    """The words with what could not be kept or shown replaced, and cut to the length that can."""
    return UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", words)[:MAX_WORDS]


def record(reference: Reference) -> str:
    """All that is known of the reference but the hash of its file, as JSON that is the same for the same reference."""
    values = asdict(reference)
    del values["features_sha256"]
    values["added_at"] = reference.added_at.astimezone(UTC).isoformat()
    return json.dumps(values, sort_keys=True)


def from_record(text: str, features_sha256: str) -> Reference:
    """The reference of a record that a hash has vouched for."""
    values = json.loads(text)
    return Reference(
        **values | {"added_at": datetime.fromisoformat(values["added_at"])}, features_sha256=features_sha256
    )


def packed(reference: Reference, features: ReferenceFeatures) -> bytes:
    """The reference's file; the same bytes for the same reference."""
    arrays = {"rows": features.rows, "informative": features.informative}
    words = record(reference)
    stamp = {"format": FORMAT, "record": words, "sha256": _digest(words, features)}
    # One key only: safetensors writes several in any order.
    return save(arrays, metadata={"copywatch": json.dumps(stamp)})


def features_of(content: bytes) -> ReferenceFeatures:
    """The features in a file whose own SHA-256 was found right."""
    arrays = load(content)
    return ReferenceFeatures(arrays["rows"], arrays["informative"])


def unpacked(content: bytes) -> tuple[Reference, ReferenceFeatures]:
    """The reference and the features in a file that anybody may have made; raises NotAReference, touches nothing."""
    stamp = _stamp(content)
    try:
        features = features_of(content)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise NotAReference("is damaged or no export of Copywatch: its arrays cannot be read") from error
    if stamp["sha256"] != _digest(stamp["record"], features):
        raise NotAReference("is damaged: its bytes are not those that were written")
    reference = _checked(stamp["record"], hashlib.sha256(content).hexdigest())
    n_seconds, n_uninformative = len(features.rows), int((~features.informative).sum())
    if (n_seconds, n_uninformative) != (reference.n_seconds, reference.n_uninformative):
        raise NotAReference("contradicts itself: its arrays are not as long as it says")
    lengths = np.linalg.norm(features.rows[features.informative].astype(np.float32), axis=1)
    if not len(lengths) or (np.abs(lengths - 1) > UNIT_SLACK).any():
        raise NotAReference("holds rows that no encoder makes: a row that counts has length 1")
    return reference, features


def _stamp(content: bytes) -> dict[str, str]:
    """The header's word on the file, checked for its shape only."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise NotAReference("is no export of Copywatch, or cut short")
    try:
        stamp = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["copywatch"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotAReference("is no export of Copywatch") from error
    if not isinstance(stamp, dict) or not all(
        isinstance(stamp.get(key), str) for key in ("format", "record", "sha256")
    ):
        raise NotAReference("is no export of Copywatch")
    if not stamp["record"].isascii():
        raise NotAReference("is no export of Copywatch")
    if stamp["format"] != FORMAT:
        raise NotAReference(f"is of the format {stamp['format'][:40]!a}; this Copywatch reads {FORMAT}")
    return stamp


def _checked(words: str, features_sha256: str) -> Reference:
    """The reference of a record that nobody has vouched for."""
    try:
        values: Any = json.loads(words)
        kinds = {name: kind for name, kind in Reference.__annotations__.items() if name != "features_sha256"}
        if values.keys() != kinds.keys():
            raise ValueError("wrong names")
        for name, kind in kinds.items():
            expected = {int: int, bool: bool, dict[str, str]: dict}.get(kind, str)
            if type(values[name]) is not expected:
                raise ValueError(f"wrong kind of {name}")
        if not all(isinstance(value, str) for value in values["tags"].values()):
            raise ValueError("tags must be words")
        reference = from_record(words, features_sha256)
        check_id(reference.id)
        check_words(reference.title, reference.owner, reference.tags)
        check_words(reference.encoder_id, "", {})
        if not SHA256_PATTERN.fullmatch(reference.content_sha256):
            raise ValueError("wrong kind of hash")
        if reference.thumbnails_sha256 and not SHA256_PATTERN.fullmatch(reference.thumbnails_sha256):
            raise ValueError("wrong kind of hash")
        if reference.added_at.tzinfo is None or record(reference) != words:
            raise ValueError("not as Copywatch writes it")
    except (ValueError, TypeError, AttributeError, RecursionError, CatalogError, OverflowError) as error:
        raise NotAReference(f"has a record that cannot be right ({error})") from error
    return reference


def _digest(words: str, features: ReferenceFeatures) -> str:
    digest = hashlib.sha256(words.encode() + b"\0")
    digest.update(np.ascontiguousarray(features.rows).data)
    digest.update(np.ascontiguousarray(features.informative).data)
    return digest.hexdigest()
