"""Registration: one video file becomes one reference, with a report on how well it can be recognised.

A child process decodes while this one encodes the pictures it has sent. The same file registered twice is one
reference; a video without an informative second, or that ends early, is refused.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from reference_db.errors import (
    DamagedReference,
    EncoderMismatch,
    MediaError,
    ReferenceExists,
    UnknownReference,
)
from reference_db.features.picture_detail import is_informative
from reference_db.media.decoding import DecodingChild
from reference_db.media.frames import STILLS_PER_S, Frame
from reference_db.media.jpeg import encode_jpeg
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import FEATURE_SIZE, Catalog, Reference, ReferenceFeatures, ReferenceId, check_id
from reference_db.store.picture_spool import PictureSpool
from reference_db.store.references import BLOCK_ROWS, MAX_SECONDS, Features, check_texts, printable

if TYPE_CHECKING:
    from reference_db.features.encoder import Encoder

BATCH = 8  # pictures encoded at a time, while the decoder works on the next ones
THUMBNAIL_QUALITY = 70
STATIC_SIMILARITY = 0.98  # a second this similar to the previous one shows nothing new
OVERLAP_SIMILARITY = 0.8  # a second this similar to one of another reference may be the same scene
OVERLAP_HITS = 16  # reference seconds found for each second
MIN_OVERLAP_S, MAX_OVERLAP_S = 60, 300  # seconds of a reference that are searched in others: a tenth, within these
# A video with more seconds without a picture than both is refused. Slides and recordings of a screen have holes too,
# but they cost little while they are short.
MAX_HOLES_S, MAX_HOLES_SHARE = 600, 0.5
COMPLETE_SHARE, COMPLETE_SLACK_S = 0.9, 2.0  # of the stated duration; a file with less is truncated
# From these on, a warning.
UNINFORMATIVE_SHARE, STATIC_S, OVERLAP_SHARE, REPEATED_SHARE, STILL_SHARE = 0.5, 30, 0.1, 0.3, 0.5
SHORT_S = 8  # below this, a warning: edited copies of so few seconds are easily missed
RUN_S = 6  # seconds in a row that must return elsewhere in the reference to count as repeated
REPEAT_SIMILARITY = 0.8  # mean over such a run
STILL_LAGS_S, STILL_SIMILARITY = (3, 6), 0.6  # a second this similar to those before and after shows nothing new
MAX_RUNS = 60  # of them that are compared with the rest of the reference


@dataclass(frozen=True, slots=True)
class Findability:
    """How long a copy must be to be found: clean pieces of the reference were matched with it."""

    shortest_s: int | None  # from which on a copy is found, wherever it is taken from; None if none is found
    longest_tried_s: int
    n_places: int  # that pieces were taken from
    n_not_found: int  # of them, at any length that was tried; they do not count for `shortest_s`


FindabilityMeter = Callable[[Features], Findability]  # matching belongs to the monitor, which supplies it


@dataclass(frozen=True, slots=True)
class QualityReport:
    """How well a reference can be recognised and distinguished from the others."""

    n_seconds: int
    uninformative_share: float  # of its seconds: black, flat or missing
    longest_static_s: int  # of one unchanging picture
    still_share: float  # of its informative seconds: they look like those some seconds before and after
    repeated_share: float  # of its runs of RUN_S seconds: they return at another time of the reference
    shortest_findable_s: int | None  # of a clean copy; None if none is found, or if it was not measured
    overlaps: tuple[tuple[ReferenceId, float], ...]  # other references and the share of its seconds found in them
    warnings: tuple[str, ...]  # sentences


@dataclass(frozen=True, slots=True)
class Registration:
    """The result of registering a file."""

    reference: Reference
    outcome: Literal["added", "already there", "replaced"]  # replaced: its features were damaged, imported or outdated
    report: QualityReport | None  # None for one that was already there; see `quality_report`

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
    findability: FindabilityMeter | None = None,
) -> Registration:
    """The file as a reference, durable in the catalogue; the known one if its content is registered already.

    A known reference is encoded again and replaced atomically if its features are damaged, imported or of another
    encoder; its id, title, owner and tags stay unless others are given. Calls `progress` with the seconds done and
    their total, None if the file does not state it. `index` returns the index to search for overlaps; without it one
    is built. Without `findability` the report does not state the shortest copy that is found. Raises MediaError for a
    file that cannot be used, ReferenceExists for an id of another video.
    """
    wanted_id = None if id is None else check_id(id)
    check_texts(title or "", owner, tags or {})
    status = _file_status(path)
    content_sha256 = _sha256(path)
    known = catalog.by_content(content_sha256)
    if known is not None and _is_current(known, catalog, encoder):
        return Registration(known, "already there", None)
    if known is None and wanted_id is not None:
        _check_free(catalog, wanted_id)
    spool = PictureSpool(catalog.data_dir) if thumbnails else None
    features = _decode(path, encoder, spool, progress)
    if _file_status(path) != status:
        raise MediaError(f"{printable(path.name)} changed while it was read; register it again when it is finished.")
    base = known or _new_reference(wanted_id or _free_id(catalog, path.stem), path, content_sha256)
    reference = replace(
        base,
        title=base.title if title is None else title,
        owner=owner or base.owner,
        tags=dict(tags or base.tags),
        n_seconds=len(features.rows),
        n_uninformative=int((~features.informative).sum()),
        encoder_id=encoder.encoder_id,
        imported=False,
    )
    compared = _index(catalog, encoder.encoder_id, index)
    report = assess_quality(features, compared, itself=reference.id, findability=findability)
    if known is not None:
        return Registration(catalog.replace(reference, features, spool), "replaced", report)
    return Registration(catalog.add(reference, features, spool), "added", report)


def _decode(
    path: Path, encoder: Encoder, spool: PictureSpool | None, progress: Callable[[int, int | None], None] | None
) -> ReferenceFeatures:
    """The features of a complete video, its thumbnails in the spool; the decoder works ahead of the encoder."""
    name = printable(path.name)
    on_still = None if spool is None else partial(_put_thumbnail, spool, name)
    with DecodingChild(str(path), on_still=on_still) as child:
        duration_s = child.info().duration_s
        total = None if duration_s is None else math.ceil(duration_s)
        features = _encode(_within_limit(child.frames(), name), name, encoder, total, progress)
    if spool is not None:
        spool.extend(STILLS_PER_S * len(features.rows))
    _check_complete(path, features, duration_s)
    return features


def _new_reference(id: ReferenceId, path: Path, content_sha256: str) -> Reference:
    """A reference with the defaults of its file; the features' fields are set later."""
    return Reference(
        id=id,
        title=printable(path.stem),
        owner="",
        tags={},
        content_sha256=content_sha256,
        n_seconds=0,
        n_uninformative=0,
        encoder_id="",
        features_sha256="",
        added_at=datetime.now(UTC),
    )


