"""Kills of writers and disk faults at every system call of the library, and a check of the state that is left.

An operation runs in a forked child under strace: it is killed at its n-th system call of a kind, or that call fails
with a disk error. In every case the library must be in the complete state before or after the operation; after it if
the operation was acknowledged; and the next process must be able to continue.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import apsw

from reference_db.errors import CatalogLocked
from reference_db.store.catalog import Catalog, ReferenceId
from tests.chaos.operations import Operation, State, Work, check_state, create, n_files, put, state

SHARED_MEMORY = Path("/dev/shm")  # a kill loses nothing in memory, which is faster than a disk
TRACED = "%file,%desc"  # all system calls on files
DISK_CALLS = (  # calls that a failing disk fails, and how; open and mkdir may also meet a full table
    *((call, error) for call in ("write", "pwrite64", "ftruncate") for error in ("ENOSPC", "EIO")),
    *((call, error) for call in ("fsync", "fdatasync") for error in ("EIO", "ENOSPC")),
    *((call, error) for call in ("openat", "mkdir") for error in ("ENOSPC", "EROFS", "EMFILE")),
    *((call, error) for call in ("rename", "unlink") for error in ("EIO", "EROFS")),
    *((call, "EIO") for call in ("pread64", "getdents64")),
)


@dataclass
class Tally:
    """Results of one kind of trial."""

    n_trials: int = 0
    n_hit: int = 0  # trials in which the fault occurred
    n_acknowledged: int = 0
    n_garbage: int = 0  # left files for the next writer to delete
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        numbers = {"trials": self.n_trials, "faults": self.n_hit, "acknowledged": self.n_acknowledged}
        return numbers | {"left garbage": self.n_garbage, "failures": len(self.failures), "examples": self.failures[:3]}


# --- one trial -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """What a child reported before it ended, and how it ended."""

    acknowledged: bool
    error: str | None  # type and message of the error that ended it
    killed: bool


@contextmanager
def place() -> Iterator[Path]:
    """A temporary directory for one trial."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="copywatch-chaos-", dir=parent) as folder:
        yield Path(folder)


def in_child(work: Work, data_dir: Path, strace: Sequence[str] = ()) -> Ended:
    """Runs the work in a forked child, under strace if options for it are given."""
    ours, theirs = socket.socketpair()  # replies use sendto, into which no fault is injected
    child = os.fork()
    if not child:
        ours.close()  # so that `recv` ends if the parent fails before it traces the child
        try:
            if theirs.recv(1):
                work(data_dir, lambda: theirs.sendall(b"acknowledged\n"))
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)
    theirs.close()
    tracer = None
    if strace:
        tracer = subprocess.Popen(["strace", "-p", str(child), *strace], stderr=subprocess.PIPE)
        assert tracer.stderr is not None
        line = tracer.stderr.readline()
        if b"attached" not in line:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise RuntimeError(f"strace cannot be used here: {line.decode().strip()}")
    ours.send(b"x")
    lines = b"".join(iter(lambda: ours.recv(65536), b"")).decode().splitlines()
    status = os.waitpid(child, 0)[1]
    ours.close()
    if tracer is not None:
        assert tracer.stderr is not None
        tracer.stderr.read()
        tracer.stderr.close()
        tracer.wait()
    reported = next((line for line in lines if line != "acknowledged"), None)
    return Ended("acknowledged" in lines, reported, os.WIFSIGNALED(status))


