"""The library of references, in the words of the command line: add, list, show, rm, verify, export, import, reindex.

    library = ReferenceLibrary(Path("/srv/copywatch"))
    for added in library.add([Path("films")], owner="ACME"):
        print(added.path, added.error or added.registration.reference.id)

Every promise of `copywatch refs` is made here: what `add` and `rm` have answered survives a crash at any instant, bad
input is told and touches nothing else, and monitors that run see every change within seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from reference_db.errors import (
    CatalogError,
    EncoderMismatch,
    MediaError,
    NotAReference,
    ReferenceExists,
    StorageError,
)
from reference_db.store.catalog import Catalog, Contents, Reference, ReferenceFeatures, ReferenceId, check_id
from reference_db.store.references import FEATURE_SIZE, MAX_HEADER_BYTES, MAX_SECONDS, pack, printable, unpack
from reference_db.store.verification import Repair, Verification, repair, verify

if TYPE_CHECKING:
    from reference_db.features.encoder import Encoder
    from reference_db.registration import QualityReport, Registration

EXPORT_ENDING = ".copywatch"
MAX_EXPORT_BYTES = MAX_SECONDS * (2 * FEATURE_SIZE + 1) + MAX_HEADER_BYTES
# What a file in a folder is taken for a video by; a file that is named itself is tried whatever it is called.
VIDEO_ENDINGS = {
    ".3gp", ".asf", ".avi", ".dv", ".f4v", ".flv", ".gxf", ".ivf", ".m2t", ".m2ts", ".m2v", ".m4v", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".mxf", ".nut", ".obu", ".ogg", ".ogm", ".ogv", ".rm", ".rmvb", ".ts", ".vob",
    ".webm", ".wmv", ".wtv", ".y4m",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Added:
    """What became of one file: a registration, or the error that says why not."""

    path: Path
    registration: Registration | None
    error: CatalogError | None


@dataclass(frozen=True, slots=True)
class FoundReference:
    """The videos that some paths lead to."""

    videos: tuple[Path, ...]
    n_passed_over: int  # files in folders that are no videos by their names
    n_bytes: int
    errors: tuple[tuple[Path, MediaError], ...]  # folders that could not be looked into


@dataclass(frozen=True, slots=True)
class ReferenceDetails:
    """All about one reference."""

    reference: Reference
    report: QualityReport
    has_thumbnails: bool


@dataclass(frozen=True, slots=True)
class Reindexed:
    """What an index was made of."""

    n_references: int
    n_seconds: int  # that can be found
    damaged: dict[ReferenceId, str]  # left out, each with what is wrong


class ReferenceLibrary:
    """The library in a directory. Nothing is held open between two calls."""

    def __init__(self, data_dir: Path, encoder: Path | None = None, *, threads: int = 1) -> None:
        """`encoder` is the file of another encoder than the shipped one; `threads` are those that encoding uses."""
        self.data_dir = data_dir
        self._encoder_path, self._threads = encoder, threads

    def add(
        self,
        paths: Iterable[Path] | FoundReference,
        *,
        id: str | None = None,
        title: str | None = None,
        owner: str = "",
        tags: Mapping[str, str] | None = None,
        thumbnails: bool = True,
        on_file: Callable[[Path], None] | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> Iterator[Added]:
        """Registers videos, and those in folders; what became of each comes as soon as it is safe on disk.

        A file whose bytes are known is not decoded again, so a run that was broken off goes on when it is started
        anew. A file that cannot be used is told as an error and the rest goes on. `on_file` is told each file before
        it, `progress` the seconds done of it and their total where that is known. Raises StorageError where the
        library itself fails (no disk, no permission, another writer): then no other file would fare better.
        """
        from reference_db.registration import register
        from reference_db.search.index import IndexKeeper

        found = paths if isinstance(paths, FoundReference) else find_videos(paths)
        videos = found.videos
        if len(videos) > 1 and (id is not None or title is not None):
            raise CatalogError("An id and a title name one video; register the files one by one.")
        with Catalog.open(self.data_dir, write=True) as catalog:
            encoder = self._encoder()
            keeper = IndexKeeper(self.data_dir, encoder.encoder_id)  # for all files: only what is new is taken in
            yield from (Added(path, None, error) for path, error in found.errors)
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
                    )
                except StorageError:
                    raise
                except CatalogError as error:
                    yield Added(path, None, error)
                else:
                    yield Added(path, done, None)

    def list(self) -> Contents:
        """What the library holds: the references, the damaged ones apart, and the generation."""
        with Catalog.open(self.data_dir) as catalog:
            return catalog.contents()

    def show(self, id: str) -> ReferenceDetails:
        """One reference, with the report on how well it can be recognised and told from the others."""
        from reference_db.registration import hygiene

        with Catalog.open(self.data_dir) as catalog:
            reference = catalog.get(ReferenceId(id))
            return ReferenceDetails(reference, hygiene(reference.id, catalog), bool(reference.thumbnails_sha256))

    def rm(self, id: str) -> None:
        """Removes a reference with its files; an alert of it that is on air ends. UnknownReference if there is none."""
        with Catalog.open(self.data_dir, write=True) as catalog:
            catalog.remove(ReferenceId(id))

    def verify(self, *, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Reads every byte and says what is wrong; a damaged reference is kept out of search until it is whole."""
        return verify(self.data_dir, progress=progress)

    def repair(self) -> Repair:
        """Makes a damaged catalogue again from its rows that are right and from the feature files."""
        return repair(self.data_dir)

    def reindex(self) -> Reindexed:
        """Makes the index again from the features. It never needs to be done: a damaged index makes itself again."""
        from reference_db.search.index import IndexKeeper

        index = IndexKeeper(self.data_dir, self._encoder().encoder_id).reindex()
        return Reindexed(len(index.references), len(index), dict(index.damaged))

    def export(self, id: str, to: Path | None = None) -> Path:
        """The file that the reference was written to: features only, nobody can see the video in it.

        `to` is a file that is not there yet, or a folder; ID.copywatch in the present one when left out.
        """
        content = self.exported(id)
        target = to or Path()
        if target.is_dir():
            target = target / f"{id}{EXPORT_ENDING}"
        try:
            with target.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise CatalogError(f"{target} is there already; name another file or remove it.") from None
        except OSError as error:
            target.unlink(missing_ok=True)
            raise CatalogError(f"{target} cannot be written: {error.strerror}.") from error
        return target

    def exported(self, id: str) -> bytes:
        """What `export` writes."""
        with Catalog.open(self.data_dir) as catalog:
            reference = catalog.get(ReferenceId(id))
            features = catalog.features(reference.id)
        if reference.n_seconds > MAX_SECONDS:
            raise CatalogError(f"{id} is longer than an export can be: {MAX_SECONDS // 3600} hours.")
        return pack(replace(reference, thumbnails_sha256=""), features)

    def import_(self, path: Path, *, id: str | None = None) -> Registration:
        """The exported reference, safe in this library; `id` gives it another id than it had.

        Raises NotAReference for a file that is no whole export, EncoderMismatch where another encoder made it,
        ReferenceExists for an id that is taken by other content. A reference that was registered here from the video
        itself is better than an import of it, and stays.
        """
        from reference_db.registration import Registration, examine
        from reference_db.search.index import ReferenceIndex

        reference, features = read_export(path)
        encoder_id = self._encoder().encoder_id
        if reference.encoder_id != encoder_id:
            raise EncoderMismatch(
                f"{printable(path.name)} was made by the encoder {reference.encoder_id}, this library needs "
                f"{encoder_id}; let its owner run `copywatch refs add FILE` and `copywatch refs export` with that one."
            )
        with Catalog.open(self.data_dir, write=True) as catalog:
            known = catalog.by_content(reference.content_sha256)
            is_good = known and known.encoder_id == encoder_id and not catalog.is_quarantined(known.id)
            if known is not None and is_good:
                return Registration(known, "already there", None)
            wanted = known.id if known is not None else check_id(id or reference.id)
            reference = replace(reference, id=wanted, added_at=datetime.now(UTC), thumbnails_sha256="", imported=True)
            try:
                index = ReferenceIndex.build(catalog, encoder_id)
            except EncoderMismatch:
                index = None
            report = examine(features, index, itself=wanted)
            if known is not None:
                return Registration(catalog.replace(reference, features), "replaced", report)
            try:
                return Registration(catalog.add(reference, features), "added", report)
            except ReferenceExists:
                raise ReferenceExists(
                    f"The id {wanted} is taken by another video; import it with `--id` and another one."
                ) from None

    def _encoder(self) -> Encoder:
        from reference_db.features.encoder import load_encoder

        return load_encoder(self._encoder_path, threads=self._threads)


