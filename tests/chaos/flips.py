"""One byte of the library changed, anywhere: it is told at open or by verification, or nothing that is read changes."""

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
    """What became of the flipped bytes."""

    n_flips: int = 0
    n_found: int = 0
    n_harmless: int = 0  # free space, or a counter that nobody reads
    by_file: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        numbers = {"flips": self.n_flips, "found": self.n_found, "changed nothing": self.n_harmless}
        return numbers | {"by file": self.by_file, "wrong": len(self.wrong), "examples": self.wrong[:3]}


def flip_bytes(n_flips: int, seed: int) -> Flips:
    """Flips so many bytes, one at a time, a third of them in the catalogue."""
    tally, chance = Flips(), random.Random(seed)
    with place() as home:
        library, trial = home / "library", home / "trial"
        with Catalog.open(library, write=True) as catalog:
            for number, id in enumerate((FILM, NEWS, GAME)):
                put(catalog, id, number)
            catalog.remove(NEWS)  # so that there is free space too
            put(catalog, NEWS, 7)
        whole = state(library)
        catalogue, files = library / "catalog.sqlite", sorted(library.glob("*/*"))
        for _ in range(n_flips):
            path = catalogue if chance.random() < 1 / 3 else chance.choice(files)
            at, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
            shutil.rmtree(trial, ignore_errors=True)
            shutil.copytree(library, trial)
            _flip(trial / path.relative_to(library), at, bit)
            kind = path.suffix.lstrip(".")
            tally.by_file[kind] = tally.by_file.get(kind, 0) + 1
            _judge(trial, whole, f"bit {bit} of byte {at} of {path.name}", tally)
    return tally


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def _judge(library: Path, whole: State, where: str, tally: Flips) -> None:
    tally.n_flips += 1
    wrongly_searched = _searchable(library, whole)
    if wrongly_searched:
        tally.wrong.append(f"{where}: {wrongly_searched} was searched")
        return
    try:
        is_found = not verify(library).is_whole
    except CatalogError:
        is_found = True
    if is_found:
        tally.n_found += 1
    elif state(library) == whole:
        tally.n_harmless += 1
    else:
        tally.wrong.append(f"{where}: not found, and not as before")


def _searchable(library: Path, whole: State) -> str | None:
    """What a monitor that opens the library would search although it is not as it was written."""
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
                if fingerprint_of(reference, features, pictures) != whole.get(reference.id):
                    return reference.id
    except CatalogError:
        pass
    return None
