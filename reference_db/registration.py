"""Registration: one video file becomes one reference, with a report on how well it can be recognised.

The child process decodes ahead while the pictures it has sent are encoded here. The same bytes registered twice are
one reference; a video without a single second to recognise it by is refused.
"""

import hashlib
import io
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reference_db.catalog import FEATURE_SIZE, Catalog, Reference, ReferenceFeatures, ReferenceId, check_id
from reference_db.decoding import DecodingChild
from reference_db.encoder import Encoder, is_informative
from reference_db.errors import (
    DamagedReference,
    EncoderMismatch,
    MediaError,
    ReferenceExists,
    UnknownReference,
)
from reference_db.frames import Frame

BATCH = 8  # pictures encoded at a time; the decoder works on the next ones meanwhile
THUMBNAIL_SIDE, THUMBNAIL_QUALITY = 160, 70  # longest side in pixels; some 4 kB a second
STATIC_SIMILARITY = 0.98  # a second this like the one before it shows nothing new
OVERLAP_SIMILARITY = 0.8  # a second this like one of another reference may be the same scene
# What is worth a warning.
DULL_SHARE, STATIC_S, OVERLAP_SHARE, SHORT_S = 0.5, 30, 0.1, 3


@dataclass(frozen=True, slots=True)
class Hygiene:
    """How well a reference can be recognised, and told from the others."""

    n_seconds: int
    uninformative_share: float  # of its seconds: black, flat or missing
    longest_static_s: int  # of one unchanging picture
    overlaps: tuple[tuple[ReferenceId, float], ...]  # other references and the share of its seconds found in them
    warnings: tuple[str, ...]  # what to know of this, in words


@dataclass(frozen=True, slots=True)
class Registration:
    """What came of registering a file."""

    reference: Reference
    already_there: bool
    report: Hygiene


def register(
    path: Path,
    catalog: Catalog,
    encoder: Encoder,
    *,
    id: str | None = None,
    title: str | None = None,
    owner: str = "",
    tags: Mapping[str, str] | None = None,
    thumbnails: bool = True,
    progress: Callable[[int, int | None], None] | None = None,
) -> Registration:
    """The file as a reference, safe in the catalogue; found there already when its bytes are known.

    `progress` is told the seconds done and, where the file says, their total. Raises MediaError for a file that cannot
    be used, ReferenceExists for an id that is taken, EncoderMismatch for a file that another encoder registered.
    """
    wanted = None if id is None else check_id(id)
    with DecodingChild(str(path)) as child:
        info = child.info()
        content_sha256 = _sha256(path)
        known = catalog.by_content(content_sha256)
        if known is not None:
            return _already_there(known, catalog, encoder)
        if wanted is not None and _is_taken(catalog, wanted):
            raise ReferenceExists(f"The id {wanted} is taken by another video; choose another, or remove that first.")
        total = None if info.duration_s is None else math.ceil(info.duration_s)
        features, pictures = _encoded(child.frames(), encoder, thumbnails, total, progress)
    if not features.informative.any():
        raise MediaError(f"{path.name} shows nothing but black or flat pictures; it could never be recognised.")
    reference = Reference(
        id=wanted or _free_id(catalog, path.stem),
        title=path.stem if title is None else title,
        owner=owner,
        tags=dict(tags or {}),
        content_sha256=content_sha256,
        n_seconds=len(features.rows),
        n_uninformative=int((~features.informative).sum()),
        encoder_id=encoder.encoder_id,
        features_sha256="",
        added_at=datetime.now(UTC),
    )
    report = examine(features, catalog, encoder.encoder_id)
    return Registration(catalog.add(reference, features, pictures), already_there=False, report=report)