def read_export(path: Path) -> tuple[Reference, ReferenceFeatures]:
    """The reference and features in an exported file, believed only as far as they prove themselves."""
    name = printable(path.name)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_EXPORT_BYTES + 1)
    except OSError as error:
        raise NotAReference(f"{name} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_EXPORT_BYTES:
        raise NotAReference(f"{name} is larger than any export of Copywatch.")
    try:
        return unpack(content)
    except NotAReference as error:
        raise NotAReference(f"{name} {error}.") from error


def find_videos(paths: Iterable[Path]) -> FoundReference:
    """The files among the paths, and the videos in the folders among them and below; each once, folders in order."""
    videos: dict[Path, int] = {}
    n_passed_over = 0
    errors: list[tuple[Path, MediaError]] = []

    def cannot_be_read(error: OSError) -> None:
        words = f"{printable(str(error.filename))} cannot be read: {error.strerror}."
        errors.append((Path(error.filename), MediaError(words)))

    for path in paths:
        if not path.is_dir():
            videos.setdefault(path, _size(path))
            continue
        for folder, folders, names in os.walk(path, onerror=cannot_be_read):
            folders.sort()
            for name in sorted(names):
                if Path(name).suffix.lower() in VIDEO_ENDINGS and not name.startswith("."):
                    videos.setdefault(Path(folder, name), _size(Path(folder, name)))
                else:
                    n_passed_over += 1
    return FoundReference(tuple(videos), n_passed_over, sum(videos.values()), tuple(errors))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # registering it will say why
