"""A reference: the metadata of a registered video, and one feature row per second of it.

Features are in memory (`ReferenceFeatures`) or in a file (`StoredFeatures` in feature_files.py); code that reads them
works on blocks of rows, so that a long reference needs no more memory than a short one.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from reference_db.errors import CatalogError
from reference_db.text import UNPRINTABLE, is_printable

FEATURE_SIZE = 512
ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
MAX_SECONDS = 250_000  # of a reference: 69 hours, a file of 256 MB
BLOCK_ROWS = 1024  # rows handled at once: 1 MB as float16, 2 MB as float32
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
    # Identity of its features: a hash of rows, information flags and encoder, equal on every machine that registers
    # the video; set by Catalog.add, empty in rows of earlier versions (see `ReferenceIndex.features_id`).
    features_id: str = ""


class RowBlocks(Protocol):
    """Rows [seconds, 512] that are read by spans."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> NDArray[np.float16]: ...


class Features(Protocol):
    """The features of a reference, in memory or in a file."""

    @property
    def rows(self) -> RowBlocks: ...

    @property
    def informative(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceFeatures:
    """Features in memory: one row per second; a second without a picture has zeros and is uninformative."""

    rows: NDArray[np.float16]  # [seconds, 512]
    informative: NDArray[np.bool_]  # [seconds]

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape[1] != FEATURE_SIZE or self.rows.dtype != np.float16:
            raise ValueError(f"rows must be float16 [n, {FEATURE_SIZE}], got {self.rows.dtype} {self.rows.shape}")
        if self.informative.shape != self.rows.shape[:1] or self.informative.dtype != np.bool_:
            raise ValueError(f"informative must be bool [{len(self.rows)}], got {self.informative.shape}")
        if not all(np.isfinite(rows).all() for _, rows in blocks(self.rows)):
            raise ValueError("rows must be finite numbers")
        self.rows.flags.writeable = False
        self.informative.flags.writeable = False


def blocks(rows: RowBlocks) -> Iterator[tuple[int, NDArray[np.float16]]]:
    """The rows in blocks, each with the second of its first row."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield start, rows[start : start + BLOCK_ROWS]


def check_id(id: str) -> ReferenceId:
    """The id as a ReferenceId; raises CatalogError if it could not be a file name."""
    if not ID_PATTERN.fullmatch(id):
        raise CatalogError(f"{id!r} cannot be an id: use up to 128 letters, digits, dots, dashes and underscores.")
    return ReferenceId(id)


def check_texts(title: str, owner: str, tags: Mapping[str, str]) -> None:
    """Raises CatalogError for text that is too long, or that a terminal or a log could not print unchanged."""
    for name, text in [("title", title), ("owner", owner), *(("tag", text) for pair in tags.items() for text in pair)]:
        if len(text) > MAX_TEXT_LENGTH or not is_printable(text):
            raise CatalogError(
                f"The {name} {text[:40]!a} is invalid: use up to {MAX_TEXT_LENGTH} printable characters."
            )
    if len(tags) > MAX_TAGS:
        raise CatalogError(f"{len(tags)} tags are too many: use up to {MAX_TAGS}.")


def printable(text: str) -> str:
    """The text as `check_texts` accepts it: unprintable characters replaced, cut to the maximum length."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)[:MAX_TEXT_LENGTH]


def record_of(reference: Reference, *, with_features_id: bool = False) -> str:
    """All data of the reference but the hashes that follow from its features, as deterministic JSON."""
    values = asdict(reference)
    del values["features_sha256"]
    if not (with_features_id and reference.features_id):
        del values["features_id"]
    values["added_at"] = reference.added_at.astimezone(UTC).isoformat()
    return json.dumps(values, sort_keys=True)


def reference_from_record(text: str, features_sha256: str) -> Reference:
    """The reference of a record whose hash was verified."""
    values = json.loads(text)
    return Reference(
        **values | {"added_at": datetime.fromisoformat(values["added_at"])}, features_sha256=features_sha256
    )
