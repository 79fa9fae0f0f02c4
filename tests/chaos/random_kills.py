"""Writers of the library that are killed at random moments, while a reader checks what it sees."""

import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from reference_db.errors import CatalogError, UnknownReference
from reference_db.store.catalog import Catalog, ReferenceId
from tests.chaos.operations import (
    State,
    check_state,
    n_files,
    put,
    some_features,
    some_reference,
    some_thumbnails,
    state,
)
from tests.chaos.storage import Tally, place


def random_kills(n_kills: int, seed: int) -> Tally:
    """Kills a writer that adds, replaces and removes without a pause, at random moments, while a reader checks."""
    tally, chance = Tally(), random.Random(seed)
    with place() as home:
        data_dir = home / "library"
        Catalog.open(data_dir, write=True).close()
        expected: dict[str, int] = {}
        with _reader(data_dir) as problems:
            for _ in range(n_kills):
                tally.n_trials += 1
                expected = _one_random_kill(data_dir, expected, chance, tally)
        tally.failures += problems
    return tally


def _one_random_kill(data_dir: Path, expected: dict[str, int], chance: random.Random, tally: Tally) -> dict[str, int]:
    """Runs a writer for a moment and kills it; returns the references (by seed) that are left."""
    ours, theirs = socket.socketpair()
    seed, delay_s = chance.randrange(1 << 30), chance.uniform(0, 0.03)
    child = os.fork()
    if not child:
        try:
            _write_forever(data_dir, dict(expected), random.Random(seed), theirs)
        finally:
            os._exit(0)
    theirs.close()
    first = ours.recv(1)  # the library is open
    time.sleep(delay_s)  # the kill at a random moment is the test
    os.kill(child, signal.SIGKILL)
    lines = (first + b"".join(iter(lambda: ours.recv(65536), b""))).decode().splitlines()
    os.waitpid(child, 0)
    ours.close()
    tally.n_hit += 1
    n_before = n_files(data_dir)
    steps = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    done = [step["library"] for step in steps if step["done"]]
    doing = [step["library"] for step in steps if not step["done"]]
    tally.n_acknowledged += len(done)
    sure = done[-1] if done else expected
    possible = [sure, *doing[len(done) :]]
    try:
        left = check_state(data_dir, [_state_of(library) for library in possible], write_more=False)
    except AssertionError as failure:
        tally.failures.append(f"random kill: {failure}")
        shutil.rmtree(data_dir)
        return {}
    tally.n_garbage += n_before > 2 * len(left)
    return next(library for library in possible if _state_of(library) == left)


def _write_forever(data_dir: Path, library: dict[str, int], chance: random.Random, reports: socket.socket) -> None:
    with Catalog.open(data_dir, write=True) as catalog:
        reports.send(b"\n")
        for _ in range(1000):
            id, seed = ReferenceId(f"ref-{chance.randrange(6)}"), chance.randrange(1, 1000)
            wanted = dict(library)
            is_removal = id in library and chance.random() < 0.5
            if is_removal:
                del wanted[id]
            else:
                wanted[id] = seed
            reports.send(json.dumps({"done": False, "library": wanted}).encode() + b"\n")
            if is_removal:
                catalog.remove(id)
            elif id in library:
                catalog.replace(some_reference(id, seed), some_features(seed), some_thumbnails(seed))
            else:
                put(catalog, id, seed)
            library = wanted
            reports.send(json.dumps({"done": True, "library": library}).encode() + b"\n")


_states: dict[tuple[str, int], str] = {}


def _state_of(library: Mapping[str, int]) -> State:
    """The `state` of a library with these references."""
    for id, seed in library.items():
        if (id, seed) not in _states:
            with place() as home:
                with Catalog.open(home / "one", write=True) as catalog:
                    put(catalog, ReferenceId(id), seed)
                _states[id, seed] = state(home / "one")[id]
    return {id: _states[id, seed] for id, seed in library.items()}


@contextmanager
def _reader(data_dir: Path) -> Iterator[list[str]]:
    """A process that reads the whole library in a loop; the problems that it found, once it has ended."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        try:
            _read_forever(data_dir, theirs)
        finally:
            os._exit(0)
    theirs.close()
    problems: list[str] = []
    try:
        yield problems
    finally:
        os.kill(child, signal.SIGTERM)
        lines = b"".join(iter(lambda: ours.recv(65536), b"")).decode().splitlines()
        os.waitpid(child, 0)
        ours.close()
        problems += lines[:5]


def _read_forever(data_dir: Path, reports: socket.socket) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while True:
        try:
            with Catalog.open(data_dir) as catalog:
                contents = catalog.contents()
                if contents.problem or contents.damaged:
                    reports.send(f"a reader found {contents.problem} {contents.damaged}\n".encode())
                for reference in contents.references:
                    try:
                        catalog.features(reference.id)
                    except UnknownReference:
                        continue  # removed in the meantime
        except CatalogError as error:
            reports.send(f"a reader got: {error}\n".encode())
        time.sleep(0.002)  # leaves CPU to the writer