def examine(
    features: ReferenceFeatures, catalog: Catalog, encoder_id: str, itself: ReferenceId | None = None
) -> Hygiene:
    """The hygiene of these features beside the references that are in the catalogue."""
    n_seconds = len(features.rows)
    dull_share = 1 - float(features.informative.mean())
    static_s = _longest_static_s(features)
    overlaps, warnings = [], []
    for other in catalog.references():
        if other.id == itself or other.encoder_id != encoder_id:
            continue
        try:
            share = _share_found(features, catalog.features(other.id))
        except DamagedReference as damaged:
            warnings.append(str(damaged))
            continue
        if share >= OVERLAP_SHARE:
            overlaps.append((other.id, share))
            warnings.append(f"{share:.0%} of its seconds look like {other.id}; a copy of one may be told as both.")
    if dull_share >= DULL_SHARE:
        warnings.append(f"{dull_share:.0%} of its seconds are black, flat or missing and cannot be recognised.")
    if static_s >= STATIC_S:
        warnings.append(f"One picture stands still for {static_s} s; a copy of that part alone is weak evidence.")
    if n_seconds < SHORT_S:
        warnings.append(f"It is only {n_seconds} s long; copies this short are easily missed.")
    return Hygiene(n_seconds, dull_share, static_s, tuple(overlaps), tuple(warnings))


def safe_id(stem: str) -> ReferenceId:
    """A file's stem as an id: accents and odd signs replaced, never empty, short enough for a number behind it."""
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:120]
    return check_id(name or "reference")


def _already_there(known: Reference, catalog: Catalog, encoder: Encoder) -> Registration:
    if known.encoder_id != encoder.encoder_id:
        raise EncoderMismatch(
            f"This file is registered as {known.id} with another encoder; run `copywatch refs rm {known.id}` and "
            f"`copywatch refs add FILE --id {known.id}` again."
        )
    report = examine(catalog.features(known.id), catalog, encoder.encoder_id, itself=known.id)
    return Registration(known, already_there=True, report=report)


def _encoded(
    frames: Iterator[Frame],
    encoder: Encoder,
    thumbnails: bool,
    total: int | None,
    progress: Callable[[int, int | None], None] | None,
) -> tuple[ReferenceFeatures, list[bytes] | None]:
    """Features and thumbnails by second; a second without a frame has zeros and no thumbnail."""
    rows: dict[int, NDArray[np.float32]] = {}
    informative: set[int] = set()
    pictures: dict[int, bytes] = {}
    while batch := list(islice(frames, BATCH)):
        encoded = encoder.encode([frame.picture for frame in batch])
        rows |= {frame.second: row for frame, row in zip(batch, encoded, strict=True)}
        informative |= {frame.second for frame in batch if is_informative(frame.picture)}
        if thumbnails:
            pictures |= {frame.second: _jpeg(frame.picture) for frame in batch}
        if progress is not None:
            progress(batch[-1].second + 1, total)
    n_seconds = max(rows) + 1
    features = np.zeros((n_seconds, FEATURE_SIZE), np.float16)
    for second, row in rows.items():
        features[second] = row
    mask = np.array([second in informative for second in range(n_seconds)])
    kept = [pictures.get(second, b"") for second in range(n_seconds)] if thumbnails else None
    return ReferenceFeatures(features, mask), kept


def _jpeg(picture: NDArray[np.uint8]) -> bytes:
    image = Image.fromarray(picture)
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY)
    return buffer.getvalue()


def _longest_static_s(features: ReferenceFeatures) -> int:
    rows = features.rows.astype(np.float32)
    alike = (rows[1:] * rows[:-1]).sum(axis=1) > STATIC_SIMILARITY
    longest = length = 1
    for is_alike in alike & features.informative[1:] & features.informative[:-1]:
        length = length + 1 if is_alike else 1
        longest = max(longest, length)
    return longest


def _share_found(features: ReferenceFeatures, other: ReferenceFeatures) -> float:
    """The share of informative seconds that the other reference also has."""
    ours = features.rows[features.informative].astype(np.float32)
    theirs = other.rows[other.informative].astype(np.float32)
    if not len(ours) or not len(theirs):
        return 0.0
    found = [(part @ theirs.T).max(axis=1) > OVERLAP_SIMILARITY for part in np.array_split(ours, len(ours) // 256 + 1)]
    return float(np.concatenate(found).mean())


def _is_taken(catalog: Catalog, id: ReferenceId) -> bool:
    try:
        catalog.get(id)
    except UnknownReference:
        return False
    return True


def _free_id(catalog: Catalog, stem: str) -> ReferenceId:
    id, number = safe_id(stem), 2
    while _is_taken(catalog, id):
        id, number = check_id(f"{safe_id(stem)}-{number}"), number + 1
    return id


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MediaError(f"{path.name} cannot be read: {error.strerror}.") from error
