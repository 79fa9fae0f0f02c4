"""Writers of the library that die, and disks that fail, at every system call; what is left is held against the promise.

An operation runs in a forked child that strace holds: it is killed on entering its n-th system call of a kind, or that
call fails with an error of the disk. Whatever happens, the library is then as it was before the operation or as it is
after it, whole; after it if that was acknowledged; and the next process works on.
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
from tests.chaos.operations import Operation, State, Work, create, judge, n_files, put, state

SHARED_MEMORY = Path("/dev/shm")  # a kill does not ask for the disk, and memory is faster
TRACED = "%file,%desc"  # what a writer asks of the system about files
DISK_CALLS = (  # those that a failing disk fails, and how; opening and making may also meet a full table
    *((call, error) for call in ("write", "pwrite64", "ftruncate") for error in ("ENOSPC", "EIO")),
    *((call, error) for call in ("fsync", "fdatasync") for error in ("EIO", "ENOSPC")),
    *((call, error) for call in ("openat", "mkdir") for error in ("ENOSPC", "EROFS", "EMFILE")),
    *((call, error) for call in ("rename", "unlink") for error in ("EIO", "EROFS")),
    *((call, "EIO") for call in ("pread64", "getdents64")),
)


@dataclass
class Tally:
    """What came of one kind of trial."""

    n_trials: int = 0
    n_hit: int = 0  # of which the fault really fell
    n_acknowledged: int = 0
    n_garbage: int = 0  # left something for the next writer to clear away
    wrong: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        numbers = {"trials": self.n_trials, "faults": self.n_hit, "acknowledged": self.n_acknowledged}
        return numbers | {"left garbage": self.n_garbage, "wrong": len(self.wrong), "examples": self.wrong[:3]}


# --- one trial -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """What a child told before it ended, and how it did."""

    acknowledged: bool
    complaint: str | None  # the type and words of the error that it ended with
    killed: bool


@contextmanager
def place() -> Iterator[Path]:
    """A directory for one trial."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="copywatch-chaos-", dir=parent) as folder:
        yield Path(folder)


def in_child(work: Work, data_dir: Path, strace: Sequence[str] = ()) -> Ended:
    """Runs the work in a forked child, held by strace with these options if any are given."""
    ours, theirs = socket.socketpair()  # answers go by sendto, which is never made to fail
    child = os.fork()
    if not child:
        try:
            theirs.recv(1)
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
    told = b"".join(iter(lambda: ours.recv(65536), b"")).decode().splitlines()
    status = os.waitpid(child, 0)[1]
    ours.close()
    if tracer is not None:
        assert tracer.stderr is not None
        tracer.stderr.read()
        tracer.stderr.close()
        tracer.wait()
    complaint = next((line for line in told if line != "acknowledged"), None)
    return Ended("acknowledged" in told, complaint, os.WIFSIGNALED(status))


@dataclass(frozen=True)
class Stage:
    """An operation with its library before and after, ready to be tried again and again."""

    operation: Operation
    home: Path
    before: State
    after: State
    calls: Counter[str]  # how often an unbroken run makes each system call

    @classmethod
    def build(cls, operation: Operation, home: Path) -> "Stage":
        home.mkdir()
        start, log = home / "start", home / "log"
        operation.prepare(start)
        before = state(start)
        trial = home / "trial"
        if start.exists():
            shutil.copytree(start, trial)
        ended = in_child(operation.work, trial, ["-e", f"trace={TRACED}", "-o", str(log)])
        if not ended.acknowledged or ended.complaint:
            raise RuntimeError(f"{operation.name} does not work even unbroken: {ended}")
        calls = Counter(found.group(1) for found in re.finditer(r"^(\w+)\(", log.read_text(), re.M))
        after = state(trial)
        shutil.rmtree(trial)
        return cls(operation, home, before, after, calls)

    def points(self) -> list[tuple[str, int]]:
        """Every system call of the operation: its name and which of that name it is."""
        return [(call, n) for call, count in sorted(self.calls.items()) for n in range(1, count + 1)]

    def attempt(self, injection: str, traced: str = "", log: Path = Path("/dev/null")) -> tuple[Path, Ended]:
        """Runs it once with this fault; the library that is left, and what was told."""
        trial = self.home / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        if (self.home / "start").exists():
            shutil.copytree(self.home / "start", trial)
        call = injection.partition(":")[0]
        return trial, in_child(
            self.operation.work,
            trial,
            ["-y", "-e", f"trace={traced or call}", "-e", f"inject={injection}", "-o", str(log)],
        )


def kill(stage: Stage, call: str, n: int, tally: Tally) -> None:
    """Kills the operation on entering the n-th of these calls, and holds what is left against what was told."""
    trial, ended = stage.attempt(f"{call}:signal=SIGKILL:when={n}")
    tally.n_trials += 1
    tally.n_hit += ended.killed
    tally.n_acknowledged += ended.acknowledged
    _conclude(stage, trial, ended, f"killed at {call} {n}", tally)


