"""Verification: checks every byte of the library against its hash, and rebuilds a damaged catalogue from feature files.

Input: a library. Output: a report of its damage. A reference with damaged features goes into quarantine, so that no
monitor searches it, and leaves it when its file is valid again; one that has only lost its thumbnails is still
searched. Nothing is ever removed here.
"""

import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reference_db.errors import CatalogLocked, DamagedReference, NotAReference, StorageError, UnknownReference
from reference_db.store.catalog import Catalog, Contents, Reference, ReferenceId, length_fault
from reference_db.store.feature_files import StoredFeatures, read_untrusted
from reference_db.store.tables import RecoveredCatalog

logger = logging.getLogger(__name__)

MAX_GUESSES = 20_000  # sets of files tried to find the one that matches the checksum


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`."""

    n_references: int
    n_bytes: int  # read
    damaged: dict[ReferenceId, str]  # not searched, each with its fault
    without_thumbnails: dict[ReferenceId, str]  # searched, but without pictures
    problems: tuple[str, ...]  # of the library as a whole
    released: tuple[ReferenceId, ...] = ()  # from quarantine, since their files are valid again

    @property
    def is_whole(self) -> bool:
        return not (self.damaged or self.without_thumbnails or self.problems)


@dataclass(frozen=True, slots=True)
class Repair:
    """The result of `repair`."""

    restored: tuple[ReferenceId, ...]  # whose rows were missing or damaged
    is_certain: bool  # False if one of them may have been removed before the damage
    n_lost: int | None  # references without a file; None if unknown
    backup: Path  # the old catalogue


@dataclass(slots=True)
class _Examination:
    """Reads files and collects their faults."""

    catalog: Catalog
    n_bytes: int = 0
    damaged: dict[ReferenceId, str] = field(default_factory=dict)
    without_thumbnails: dict[ReferenceId, str] = field(default_factory=dict)

    def push(self, reference: Reference) -> None:
        """Reads the reference's files completely."""
        path = self.catalog.features_path(reference)
        fault = length_fault(reference) or self._fault(path, reference.features_sha256, "feature file")
        if fault := fault or _format_fault(path):
            self.damaged[reference.id] = fault
        if reference.thumbnails_sha256:
            path = self.catalog.thumbnails_path(reference)
            if fault := self._fault(path, reference.thumbnails_sha256, "thumbnail file"):
                self.without_thumbnails[reference.id] = fault

    def _fault(self, path: Path, sha256: str, name: str) -> str | None:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                self.n_bytes += file.tell()
        except OSError as error:
            return f"its {name} cannot be read ({error.strerror})"
        return None if found == sha256 else f"its {name} has changed on disk"


def _format_fault(path: Path) -> str | None:
    """The fault of a file that has its hash and nevertheless is no feature file."""
    try:
        StoredFeatures(path)
    except (NotAReference, OSError):
        return "its feature file has changed on disk"
    return None


def verify(data_dir: Path, *, progress: Callable[[int, int], None] | None = None) -> Verification:
    """Reads all of the library and reports its damage; damaged references go into quarantine.

    Calls `progress` with the number of references read and their total. If another process is changing the library,
    quarantine is left unchanged and the result says so. Raises StorageError if the catalogue itself cannot be read.
    """
    with Catalog.open(data_dir) as catalog:
        contents = catalog.contents()
        examination = _Examination(catalog)
        references = [*contents.references, *_quarantined(catalog, contents)]
        for number, reference in enumerate(references, 1):
            examination.push(reference)
            if progress is not None:
                progress(number, len(references))
        problems = [f"The catalogue is damaged: {fault}." for fault in catalog.integrity_errors()]
        if contents.problem:
            problems.append(f"The catalogue is damaged: {contents.problem}.")
        damaged = {id: what for id, what in contents.damaged.items() if id not in {one.id for one in references}}
    released: tuple[ReferenceId, ...] = ()
    if examination.damaged.keys() != contents.damaged.keys() - damaged.keys():
        try:
            released = _set_quarantine(data_dir, examination.damaged)
        except CatalogLocked:
            problems.append(
                "Another process is changing the library, so quarantine was not updated; verify again later."
            )
    return Verification(
        n_references=len(references) + len(damaged),
        n_bytes=examination.n_bytes,
        damaged=damaged | examination.damaged,
        without_thumbnails=examination.without_thumbnails,
        problems=tuple(problems),
        released=released,
    )


def _quarantined(catalog: Catalog, contents: Contents) -> list[Reference]:
    """The references in quarantine whose rows are valid, so that their files can be checked again."""
    references = []
    for id in contents.damaged:
        try:
            references.append(catalog.get(id))
        except (DamagedReference, UnknownReference):
            continue
    return references


def _set_quarantine(data_dir: Path, suspects: dict[ReferenceId, str]) -> tuple[ReferenceId, ...]:
    """Updates quarantine; the references that leave it. Suspects are read again, since they may have been replaced."""
    with Catalog.open(data_dir, write=True) as catalog:
        contents = catalog.contents()
        quarantined = {reference.id: reference for reference in _quarantined(catalog, contents)}
        known = quarantined | {reference.id: reference for reference in contents.references}
        examination = _Examination(catalog)
        for id in {*suspects, *quarantined} & known.keys():
            examination.push(known[id])
        catalog.quarantine(examination.damaged)
        return tuple(sorted(quarantined.keys() - examination.damaged.keys()))


def repair(data_dir: Path) -> Repair:
    """Rebuilds the catalogue from its valid rows, and from the feature files of the others.

    A file without a row may also be left by an interrupted writer, or belong to a reference that was removed. A valid
    checksum distinguishes them; without it every valid file becomes a reference again, and the result is not certain.
    The old catalogue is stored beside the new one.
    """
    restored: list[Reference] = []
    outcome: list[tuple[bool, int | None]] = []

    def choose(recovered: RecoveredCatalog) -> list[Reference]:
        known = {(reference.id, reference.features_sha256) for reference in recovered.references}
        taken = {reference.id for reference in recovered.references}
        orphans = [one for one in _valid_files(data_dir) if (one.id, one.features_sha256) not in known]
        missing = _missing_references(recovered, orphans)
        if missing is None:
            newest = {one.id: one for one in sorted(orphans, key=lambda one: one.added_at) if one.id not in taken}
            restored.extend(newest.values())
        else:
            restored.extend(missing)
        n_lost = None if recovered.n_missing is None else max(0, recovered.n_missing - len(restored))
        outcome.append((missing is not None, n_lost))
        return [*recovered.references, *restored]

    backup = Catalog.rebuild(data_dir, choose)
    is_certain, n_lost = outcome[0]
    return Repair(tuple(sorted(one.id for one in restored)), is_certain, n_lost, backup)


def _missing_references(recovered: RecoveredCatalog, orphans: Sequence[Reference]) -> list[Reference] | None:
    """The orphans that the checksum proves to be the missing references; None if it proves nothing."""
    if recovered.n_missing is None or recovered.n_missing < 0:
        return None
    for chosen in itertools.islice(itertools.combinations(orphans, recovered.n_missing), MAX_GUESSES):
        if recovered.is_missing(chosen):
            return list(chosen)
    return None


def _valid_files(data_dir: Path) -> list[Reference]:
    """The references of all valid feature files."""
    references = []
    for path in Catalog.open(data_dir).files():
        if path.suffix != ".safetensors":
            continue
        try:
            reference, _ = read_untrusted(path)
        except NotAReference as error:
            logger.warning("%s %s", path.name, error)
            continue
        except OSError as error:  # if the catalogue omitted it, the next writer would remove the file
            raise StorageError(f"{path} cannot be read ({error.strerror}); fix that or move it away first.") from error
        if path == Catalog(data_dir, None).features_path(reference):
            references.append(reference)
    return references
