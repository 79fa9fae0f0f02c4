"""The reference library, with the operations of `copywatch refs`: add, list, show, rm, verify, export, import, reindex.

    library = ReferenceLibrary(Path("/srv/copywatch"))
    for added in library.add([Path("films")], owner="ACME"):
        print(added.path, added.error or added.registration.reference.id)

All guarantees of `copywatch refs` are given here: a result of `add` and `rm` survives a crash at any instant, bad input
is reported and affects nothing else, and running monitors see every change within seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from reference_db.errors import (
    CatalogError,
    DamagedReference,
    EncoderMismatch,
    MediaError,
    NotAReference,
    ReferenceExists,
    StorageError,
    UnknownReference,
)
from reference_db.store.catalog import Catalog, Contents, Reference, ReferenceId, check_id
from reference_db.store.feature_files import (
    MAX_FILE_BYTES,
    StoredFeatures,
    check_header,
    file_chunks,
    file_header,
    read_untrusted,
)
from reference_db.store.references import printable
from reference_db.store.verification import Repair, Verification, repair, verify

if TYPE_CHECKING:
    from reference_db.features.encoder import Encoder
    from reference_db.registration import FindabilityMeter, QualityReport, Registration

EXPORT_SUFFIX = ".copywatch"
MAX_EXPORT_BYTES = MAX_FILE_BYTES
# A file in a folder is a video if it has one of these; a file that is named itself is tried in any case.
VIDEO_SUFFIXES = {
    ".3gp", ".asf", ".avi", ".dv", ".f4v", ".flv", ".gxf", ".ivf", ".m2t", ".m2ts", ".m2v", ".m4v", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".mxf", ".nut", ".obu", ".ogg", ".ogm", ".ogv", ".rm", ".rmvb", ".ts", ".vob",
    ".webm", ".wmv", ".wtv", ".y4m",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AddResult:
    """The result for one file: a registration or an error."""

    path: Path
    registration: Registration | None
    error: CatalogError | None


@dataclass(frozen=True, slots=True)
class FoundVideos:
    """The videos found at some paths."""

    videos: tuple[Path, ...]
    n_skipped: int  # files in folders without a video's suffix
    n_bytes: int
    errors: tuple[tuple[Path, MediaError], ...]  # folders that could not be read


@dataclass(frozen=True, slots=True)
class ReferenceDetails:
    """All about one reference."""

    reference: Reference
    report: QualityReport
    has_thumbnails: bool


@dataclass(frozen=True, slots=True)
class Export:
    """An exported reference, ready to be read."""

    header: bytes  # depends on the reference only
    n_bytes: int  # of all pieces
    pieces: Iterator[bytes]  # header and features


@dataclass(frozen=True, slots=True)
class ReindexResult:
    """The result of `reindex`."""

    n_references: int
    n_seconds: int  # searchable
    damaged: dict[ReferenceId, str]  # not searched, each with its fault


class ReferenceLibrary:
    """The library in a directory. Nothing stays open between two calls."""

    def __init__(
        self,
        data_dir: Path,
        encoder: Path | None = None,
        *,
        threads: int = 1,
        findability: FindabilityMeter | None = None,
    ) -> None:
        """`encoder` is the file of another encoder than the shipped one; `threads` is the number for encoding.

        `findability` measures the shortest copy that is found, for quality reports.
        """
        self.data_dir = data_dir
        self._encoder_path, self._threads, self._findability = encoder, threads, findability

    def add(
        self,
        paths: Iterable[Path] | FoundVideos,
        *,
        id: str | None = None,
        title: str | None = None,
        owner: str = "",
        tags: Mapping[str, str] | None = None,
        thumbnails: bool = True,
        on_file: Callable[[Path], None] | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> Iterator[AddResult]:
        """Registers videos, and those in folders; yields each result as soon as it is durable.

        A known file is not decoded again, so an interrupted run can be repeated and continues. A file that cannot be
        used gives an error and the others are registered. Calls `on_file` before each file, and `progress` with the
        seconds done of it and their total, None if unknown. Raises StorageError if the library itself fails (disk,
        permissions, another writer): then every other file would fail too.
        """
        from reference_db.registration import register
        from reference_db.search.index import IndexKeeper

        found = paths if isinstance(paths, FoundVideos) else find_videos(paths)
        videos = found.videos
        if len(videos) > 1 and (id is not None or title is not None):
            raise CatalogError("An id and a title belong to one video; register the files one by one.")
        with Catalog.open(self.data_dir, write=True) as catalog:
            encoder = self._encoder()
            keeper = IndexKeeper(self.data_dir, encoder.encoder_id)  # for all files, so that each adds only itself
            yield from (AddResult(path, None, error) for path, error in found.errors)
            for path in videos:
                if on_file is not None:
                    on_file(path)
                try:
                    done = register(
                        path,
                        catalog,
                        encoder,
                        id=id,
                        title=title,
                        owner=owner,
                        tags=tags,
                        thumbnails=thumbnails,
                        progress=progress,
                        index=keeper.refresh_fully,
                        findability=self._findability,
                    )
                except StorageError:
                    raise
                except CatalogError as error:
                    yield AddResult(path, None, error)
                except MemoryError:
                    yield AddResult(path, None, _too_large(path))
                else:
                    yield AddResult(path, done, None)

    def list(self) -> Contents:
        """The library's content: references, damaged ones, and the generation."""
        with Catalog.open(self.data_dir) as catalog:
            return catalog.contents()

    def n_seconds(self) -> int:
        """The length of all references."""
        return sum(reference.n_seconds for reference in self.list().references)

    def show(self, id: str) -> ReferenceDetails:
        """One reference with its quality report."""
        from reference_db.registration import quality_report

        with Catalog.open(self.data_dir) as catalog:
            reference = catalog.get(ReferenceId(id))
            report = quality_report(reference.id, catalog, self._findability)
            return ReferenceDetails(reference, report, bool(reference.thumbnails_sha256))

    def reports(self, ids: Iterable[str]) -> Iterator[tuple[str, QualityReport | None]]:
        """The quality report of each of these references; None for one that is damaged or gone."""
        from reference_db.registration import quality_report
        from reference_db.search.index import IndexKeeper, ReferenceIndex

        indexes: dict[str, ReferenceIndex] = {}  # one of each encoder: loading takes longer than searching
        with Catalog.open(self.data_dir) as catalog:

            def index(encoder_id: str) -> ReferenceIndex:
                if encoder_id not in indexes:
                    indexes[encoder_id] = IndexKeeper(self.data_dir, encoder_id).refresh()
                return indexes[encoder_id]

            for id in ids:
                try:
                    yield id, quality_report(ReferenceId(id), catalog, self._findability, index)
                except (DamagedReference, UnknownReference):
                    yield id, None

    def rm(self, id: str) -> None:
        """Removes a reference with its files; its open alerts end. UnknownReference if there is none."""
        with Catalog.open(self.data_dir, write=True) as catalog:
            catalog.remove(ReferenceId(id))

    def verify(self, *, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Reads every byte and reports damage; a damaged reference is not searched until it is repaired."""
        return verify(self.data_dir, progress=progress)

    def repair(self) -> Repair:
        """Rebuilds a damaged catalogue from its valid rows and from the feature files."""
        return repair(self.data_dir)

    def reindex(self) -> ReindexResult:
        """Rebuilds the index from the features. Never necessary: a damaged index is rebuilt automatically."""
        from reference_db.search.index import IndexKeeper

        index = IndexKeeper(self.data_dir, self._encoder_id()).reindex()
        return ReindexResult(len(index.references), len(index), dict(index.damaged))

    def export(self, id: str, to: Path | None = None) -> Path:
        """Writes the reference to a file and returns its path; it has features only, no pictures.

        `to` is a new file or a folder; by default ID.copywatch in the current folder.
        """
        exported = self.open_export(id)
        target = to or Path()
        if target.is_dir():
            target = target / f"{id}{EXPORT_SUFFIX}"
        try:
            with target.open("xb") as file:
                file.writelines(exported.pieces)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise CatalogError(f"{target} exists already; choose another name or remove it.") from None
        except OSError as error:
            target.unlink(missing_ok=True)
            raise CatalogError(f"{target} cannot be written: {error.strerror}.") from error
        return target

    def open_export(self, id: str, header: bytes | None = None) -> Export:
        """The content of the file that `export` writes, read from disk piece by piece.

        `header` is that of an earlier export of the same version of the reference: then the features are neither
        verified nor hashed again, and it begins at once.
        """
        with Catalog.open(self.data_dir) as catalog:
            reference = catalog.get(ReferenceId(id))
            if header is None:
                features = catalog.exact_features(reference)
                header = file_header(replace(reference, thumbnails_sha256=""), features)
            else:
                features = catalog.open_features(reference)
        n_bytes = len(header) + features.layout.n_bytes - features.layout.rows_at
        return Export(header, n_bytes, file_chunks(header, features))

    def import_(self, path: Path, *, id: str | None = None) -> Registration:
        """The exported reference, durable in this library; `id` gives it another id than it had.

        The file is checked and stored piece by piece.

        Raises NotAReference for a file that is not a valid export, EncoderMismatch if another encoder made it,
        ReferenceExists for an id of another video. A reference that was registered here from the video itself is more
        trustworthy than an import, and stays.
        """
        try:
            return self._import(path, id)
        except MemoryError:
            raise _too_large(path) from None

    def _import(self, path: Path, id: str | None) -> Registration:
        from reference_db.registration import Registration, assess_quality
        from reference_db.search.index import ReferenceIndex

        reference, features = read_export(path)
        encoder_id = self._encoder_id()
        if reference.encoder_id != encoder_id:
            raise EncoderMismatch(
                f"{printable(path.name)} was made by the encoder {reference.encoder_id}, this library needs "
                f"{encoder_id}; ask its owner to run `copywatch refs add FILE` and `copywatch refs export` with it."
            )
        with Catalog.open(self.data_dir, write=True) as catalog:
            known = catalog.by_content(reference.content_sha256)
            is_current = known and known.encoder_id == encoder_id and not catalog.is_quarantined(known.id)
            if known is not None and is_current:
                return Registration(known, "already there", None)
            wanted = known.id if known is not None else check_id(id or reference.id)
            reference = replace(reference, id=wanted, added_at=datetime.now(UTC), thumbnails_sha256="", imported=True)
            try:
                index = ReferenceIndex.build(catalog, encoder_id)
            except EncoderMismatch:
                index = None
            report = assess_quality(features, index, itself=wanted, findability=self._findability)
            if known is not None:
                return Registration(catalog.replace(reference, features), "replaced", report)
            try:
                return Registration(catalog.add(reference, features), "added", report)
            except ReferenceExists:
                raise ReferenceExists(f"Another video has the id {wanted}; import with another `--id`.") from None

    def _encoder_id(self) -> str:
        from reference_db.features.encoder_weights import read_weights

        return read_weights(self._encoder_path).encoder_id

    def _encoder(self) -> Encoder:
        from reference_db.features.encoder import load_encoder

        return load_encoder(self._encoder_path, threads=self._threads)


def read_export(path: Path) -> tuple[Reference, StoredFeatures]:
    """The reference and features of an exported file, fully checked piece by piece; raises NotAReference."""
    with _naming_file(path):
        return read_untrusted(path)


def check_export(path: Path) -> Reference:
    """The reference that an exported file describes; only its header is checked. Raises NotAReference."""
    with _naming_file(path):
        return check_header(path)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Makes errors sentences about this file."""
    name = printable(path.name)
    try:
        yield
    except OSError as error:
        raise NotAReference(f"{name} cannot be read: {error.strerror}.") from error
    except NotAReference as error:
        raise NotAReference(f"{name} {error}.") from error


def _too_large(path: Path) -> MediaError:
    return MediaError(
        f"{printable(path.name)} needs more memory than a registration may use; register it in parts, or raise "
        "registration.memory_bytes."
    )


def find_videos(paths: Iterable[Path]) -> FoundVideos:
    """The files among the paths, and the videos in the folders among them, recursively; each once, sorted by folder."""
    videos: dict[Path, int] = {}
    n_skipped = 0
    errors: list[tuple[Path, MediaError]] = []

    def on_error(error: OSError) -> None:
        message = f"{printable(str(error.filename))} cannot be read: {error.strerror}."
        errors.append((Path(error.filename), MediaError(message)))

    for path in paths:
        if not path.is_dir():
            videos.setdefault(path, _size(path))
            continue
        for folder, folders, names in os.walk(path, onerror=on_error):
            folders.sort()
            for name in sorted(names):
                if Path(name).suffix.lower() in VIDEO_SUFFIXES and not name.startswith("."):
                    videos.setdefault(Path(folder, name), _size(Path(folder, name)))
                else:
                    n_skipped += 1
    return FoundVideos(tuple(videos), n_skipped, sum(videos.values()), tuple(errors))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # registering it reports the reason
