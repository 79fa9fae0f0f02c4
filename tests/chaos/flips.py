"""One changed byte anywhere in the library: open or verification reports it, or nothing that is read changes."""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference_db.errors import CatalogError
from reference_db.store.catalog import Catalog
from reference_db.store.verification import verify
from tests.chaos.operations import FILM, GAME, NEWS, State, fingerprint_of, put, state
from tests.chaos.storage import place


@dataclass
class Flips:
    """Outcomes of the flipped bytes."""

    n_flips: int = 0
    n_found: int = 0
    n_harmless: int = 0  # free space, or a counter that is never read
    by_file: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        numbers = {"flips": self.n_flips, "found": self.n_found, "harmless": self.n_harmless}
        return numbers | {"by file": self.by_file, "failures": len(self.failures), "examples": self.failures[:3]}


def flip_bytes(n_flips: int, seed: int) -> Flips:
    """Flips `n_flips` bytes, one at a time, a third of them in the catalogue."""
    tally, chance = Flips(), random.Random(seed)
    with place() as home:
        library, trial = home / "library", home / "trial"
        with Catalog.open(library, write=True) as catalog:
            for number, id in enumerate((FILM, NEWS, GAME)):
                put(catalog, id, number)
            catalog.remove(NEWS)  # leaves free space
            put(catalog, NEWS, 7)
        intact = state(library)
        catalogue, files = library / "catalog.sqlite", sorted(library.glob("*/*"))
        for _ in range(n_flips):
            path = catalogue if chance.random() < 1 / 3 else chance.choice(files)
            at, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
            shutil.rmtree(trial, ignore_errors=True)
            shutil.copytree(library, trial)
            _flip(trial / path.relative_to(library), at, bit)
            kind = path.suffix.lstrip(".")
            tally.by_file[kind] = tally.by_file.get(kind, 0) + 1
            _judge(trial, intact, f"bit {bit} of byte {at} of {path.name}", tally)
    return tally


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def _judge(library: Path, intact: State, where: str, tally: Flips) -> None:
    tally.n_flips += 1
    damaged_id = _searchable(library, intact)
    if damaged_id:
        tally.failures.append(f"{where}: {damaged_id} was searched")
        return
    try:
        is_found = not verify(library).is_whole
    except CatalogError:
        is_found = True
    if is_found:
        tally.n_found += 1
    elif state(library) == intact:
        tally.n_harmless += 1
    else:
        tally.failures.append(f"{where}: not reported, and the content changed")


def _searchable(library: Path, intact: State) -> str | None:
    """A reference that a monitor would search although it differs from what was written."""
    try:
        with Catalog.open(library) as catalog:
            for reference in catalog.references():
                try:
                    features = catalog.features(reference.id)
                except CatalogError:
                    continue
                pictures: list[bytes | None] = []
                try:
                    pictures = [catalog.thumbnail(reference.id, second) for second in range(reference.n_seconds)]
                except CatalogError:
                    continue
                if fingerprint_of(reference, features, pictures) != intact.get(reference.id):
                    return reference.id
    except CatalogError:
        pass
    return None