@dataclass(frozen=True)
class TracedOperation:
    """An operation with the states before and after it, and its system calls; can be repeated."""

    operation: Operation
    home: Path
    before: State
    after: State
    calls: Counter[str]  # number of each system call in an undisturbed run

    @classmethod
    def build(cls, operation: Operation, home: Path) -> "TracedOperation":
        home.mkdir()
        start, log = home / "start", home / "log"
        operation.prepare(start)
        before = state(start)
        trial = home / "trial"
        if start.exists():
            shutil.copytree(start, trial)
        ended = in_child(operation.work, trial, ["-e", f"trace={TRACED}", "-o", str(log)])
        if not ended.acknowledged or ended.error:
            raise RuntimeError(f"{operation.name} fails without a fault: {ended}")
        calls = Counter(found.group(1) for found in re.finditer(r"^(\w+)\(", log.read_text(), re.M))
        after = state(trial)
        shutil.rmtree(trial)
        return cls(operation, home, before, after, calls)

    def points(self) -> list[tuple[str, int]]:
        """Every system call of the operation: its name and its number among calls of that name."""
        return [(call, n) for call, count in sorted(self.calls.items()) for n in range(1, count + 1)]

    def attempt(self, injection: str, calls: str = "", log: Path = Path("/dev/null")) -> tuple[Path, Ended]:
        """Runs it once with this fault; returns the library that is left, and how the child ended."""
        trial = self.home / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        if (self.home / "start").exists():
            shutil.copytree(self.home / "start", trial)
        call = injection.partition(":")[0]
        return trial, in_child(
            self.operation.work,
            trial,
            ["-y", "-e", f"trace={calls or call}", "-e", f"inject={injection}", "-o", str(log)],
        )


def kill(traced: TracedOperation, call: str, n: int, tally: Tally) -> None:
    """Kills the operation at the n-th of these calls and checks the state that is left."""
    trial, ended = traced.attempt(f"{call}:signal=SIGKILL:when={n}")
    tally.n_trials += 1
    tally.n_hit += ended.killed
    tally.n_acknowledged += ended.acknowledged
    _conclude(traced, trial, ended, f"killed at {call} {n}", tally)


def fail(traced: TracedOperation, call: str, error: str, n: int, lasting: bool, tally: Tally) -> None:
    """Fails the n-th of these calls, or all from it on, and checks the state that is left."""
    trial, ended = traced.attempt(f"{call}:error={error}:when={n}{'+' if lasting else ''}")
    where = f"{call} {n}{' and later' if lasting else ''} fails with {error}"
    tally.n_trials += 1
    tally.n_hit += ended.error is not None
    tally.n_acknowledged += ended.acknowledged
    if ended.killed:
        tally.failures.append(f"{traced.operation.name}, {where}: the child died")
    elif ended.error and not ended.error.startswith("StorageError: "):
        tally.failures.append(f"{traced.operation.name}, {where}: unexpected error: {ended.error}")
    elif not ended.error and not ended.acknowledged:
        tally.failures.append(f"{traced.operation.name}, {where}: neither acknowledged nor refused")
    _conclude(traced, trial, ended, where, tally)


def _conclude(traced: TracedOperation, trial: Path, ended: Ended, where: str, tally: Tally) -> None:
    n_before = n_files(trial)
    try:
        left = check_state(trial, [traced.after] if ended.acknowledged else [traced.before, traced.after])
        tally.n_garbage += n_before > 2 * len(left)
    except AssertionError as failure:
        outcome = "acknowledged" if ended.acknowledged else "not acknowledged"
        tally.failures.append(f"{traced.operation.name}, {where}, {outcome}: {failure}")


# --- many trials -----------------------------------------------------------------------------------------------------


def kill_points(
    operations: Sequence[Operation],
    sample: int | None,
    seed: int,
    say: Callable[[str], object] = str,
    calls: Sequence[str] = (),
) -> Tally:
    """Kills at every system call of every operation, or at a sample of them, or only at calls of these names."""
    tally = Tally()
    with place() as home:
        for number, operation in enumerate(operations):
            traced = TracedOperation.build(operation, home / str(number))
            points = [point for point in traced.points() if not calls or point[0] in calls]
            say(f"  {operation.name}: {len(points)} system calls")
            for call, n in _sample(points, sample, seed + number):
                kill(traced, call, n, tally)
    return tally