def fail(stage: Stage, call: str, error: str, n: int, lasting: bool, tally: Tally) -> None:
    """Fails the n-th of these calls, or all from it on, and holds what is left against what was told."""
    trial, ended = stage.attempt(f"{call}:error={error}:when={n}{'+' if lasting else ''}")
    where = f"{call} {n}{' and on' if lasting else ''} fails with {error}"
    tally.n_trials += 1
    tally.n_hit += ended.complaint is not None
    tally.n_acknowledged += ended.acknowledged
    if ended.killed:
        tally.wrong.append(f"{stage.operation.name}, {where}: it died")
    elif ended.complaint and not ended.complaint.startswith("StorageError: "):
        tally.wrong.append(f"{stage.operation.name}, {where}: not told as it should be: {ended.complaint}")
    elif not ended.complaint and not ended.acknowledged:
        tally.wrong.append(f"{stage.operation.name}, {where}: neither done nor refused")
    _conclude(stage, trial, ended, where, tally)


def _conclude(stage: Stage, trial: Path, ended: Ended, where: str, tally: Tally) -> None:
    n_before = n_files(trial)
    try:
        left = judge(trial, [stage.after] if ended.acknowledged else [stage.before, stage.after])
        tally.n_garbage += n_before > 2 * len(left)
    except AssertionError as wrong:
        told = "acknowledged" if ended.acknowledged else "not acknowledged"
        tally.wrong.append(f"{stage.operation.name}, {where}, {told}: {wrong}")


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
            stage = Stage.build(operation, home / str(number))
            points = [point for point in stage.points() if not calls or point[0] in calls]
            say(f"  {operation.name}: {len(points)} system calls")
            for call, n in _sampled(points, sample, seed + number):
                kill(stage, call, n, tally)
    return tally


def disk_faults(
    operations: Sequence[Operation], sample: int | None, seed: int, say: Callable[[str], object] = str
) -> Tally:
    """Fails every write, sync, rename, open and read of every operation, once and from then on."""
    tally = Tally()
    with place() as home:
        for number, operation in enumerate(operations):
            stage = Stage.build(operation, home / str(number))
            points = [
                (call, error, n, lasting)
                for call, error in DISK_CALLS
                for n in range(1, stage.calls[call] + 1)
                for lasting in (False, True)
            ]
            say(f"  {operation.name}: {len(points)} faults")
            for call, error, n, lasting in _sampled(points, sample, seed + number):
                fail(stage, call, error, n, lasting, tally)
    return tally


def writes_after_failed_syncs(operation: Operation) -> dict[int, list[str]]:
    """For each failed sync of the catalogue or its log, by its number: what was written to either of them after it.

    SQLite also syncs the directory when it begins a log, and goes on where that fails. This is harmless: what is
    acknowledged is in the catalogue itself by then, or we have synced the directory too. So those are left out.
    """
    found: dict[int, list[str]] = {}
    with place() as home:
        stage = Stage.build(operation, home / "stage")
        for n in range(1, stage.calls["fdatasync"] + 1):
            log = home / "log"
            stage.attempt(f"fdatasync:error=EIO:when={n}", "fdatasync,pwrite64,ftruncate", log)
            calls = [re.sub(r'"(\\.|[^"\\])*"\.*', "...", line) for line in log.read_text().splitlines()]
            failed = next(at for at, call in enumerate(calls) if "INJECTED" in call)
            if "/catalog.sqlite" in calls[failed]:
                wrote = [call for call in calls[failed + 1 :] if re.match(r"(pwrite64|ftruncate)\(", call)]
                found[n] = [call for call in wrote if "-shm>" not in call]  # shared memory that begins anew each time
    return found


def _sampled(points: list[Any], sample: int | None, seed: int) -> list[Any]:
    return points if sample is None else random.Random(seed).sample(points, min(sample, len(points)))


def hidden_changes(operation: Operation, with_writer: bool) -> list[tuple[State, State]]:
    """What readers see, before and after one of them lets go of the log, of changes killed at each of their syncs.

    `with_writer` has a writer come and go in between, for which the reader's transaction keeps the log from being
    emptied: it still holds a change of before.
    """
    pairs: list[tuple[State, State]] = []
    with place() as home:
        for n in count(1):
            trial = home / f"trial-{n}"
            operation.prepare(trial)
            reader = apsw.Connection(str(trial / "catalog.sqlite"), flags=apsw.SQLITE_OPEN_READONLY)
            reader.execute("SELECT * FROM library").fetchall()
            if with_writer:
                for change in ("BEGIN", "COMMIT; BEGIN"):  # the log of what comes between is not emptied
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
    """What the second writer of a directory is told."""
    with place() as home:
        with Catalog.open(home, write=True):
            ended = in_child(create, home)
        assert ended.complaint is not None
        assert ended.complaint.startswith(CatalogLocked.__name__), ended.complaint
        assert in_child(create, home).acknowledged
        return ended.complaint.partition(": ")[2]