def quality_report(
    id: ReferenceId,
    catalog: Catalog,
    findability: FindabilityMeter | None = None,
    index: Callable[[str], ReferenceIndex] | None = None,
) -> QualityReport:
    """The quality of a reference of the catalogue, compared with the others there.

    `index` returns the index of an encoder's references; without it one is built.
    """
    encoder_id = catalog.get(id).encoder_id
    found = _index(catalog, encoder_id, None if index is None else lambda: index(encoder_id))
    return assess_quality(catalog.stored_features(id), found, itself=id, findability=findability)


def assess_quality(
    features: Features,
    index: ReferenceIndex | None,
    itself: ReferenceId | None = None,
    findability: FindabilityMeter | None = None,
) -> QualityReport:
    """The quality of these features, compared with the references in the index; None if they cannot be compared."""
    overlaps = () if index is None else _overlaps(features, index, itself)
    measured = None if findability is None else findability(features)
    is_still = _is_still(features)
    report = QualityReport(
        n_seconds=len(features.rows),
        uninformative_share=1 - float(features.informative.mean()),
        longest_static_s=_longest_static_s(features),
        still_share=float(is_still[features.informative].mean()),
        repeated_share=_repeated_share(features, is_still),
        shortest_findable_s=None if measured is None else measured.shortest_s,
        overlaps=overlaps,
        warnings=(),
    )
    warnings = [*_overlap_warnings(index, overlaps), *_own_warnings(report), *_findability_warnings(measured)]
    return replace(report, warnings=tuple(warnings))


def _overlap_warnings(index: ReferenceIndex | None, overlaps: tuple[tuple[ReferenceId, float], ...]) -> Iterator[str]:
    if index is None:
        yield "Overlaps were not searched: another encoder made the features of some references."
    for other, fault in index.damaged.items() if index is not None else ():
        yield f"Reference {other} is damaged and was not compared: {fault}."
    for other, share in overlaps:
        yield f"{share:.0%} of its seconds look like {other}; a copy of one may raise alerts for both."


def _own_warnings(report: QualityReport) -> Iterator[str]:
    """Sentences about the reference itself."""
    if report.uninformative_share >= UNINFORMATIVE_SHARE:
        share = report.uninformative_share
        yield f"{share:.0%} of its seconds are black, flat or missing and cannot be recognised."
    if report.longest_static_s >= STATIC_S:
        static_s = report.longest_static_s
        yield f"One picture stands still for {static_s} s; a copy of that part alone is weak evidence."
    if report.still_share >= STILL_SHARE:
        yield (
            f"It is nearly still: {report.still_share:.0%} of its seconds look like those around them. Short copies "
            "may be missed, and an alert may name another time of it."
        )
    if report.repeated_share >= REPEATED_SHARE:
        yield (
            f"It repeats itself: {report.repeated_share:.0%} of it returns at another time. An alert may name any of "
            "these times."
        )
    if report.n_seconds < SHORT_S:
        yield f"It is only {report.n_seconds} s long; copies this short are easily missed."


