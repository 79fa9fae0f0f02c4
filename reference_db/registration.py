"""Registration: one video file becomes one reference, with a report on how well it can be recognised.

The child process decodes ahead while the pictures it has sent are encoded here. The same bytes registered twice are
one reference; a video without a single second to recognise it by, or that breaks off early, is refused.
"""

import hashlib
import math
import re
import stat
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference_db.errors import (
    DamagedReference,
    EncoderMismatch,
    MediaError,
    ReferenceExists,
    UnknownReference,
)
from reference_db.features.encoder import Encoder, is_informative
from reference_db.media.decoding import DecodingChild
from reference_db.media.frames import Frame
from reference_db.media.jpeg import encode_jpeg
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import FEATURE_SIZE, Catalog, Reference, ReferenceFeatures, ReferenceId, check_id
from reference_db.store.references import check_texts, printable

BATCH = 8  # pictures encoded at a time; the decoder works on the next ones meanwhile
THUMBNAIL_SIDE, THUMBNAIL_QUALITY = 160, 70  # longest side in pixels; some 4 kB a second
STATIC_SIMILARITY = 0.98  # a second this like the one before it shows nothing new
OVERLAP_SIMILARITY = 0.8  # a second this like one of another reference may be the same scene
OVERLAP_HITS = 16  # reference seconds looked at for each second
OVERLAP_LEAST, OVERLAP_MOST = 60, 300  # seconds of a reference that are looked for in others: a tenth, within these
WHOLE_SHARE, WHOLE_SLACK_S = 0.9, 2.0  # less of what the file says it holds, and it is not whole
# What is worth a warning.
DULL_SHARE, STATIC_S, OVERLAP_SHARE, SHORT_S = 0.5, 30, 0.1, 3


@dataclass(frozen=True, slots=True)
class QualityReport:
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
    outcome: Literal["added", "already there", "replaced"]  # replaced: its features were damaged, imported or outdated
    report: QualityReport | None  # None for one that was already there; `hygiene` makes it at any time

    @property
    def already_there(self) -> bool:
        return self.outcome == "already there"


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
    index: Callable[[], ReferenceIndex] | None = None,
) -> Registration:
    """The file as a reference, safe in the catalogue; found there already when its bytes are known.

    A known reference is encoded anew, and replaced in one step, where its features are damaged, made by another encoder
    or imported; its id, title, owner and tags stay unless others are given. `progress` is told the seconds done and,
    where the file says, their total. `index` gives what overlaps are looked for in; without it one is made. Raises
    MediaError for a file that cannot be used, ReferenceExists for an id that is taken.
    """
    wanted = None if id is None else check_id(id)
    check_texts(title or "", owner, tags or {})
    before = _file_status(path)
    content_sha256 = _sha256(path)
    known = catalog.by_content(content_sha256)
    if known is not None and _is_good(known, catalog, encoder):
        return Registration(known, "already there", None)
    if known is None and wanted is not None and _is_taken(catalog, wanted):
        raise ReferenceExists(f"The id {wanted} is taken by another video; choose another, or remove that first.")
    with DecodingChild(str(path)) as child:
        info = child.info()
        total = None if info.duration_s is None else math.ceil(info.duration_s)
        features, pictures = _encoded(child.frames(), encoder, thumbnails, total, progress)
    _check_whole(path, features, info.duration_s)
    if _file_status(path) != before:
        raise MediaError(
            f"{printable(path.name)} was changed while it was read; register it again when it is finished."
        )
    reference = Reference(
        id=known.id if known else wanted or _free_id(catalog, path.stem),
        title=title if title is not None else known.title if known else printable(path.stem),
        owner=owner or (known.owner if known else ""),
        tags=dict(tags or (known.tags if known else {})),
        content_sha256=content_sha256,
        n_seconds=len(features.rows),
        n_uninformative=int((~features.informative).sum()),
        encoder_id=encoder.encoder_id,
        features_sha256="",
        added_at=known.added_at if known else datetime.now(UTC),
    )
    report = examine(features, _index(catalog, encoder.encoder_id, index), itself=reference.id)
    if known is not None:
        return Registration(catalog.replace(reference, features, pictures), "replaced", report)
    return Registration(catalog.add(reference, features, pictures), "added", report)


def hygiene(id: ReferenceId, catalog: Catalog) -> QualityReport:
    """The hygiene of a reference that is in the catalogue, beside the others there."""
    reference = catalog.get(id)
    return examine(catalog.features(id), _index(catalog, reference.encoder_id, None), itself=id)


