"""Operations on a library, the state that each leaves, and whether this state is allowed.

`INCORRECT` are operations that break one rule each, to show that the checks detect it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw
import numpy as np

import reference_db.store.catalog as catalog_module
from reference_db.errors import CatalogError
from reference_db.store.catalog import Catalog, Reference, ReferenceFeatures, ReferenceId
from reference_db.store.verification import repair

FILM, NEWS, GAME = ReferenceId("film"), ReferenceId("news"), ReferenceId("game")
N_SECONDS = 10

Ack = Callable[[], None]
Work = Callable[[Path, Ack], None]
State = dict[str, str]  # hash of everything that can be read of each reference


@dataclass(frozen=True)
class Operation:
    """One operation, and the library that it starts with."""

    name: str
    prepare: Callable[[Path], None]
    work: Work


def some_reference(id: ReferenceId, seed: int = 0, n_seconds: int = N_SECONDS) -> Reference:
    when, content = datetime(2026, 3, 1, 12, 0, seed % 60, tzinfo=UTC), f"{seed:064x}"
    return Reference(id, f"Title {seed}", "Owner", {"seed": str(seed)}, content, n_seconds, 0, "enc-1", "", when)


def some_features(seed: int = 0, n_seconds: int = N_SECONDS) -> ReferenceFeatures:
    rows = np.random.default_rng(seed).standard_normal((n_seconds, 512))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return ReferenceFeatures(rows.astype(np.float16), np.ones(n_seconds, np.bool_))


def some_thumbnails(seed: int = 0, n_seconds: int = N_SECONDS) -> list[bytes]:
    return [b"jpeg %d of %d" % (second, seed) for second in range(n_seconds)]


def put(catalog: Catalog, id: ReferenceId, seed: int) -> None:
    catalog.add(some_reference(id, seed), some_features(seed), some_thumbnails(seed))


def nothing(data_dir: Path) -> None:
    """No library at all."""


def two(data_dir: Path) -> None:
    """A library with news and a game."""
    with Catalog.open(data_dir, write=True) as catalog:
        put(catalog, NEWS, 1)
        put(catalog, GAME, 2)


def create(data_dir: Path, ack: Ack) -> None:
    Catalog.open(data_dir, write=True).close()
    ack()


def first(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        put(catalog, FILM, 3)
        ack()


def add(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        put(catalog, FILM, 3)
        ack()


def remove(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        catalog.remove(NEWS)
        ack()


def swap(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        catalog.replace(some_reference(NEWS, 4), some_features(4), some_thumbnails(4))
        ack()


def quarantine(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        catalog.quarantine({NEWS: "its feature file has changed on disk"})
        ack()


def one_damaged(data_dir: Path) -> None:
    """A library with news and a game; the row of the news is damaged."""
    two(data_dir)
    connection = apsw.Connection(str(data_dir / "catalog.sqlite"))
    connection.execute("UPDATE reference SET record = replace(record, 'Owner', 'Thief') WHERE id = 'news'")
    connection.close()


def repair_catalogue(data_dir: Path, ack: Ack) -> None:
    repair(data_dir)
    ack()


OPERATIONS = (
    Operation("create", nothing, create),
    Operation("first", nothing, first),
    Operation("add", two, add),
    Operation("remove", two, remove),
    Operation("replace", two, swap),
    Operation("quarantine", two, quarantine),
    Operation("repair", one_damaged, repair_catalogue),
)


def _acknowledged_too_early(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        ack()
        put(catalog, FILM, 3)


def _row_before_files(data_dir: Path, ack: Ack) -> None:
    monkey: Any = catalog_module
    write, change, late = monkey.write_pieces, Catalog._change_rows, list[tuple[Any, ...]]()

    def change_first(self: Catalog, **rows: Any) -> None:
        change(self, **rows)
        for arguments in late:
            write(*arguments)

    monkey.write_pieces = lambda *arguments: late.append(arguments)
    Catalog._change_rows = change_first  # type: ignore[method-assign]
    add(data_dir, ack)


def _files_removed_before_row(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        catalog._remove_files(catalog._row(NEWS), keep=None)
        catalog.remove(NEWS)
        ack()


def _replaced_in_two_steps(data_dir: Path, ack: Ack) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        catalog.remove(NEWS)
        put(catalog, NEWS, 4)
        ack()


INCORRECT = (
    Operation("acknowledged before it is committed", two, _acknowledged_too_early),
    Operation("row before files", two, _row_before_files),
    Operation("files removed before their row", two, _files_removed_before_row),
    Operation("replaced in two steps", two, _replaced_in_two_steps),
)


# --- resulting state -------------------------------------------------------------------------------------------------


def state(data_dir: Path) -> State:
    """What a reader finds: every reference, with all bytes of its features and thumbnails."""
    with Catalog.open(data_dir) as catalog:
        contents = catalog.contents()
        if contents.problem:
            raise AssertionError(f"catalogue: {contents.problem}")
        found: State = {id: f"damaged: {what}" for id, what in contents.damaged.items()}
        for reference in contents.references:
            features = catalog.features(reference.id)
            pictures = [catalog.thumbnail(reference.id, second) for second in range(reference.n_seconds)]
            found[reference.id] = fingerprint_of(reference, features, pictures)
        faults = catalog.integrity_errors()
        if faults:
            raise AssertionError(f"SQLite finds {faults[0]}")
    return found


def fingerprint_of(reference: Reference, features: ReferenceFeatures, pictures: Sequence[bytes | None]) -> str:
    known = (reference, features.rows.tobytes(), features.informative.tobytes(), pictures)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def n_files(data_dir: Path) -> int:
    with Catalog.open(data_dir) as catalog:
        return len(catalog.files())


def check_state(data_dir: Path, allowed: Sequence[State], *, write_more: bool = True) -> State:
    """The state left behind; AssertionError if it is not allowed, or if further writes fail."""
    try:
        left = state(data_dir)
        assert left in allowed, f"left {sorted(left)} of {[sorted(one) for one in allowed]}"
        Catalog.open(data_dir, write=True).close()
        # What a writer wrote to the log just before it died is hidden while a reader holds the log open, and may become
        # visible once none does (`hidden_changes`): later, complete, and never in the other direction.
        seen, left = left, state(data_dir)
        assert left in allowed[allowed.index(seen) :], "the next writer changed existing references"
        assert n_files(data_dir) == 2 * len(left), f"{n_files(data_dir)} files of {len(left)} references"
        if write_more:
            with Catalog.open(data_dir, write=True) as catalog:
                put(catalog, ReferenceId("after"), 9)
                catalog.remove(ReferenceId("after"))
            assert state(data_dir) == left, "later writes changed existing references"
    except CatalogError as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    return left