def _findability_warnings(measured: Findability | None) -> Iterator[str]:
    """Sentences about copies that were not found."""
    if measured is None:
        return
    if measured.shortest_s is None:
        yield f"Even a clean copy of {measured.longest_tried_s} s of it is not found."
        return
    if measured.n_not_found:
        yield (
            f"A clean copy of {measured.longest_tried_s} s was not found at {measured.n_not_found} of "
            f"{measured.n_places} places that were tried."
        )
    if measured.shortest_s >= SHORT_S:
        yield f"Only copies of {measured.shortest_s} s and more are found everywhere in it, even if they are clean."


def _index(catalog: Catalog, encoder_id: str, index: Callable[[], ReferenceIndex] | None) -> ReferenceIndex | None:
    try:
        return index() if index is not None else ReferenceIndex.build(catalog, encoder_id)
    except EncoderMismatch:
        return None


def _is_current(known: Reference, catalog: Catalog, encoder: Encoder) -> bool:
    return known.encoder_id == encoder.encoder_id and not known.imported and not catalog.is_quarantined(known.id)


def _check_complete(path: Path, features: ReferenceFeatures, duration_s: float | None) -> None:
    name, n_seconds = printable(path.name), len(features.rows)
    if duration_s is not None and n_seconds < COMPLETE_SHARE * duration_s - COMPLETE_SLACK_S:
        raise MediaError(f"{name} ends after {n_seconds} of {duration_s:.0f} s; it is damaged or truncated.")
    if not features.informative.any():
        raise MediaError(f"{name} has only black or flat pictures; it could never be recognised.")


def safe_id(stem: str) -> ReferenceId:
    """A file's stem as a valid id: never empty, short enough to append a number."""
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:120]
    return check_id(name or "reference")


def _within_limit(frames: Iterator[Frame], name: str) -> Iterator[Frame]:
    """The frames; MediaError at the first one beyond the greatest length, however few there are before it."""
    for frame in frames:
        _check_second(frame.second, name)
        yield frame