def disk_faults(
    operations: Sequence[Operation], sample: int | None, seed: int, say: Callable[[str], object] = str
) -> Tally:
    """Fails every write, sync, rename, open and read of every operation, once and permanently."""
    tally = Tally()
    with place() as home:
        for number, operation in enumerate(operations):
            traced = TracedOperation.build(operation, home / str(number))
            points = [
                (call, error, n, lasting)
                for call, error in DISK_CALLS
                for n in range(1, traced.calls[call] + 1)
                for lasting in (False, True)
            ]
            say(f"  {operation.name}: {len(points)} faults")
            for call, error, n, lasting in _sample(points, sample, seed + number):
                fail(traced, call, error, n, lasting, tally)
    return tally


def writes_after_failed_syncs(operation: Operation) -> dict[int, list[str]]:
    """For each failed sync of the catalogue or its log, by number: the writes to either of them after it.

    SQLite also syncs the directory when it creates a log, and continues if that fails. This is harmless: acknowledged
    data is in the catalogue itself by then, or the directory was synced separately. Those syncs are left out.
    """
    found: dict[int, list[str]] = {}
    with place() as home:
        traced = TracedOperation.build(operation, home / "stage")
        for n in range(1, traced.calls["fdatasync"] + 1):
            log = home / "log"
            traced.attempt(f"fdatasync:error=EIO:when={n}", "fdatasync,pwrite64,ftruncate", log)
            calls = [re.sub(r'"(\\.|[^"\\])*"\.*', "...", line) for line in log.read_text().splitlines()]
            failed = next(at for at, call in enumerate(calls) if "INJECTED" in call)
            if "/catalog.sqlite" in calls[failed]:
                writes = [call for call in calls[failed + 1 :] if re.match(r"(pwrite64|ftruncate)\(", call)]
                found[n] = [
                    call for call in writes if "-shm>" not in call
                ]  # shared memory, which is rebuilt at every start
    return found


def _sample(points: list[Any], sample: int | None, seed: int) -> list[Any]:
    return points if sample is None else random.Random(seed).sample(points, min(sample, len(points)))


def hidden_changes(operation: Operation, with_writer: bool) -> list[tuple[State, State]]:
    """What readers see of changes killed at each of their syncs, before and after a reader closes the log.

    `with_writer` runs a writer in between. The reader's transaction prevents it from resetting the log, which still
    holds an earlier change.
    """
    pairs: list[tuple[State, State]] = []
    with place() as home:
        for n in count(1):
            trial = home / f"trial-{n}"
            operation.prepare(trial)
            reader = apsw.Connection(str(trial / "catalog.sqlite"), flags=apsw.SQLITE_OPEN_READONLY)
            reader.execute("SELECT * FROM library").fetchall()
            if with_writer:
                for change in ("BEGIN", "COMMIT; BEGIN"):  # so the log in between is not reset
                    reader.execute(change)
                    reader.execute("SELECT * FROM library").fetchall()
                    if change == "BEGIN":
                        with Catalog.open(trial, write=True) as catalog:
                            put(catalog, ReferenceId("before"), 8)
            inject = f"inject=fdatasync:signal=SIGKILL:when={n}"
            ended = in_child(operation.work, trial, ["-e", "trace=fdatasync", "-e", inject, "-o", "/dev/null"])
            if with_writer:
                Catalog.open(trial, write=True).close()
            seen = state(trial)
            reader.close()
            pairs.append((seen, state(trial)))
            if not ended.killed:
                return pairs
    raise AssertionError  # `count` has no end


def two_writers() -> str:
    """The error message of the second writer of a directory."""
    with place() as home:
        with Catalog.open(home, write=True):
            ended = in_child(create, home)
        assert ended.error is not None
        assert ended.error.startswith(CatalogLocked.__name__), ended.error
        assert in_child(create, home).acknowledged
        return ended.error.partition(": ")[2]