def examine(
    features: ReferenceFeatures, index: ReferenceIndex | None, itself: ReferenceId | None = None
) -> QualityReport:
    """The hygiene of these features beside the references in the index; None says that those cannot be compared."""
    n_seconds = len(features.rows)
    dull_share = 1 - float(features.informative.mean())
    static_s = _longest_static_s(features)
    warnings = []
    if index is None:
        warnings.append("Overlaps were not looked for: another encoder made the features of some references.")
    overlaps = () if index is None else _overlaps(features, index, itself)
    for other, what in index.damaged.items() if index is not None else ():
        warnings.append(f"Reference {other} is damaged and was not compared: {what}.")
    for other, share in overlaps:
        warnings.append(f"{share:.0%} of its seconds look like {other}; a copy of one may be told as both.")
    if dull_share >= DULL_SHARE:
        warnings.append(f"{dull_share:.0%} of its seconds are black, flat or missing and cannot be recognised.")
    if static_s >= STATIC_S:
        warnings.append(f"One picture stands still for {static_s} s; a copy of that part alone is weak evidence.")
    if n_seconds < SHORT_S:
        warnings.append(f"It is only {n_seconds} s long; copies this short are easily missed.")
    return QualityReport(n_seconds, dull_share, static_s, overlaps, tuple(warnings))


def _index(catalog: Catalog, encoder_id: str, index: Callable[[], ReferenceIndex] | None) -> ReferenceIndex | None:
    try:
        return index() if index is not None else ReferenceIndex.build(catalog, encoder_id)
    except EncoderMismatch:
        return None


def _is_good(known: Reference, catalog: Catalog, encoder: Encoder) -> bool:
    return known.encoder_id == encoder.encoder_id and not known.imported and not catalog.is_quarantined(known.id)


def _check_whole(path: Path, features: ReferenceFeatures, duration_s: float | None) -> None:
    name, n_seconds = printable(path.name), len(features.rows)
    if duration_s is not None and n_seconds < WHOLE_SHARE * duration_s - WHOLE_SLACK_S:
        raise MediaError(f"{name} breaks off after {n_seconds} of {duration_s:.0f} s; it is damaged or cut short.")
    if not features.informative.any():
        raise MediaError(f"{name} shows nothing but black or flat pictures; it could never be recognised.")


def safe_id(stem: str) -> ReferenceId:
    """A file's stem as an id: accents and odd signs replaced, never empty, short enough for a number behind it."""
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:120]
    return check_id(name or "reference")


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
            pictures |= {
                frame.second: encode_jpeg(frame.picture, quality=THUMBNAIL_QUALITY, max_side=THUMBNAIL_SIDE)
                for frame in batch
            }
        if progress is not None:
            progress(batch[-1].second + 1, total)
    n_seconds = max(rows) + 1
    features = np.zeros((n_seconds, FEATURE_SIZE), np.float16)
    for second, row in rows.items():
        features[second] = row
    mask = np.array([second in informative for second in range(n_seconds)])
    kept = [pictures.get(second, b"") for second in range(n_seconds)] if thumbnails else None
    return ReferenceFeatures(features, mask), kept


def _longest_static_s(features: ReferenceFeatures) -> int:
    rows = features.rows.astype(np.float32)
    alike = (rows[1:] * rows[:-1]).sum(axis=1) > STATIC_SIMILARITY
    longest = length = 1
    for is_alike in alike & features.informative[1:] & features.informative[:-1]:
        length = length + 1 if is_alike else 1
        longest = max(longest, length)
    return longest


def _overlaps(
    features: ReferenceFeatures, index: ReferenceIndex, itself: ReferenceId | None
) -> tuple[tuple[ReferenceId, float], ...]:
    """Other references that share many of the informative seconds, and the share; the greatest first.

    Of a long reference a sample is looked for, evenly spread: looking costs as much as encoding.
    """
    ours = features.rows[features.informative].astype(np.float32)
    n_looked = min(len(ours), max(OVERLAP_LEAST, min(OVERLAP_MOST, len(ours) // 10)))
    ours = ours[np.linspace(0, len(ours) - 1, n_looked).round().astype(int)]
    n_found = np.zeros(len(index.references), np.int64)
    for part in np.array_split(ours, len(ours) // 256 + 1):
        hits = index.search(part, OVERLAP_HITS)
        is_alike = (hits.similarity > OVERLAP_SIMILARITY) & (hits.reference >= 0)
        for owners, alike in zip(hits.reference, is_alike, strict=True):
            n_found[np.unique(owners[alike])] += 1
    shares = [(index.references[i].id, float(n_found[i] / len(ours))) for i in np.flatnonzero(n_found)]
    found = [(other, share) for other, share in shares if share >= OVERLAP_SHARE and other != itself]
    return tuple(sorted(found, key=lambda pair: -pair[1]))


def _is_taken(catalog: Catalog, id: ReferenceId) -> bool:
    try:
        catalog.get(id)
    except UnknownReference:
        return False
    except DamagedReference:
        return True
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
        raise MediaError(f"{printable(path.name)} cannot be read: {error.strerror}.") from error


def _file_status(path: Path) -> tuple[int, int]:
    """Size and time of the last change; MediaError for what is no file, before anything waits for it."""
    name = printable(path.name)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise MediaError(f"{name} does not exist; check the path.") from None
    except OSError as error:
        raise MediaError(f"{name} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{name} is not a regular file; name a video file.")
    if status.st_size == 0:
        raise MediaError(f"{name} is empty.")
    return status.st_size, status.st_mtime_ns