def _put_thumbnail(spool: PictureSpool, name: str, number: int, still: NDArray[np.uint8]) -> None:
    _check_second(number // STILLS_PER_S, name)
    spool.put(number, encode_jpeg(still, quality=THUMBNAIL_QUALITY))


def _check_second(second: int, name: str) -> None:
    if second >= MAX_SECONDS:
        raise MediaError(
            f"{name} has a picture at second {second}; a reference may last {MAX_SECONDS // 3600} hours at "
            "most. If it is not that long, its time stamps are damaged."
        )


def _check_holes(n_seconds: int, n_pictures: int, name: str) -> None:
    """Raises MediaError for a video that is mostly holes: a few pictures whose time stamps are hours apart."""
    n_missing = n_seconds - n_pictures
    if n_missing > MAX_HOLES_S and n_missing > MAX_HOLES_SHARE * n_seconds:
        raise MediaError(
            f"{name} has a picture in only {n_pictures} of its {n_seconds} seconds; its time stamps are damaged."
        )


def _encode(
    frames: Iterator[Frame],
    name: str,
    encoder: Encoder,
    total: int | None,
    progress: Callable[[int, int | None], None] | None,
) -> ReferenceFeatures:
    """Features by second; a second without a frame has zeros."""
    rows: dict[int, NDArray[np.float16]] = {}
    informative: set[int] = set()
    while batch := list(islice(frames, BATCH)):
        encoded = encoder.encode([frame.picture for frame in batch])
        rows |= {frame.second: row for frame, row in zip(batch, encoded.astype(np.float16), strict=True)}
        informative |= {frame.second for frame in batch if is_informative(frame.picture)}
        if progress is not None:
            progress(batch[-1].second + 1, total)
    n_seconds = max(rows) + 1
    _check_holes(n_seconds, len(rows), name)
    features = np.zeros((n_seconds, FEATURE_SIZE), np.float16)
    for second, row in rows.items():
        features[second] = row
    mask = np.array([second in informative for second in range(n_seconds)])
    return ReferenceFeatures(features, mask)


def _longest_static_s(features: Features) -> int:
    n_seconds = len(features.rows)
    static = np.zeros(n_seconds + 1, np.bool_)  # like the second before; the last entry ends a run
    for start in range(1, n_seconds, BLOCK_ROWS):
        rows = features.rows[start - 1 : start + BLOCK_ROWS].astype(np.float32)
        static[start : start + len(rows) - 1] = np.einsum("ij,ij->i", rows[1:], rows[:-1]) > STATIC_SIMILARITY
    static[1:n_seconds] &= features.informative[1:] & features.informative[:-1]
    starts = np.flatnonzero(~static)  # each second that differs from the one before starts a run
    return int(np.diff(starts).max(initial=1))


def _is_still(features: Features) -> NDArray[np.bool_]:
    """For each second, whether it looks like those some seconds before and after it."""
    n_seconds = len(features.rows)
    total, n_compared = np.zeros(n_seconds), np.zeros(n_seconds)
    for lag in (lag for lag in STILL_LAGS_S if lag < n_seconds):
        both = features.informative[lag:] & features.informative[:-lag]
        similarity = np.where(both, _similarity_at(features, lag), 0.0)
        for side in (slice(lag, None), slice(None, -lag)):
            total[side] += similarity
            n_compared[side] += both
    is_still: NDArray[np.bool_] = (n_compared > 0) & (total >= STILL_SIMILARITY * n_compared)
    return is_still


def _similarity_at(features: Features, lag: int) -> NDArray[np.float32]:
    """Similarity of each second to the one `lag` seconds later, [seconds - lag]."""
    parts = []
    for start in range(0, len(features.rows) - lag, BLOCK_ROWS):
        rows = features.rows[start : start + BLOCK_ROWS + lag].astype(np.float32)
        parts.append(np.einsum("ij,ij->i", rows[lag:], rows[:-lag]))
    return np.concatenate(parts)


def _repeated_share(features: Features, is_still: NDArray[np.bool_]) -> float:
    """The share of its runs of RUN_S seconds that return at another time; still runs count as not repeated."""
    n_starts = len(features.rows) - RUN_S + 1
    if n_starts <= RUN_S:
        return 0.0
    starts = np.unique(np.linspace(0, n_starts - 1, MAX_RUNS).round().astype(int)).tolist()
    runs = {
        start: features.rows[start : start + RUN_S].astype(np.float32)
        for start in starts
        if features.informative[start : start + RUN_S].all() and is_still[start : start + RUN_S].mean() < STILL_SHARE
    }
    repeated = set()
    for first in range(0, n_starts, BLOCK_ROWS):
        rows = features.rows[first : first + BLOCK_ROWS + RUN_S - 1].astype(np.float32)
        for start, run in runs.items():
            similarity = rows @ run.T  # [second, second of the run]
            along = np.mean([similarity[k : len(rows) - RUN_S + 1 + k, k] for k in range(RUN_S)], axis=0)
            itself = slice(max(0, start - RUN_S + 1 - first), max(0, start + RUN_S - first))
            along[itself] = 0.0
            if along.max() >= REPEAT_SIMILARITY:
                repeated.add(start)
    return len(repeated) / len(starts)


def _overlaps(
    features: Features, index: ReferenceIndex, itself: ReferenceId | None
) -> tuple[tuple[ReferenceId, float], ...]:
    """Other references that share many of the informative seconds, and the share; the greatest first.

    Of a long reference an evenly spread sample is searched: a search costs as much as encoding.
    """
    seconds = np.flatnonzero(features.informative)
    if not len(seconds):
        return ()
    n_searched = min(len(seconds), max(MIN_OVERLAP_S, min(MAX_OVERLAP_S, len(seconds) // 10)))
    seconds = seconds[np.linspace(0, len(seconds) - 1, n_searched).round().astype(int)]
    ours = np.concatenate([features.rows[at : at + 1] for at in seconds.tolist()]).astype(np.float32)
    n_found = np.zeros(len(index.references), np.int64)
    for rows in np.array_split(ours, len(ours) // 256 + 1):
        hits = index.search(rows, OVERLAP_HITS)
        is_overlap = (hits.similarity > OVERLAP_SIMILARITY) & (hits.reference >= 0)
        for references, overlaps in zip(hits.reference, is_overlap, strict=True):
            n_found[np.unique(references[overlaps])] += 1
    shares = [(index.references[i].id, float(n_found[i] / len(ours))) for i in np.flatnonzero(n_found)]
    found = [(other, share) for other, share in shares if share >= OVERLAP_SHARE and other != itself]
    return tuple(sorted(found, key=lambda pair: -pair[1]))


def _check_free(catalog: Catalog, id: ReferenceId) -> None:
    if _is_taken(catalog, id):
        raise ReferenceExists(f"Another video has the id {id}; choose another id, or remove that one first.")


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
    """Size and time of the last change; MediaError if it is not a regular file, before anything reads from it."""
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
