"""Verification: every byte of the library against its hash, and a damaged catalogue made again from the feature files.

A library goes in, a list of what is wrong comes out. A reference whose features are damaged is put into quarantine,
which every monitor heeds, and comes out of it when its file is right again; one that has only lost its thumbnails is
searched all the same. Nothing is ever removed here.
"""

import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reference_db.errors import CatalogLocked, DamagedReference, NotAReference, StorageError, UnknownReference
from reference_db.store.catalog import Catalog, Contents, Reference, ReferenceId
from reference_db.store.references import unpacked
from reference_db.store.tables import Salvage

logger = logging.getLogger(__name__)

MAX_GUESSES = 20_000  # sets of files tried for the one that fits what the catalogue misses


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found of a library."""

    n_references: int
    n_bytes: int  # read and right
    damaged: dict[ReferenceId, str]  # kept out of every search, each with what is wrong
    without_thumbnails: dict[ReferenceId, str]  # searched, but shown without pictures
    problems: tuple[str, ...]  # of the library as a whole
    released: tuple[ReferenceId, ...] = ()  # from quarantine, since they are whole again

    @property
    def is_whole(self) -> bool:
        return not (self.damaged or self.without_thumbnails or self.problems)


@dataclass(frozen=True, slots=True)
class Repair:
    """What came of making a catalogue again."""

    restored: tuple[ReferenceId, ...]  # whose rows were gone or damaged
    is_certain: bool  # False where one of them may have been removed before the damage
    n_lost: int | None  # references that no file is left of; None where that cannot be known
    kept: Path  # the catalogue as it was


@dataclass(slots=True)
class _Examination:
    """What is found, as it is found."""

    catalog: Catalog
    n_bytes: int = 0
    damaged: dict[ReferenceId, str] = field(default_factory=dict)
    without_thumbnails: dict[ReferenceId, str] = field(default_factory=dict)

    def push(self, reference: Reference) -> None:
        """Reads the reference's files to the last byte."""
        path = self.catalog.features_path(reference)
        features = self._fault(path, reference.features_sha256, "feature file")
        if features:
            self.damaged[reference.id] = features
        if reference.thumbnails_sha256:
            path = self.catalog.thumbnails_path(reference)
            pictures = self._fault(path, reference.thumbnails_sha256, "file of thumbnails")
            if pictures:
                self.without_thumbnails[reference.id] = pictures

    def _fault(self, path: Path, sha256: str, name: str) -> str | None:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                self.n_bytes += file.tell()
        except OSError as error:
            return f"its {name} cannot be read ({error.strerror})"
        return None if found == sha256 else f"its {name} has changed on disk"


def verify(data_dir: Path, *, progress: Callable[[int, int], None] | None = None) -> Verification:
    """Reads all of the library and says what is wrong with it; damaged references go into quarantine.

    `progress` is told how many references were read, of how many. A library that another process is changing is
    examined too, but quarantine has to wait, and the result says so. Raises StorageError where the catalogue itself
    cannot be read.
    """
    with Catalog.open(data_dir) as catalog:
        contents = catalog.contents()
        examination = _Examination(catalog)
        references = [*contents.references, *_quarantined(catalog, contents)]
        for number, reference in enumerate(references, 1):
            examination.push(reference)
            if progress is not None:
                progress(number, len(references))
        problems = [f"The catalogue is damaged: {fault}." for fault in catalog.faults()]
        if contents.problem:
            problems.append(f"The catalogue is damaged: {contents.problem}.")
        damaged = {id: what for id, what in contents.damaged.items() if id not in {one.id for one in references}}
    released: tuple[ReferenceId, ...] = ()
    if examination.damaged.keys() != contents.damaged.keys() - damaged.keys():
        try:
            released = _set_quarantine(data_dir, examination.damaged)
        except CatalogLocked:
            problems.append("Another process is changing the library, so quarantine has to wait; verify again then.")
    return Verification(
        n_references=len(references) + len(damaged),
        n_bytes=examination.n_bytes,
        damaged=damaged | examination.damaged,
        without_thumbnails=examination.without_thumbnails,
        problems=tuple(problems),
        released=released,
    )


def _quarantined(catalog: Catalog, contents: Contents) -> list[Reference]:
    """Those in quarantine whose rows are right, so that their files can be looked at again."""
    references = []
    for id in contents.damaged:
        try:
            references.append(catalog.get(id))
        except (DamagedReference, UnknownReference):
            continue
    return references


def _set_quarantine(data_dir: Path, suspects: dict[ReferenceId, str]) -> tuple[ReferenceId, ...]:
    """Those that come out of quarantine; the suspects are looked at again, since they may have been replaced."""
    with Catalog.open(data_dir, write=True) as catalog:
        contents = catalog.contents()
        held = {reference.id: reference for reference in _quarantined(catalog, contents)}
        known = held | {reference.id: reference for reference in contents.references}
        examination = _Examination(catalog)
        for id in {*suspects, *held} & known.keys():
            examination.push(known[id])
        catalog.quarantine(examination.damaged)
        return tuple(sorted(held.keys() - examination.damaged.keys()))


def repair(data_dir: Path) -> Repair:
    """Makes the catalogue again: from the rows that are right, and from the feature files whose rows are not.

    A file without a row may also be what an interrupted writer left, or belong to a reference that was removed. The
    catalogue's tally tells them apart where it is right; where it is not, every whole file becomes a reference again,
    and the result says that this is not certain. The damaged catalogue is kept beside the new one.
    """
    restored: list[Reference] = []
    outcome: list[tuple[bool, int | None]] = []

    def choose(found: Salvage) -> list[Reference]:
        known = {(reference.id, reference.features_sha256) for reference in found.references}
        taken = {reference.id for reference in found.references}
        loose = [one for one in _intact_files(data_dir) if (one.id, one.features_sha256) not in known]
        fitting = _fitting(found, loose)
        if fitting is None:
            newest = {one.id: one for one in sorted(loose, key=lambda one: one.added_at) if one.id not in taken}
            restored.extend(newest.values())
        else:
            restored.extend(fitting)
        n_lost = None if found.n_missing is None else max(0, found.n_missing - len(restored))
        outcome.append((fitting is not None, n_lost))
        return [*found.references, *restored]

    kept = Catalog.make_again(data_dir, choose)
    is_certain, n_lost = outcome[0]
    return Repair(tuple(sorted(one.id for one in restored)), is_certain, n_lost, kept)


def _fitting(found: Salvage, loose: Sequence[Reference]) -> list[Reference] | None:
    """Those of the loose references that are the missing ones beyond doubt; None where that cannot be told."""
    if found.n_missing is None or found.n_missing < 0:
        return None
    for chosen in itertools.islice(itertools.combinations(loose, found.n_missing), MAX_GUESSES):
        if found.is_missing(chosen):
            return list(chosen)
    return None


def _intact_files(data_dir: Path) -> list[Reference]:
    """The references of all feature files that prove themselves."""
    references = []
    for path in Catalog.open(data_dir).files():
        if path.suffix != ".safetensors":
            continue
        try:
            reference, _ = unpacked(path.read_bytes())
        except NotAReference as error:
            logger.warning("%s %s", path.name, error)
            continue
        except OSError as error:  # a catalogue without it would have the next writer clear it away
            raise StorageError(f"{path} cannot be read ({error.strerror}); mend that or move it away first.") from error
        if path == Catalog(data_dir, None).features_path(reference):
            references.append(reference)
    return references
