"""Power cuts: the writes of an operation are recorded, and disks are built on which some unsynced writes are missing.

Data that was written and not synced may or may not be on the disk after a power cut, in any combination, per sector; a
created, renamed or removed name may or may not be, until its directory is synced. Such disks are built from a recording
of system calls, and the library on each must satisfy the same checks as after a kill. With one kind of sync left out of
the recording (`FORGOTTEN`), the checks must fail.
"""

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.operations import Operation, State, check_state, n_files, state
from tests.chaos.storage import Tally, in_child, place

SECTOR = 512
CALLS = "openat,creat,close,write,pwrite64,ftruncate,fsync,fdatasync,rename,unlink,mkdir,sendto,dup,lseek"
LINE = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+)", re.M)
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')

FORGOTTEN: dict[str, Callable[[str], bool]] = {  # which syncs are left out, by path
    "files are not synced": lambda path: path.startswith(("features/", "thumbnails/")),
    "directories are not synced": lambda path: path in ("features", "thumbnails", "."),
    "the catalogue is not synced": lambda path: path.startswith("catalog.sqlite"),
}


@dataclass
class Inode:
    """A file: its synced content, and the writes since."""

    content: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # data at an offset, or None: truncated there

    def settled(self, arrives: Callable[[], bool]) -> bytes:
        """The file with those pending writes that arrive, decided per sector."""
        content = bytearray(self.content)
        for offset, data in self.pending:
            if data is None:
                if arrives():
                    content = content[:offset] + bytes(max(0, offset - len(content)))
                continue
            for at in range(0, len(data), SECTOR):
                if arrives():
                    part, place = data[at : at + SECTOR], offset + at
                    content += bytes(max(0, place + len(part) - len(content)))
                    content[place : place + len(part)] = part
        return bytes(content)


@dataclass
class Disk:
    """Files by name: the synced names, and the changes of names since."""

    names: dict[str, Inode] = field(default_factory=dict)  # as a process sees them
    sure: dict[str, Inode] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    sure_directories: set[str] = field(default_factory=set)
    pending: list[tuple[str, str, str | None, Inode | None]] = field(default_factory=list)  # kind, name, new name, file

    @classmethod
    def of(cls, folder: Path) -> "Disk":
        disk = cls(directories={"."}, sure_directories=set())
        if folder.exists():
            disk.sure_directories.add(".")
            for path in folder.rglob("*"):
                name = str(path.relative_to(folder))
                if path.is_dir():
                    disk.directories.add(name)
                    disk.sure_directories.add(name)
                else:
                    disk.names[name] = disk.sure[name] = Inode(path.read_bytes())
        return disk

    def sync_directory(self, name: str) -> None:
        """Makes the names in this directory durable."""
        for entry in [entry for entry in self.pending if _parent(entry[1]) == name]:
            self.pending.remove(entry)
            _settle(entry, self.sure, self.sure_directories)

    def after_cut(self, folder: Path, arrives: Callable[[], bool]) -> None:
        """Writes into the folder what is left after a power cut."""
        names, directories = dict(self.sure), set(self.sure_directories)
        for entry in self.pending:
            if arrives():
                _settle(entry, names, directories)
        for name in sorted(directories):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, inode in names.items():
            if _parent(name) in directories:
                (folder / name).write_bytes(inode.settled(arrives))


def _parent(name: str) -> str:
    return os.path.dirname(name) or "."


def _settle(entry: tuple[str, str, str | None, Inode | None], names: dict[str, Inode], directories: set[str]) -> None:
    what, name, new_name, inode = entry
    if what == "make directory":
        directories.add(name)
    elif what == "remove":
        names.pop(name, None)
    elif what == "rename":
        assert new_name is not None
        assert inode is not None
        names.pop(name, None)
        names[new_name] = inode
    else:
        assert inode is not None
        names[name] = inode


@dataclass
class Player:
    """Replays a recording on a disk, call by call."""

    disk: Disk
    root: str
    forgets: Callable[[str], bool]
    open: dict[int, tuple[str, Inode | None, list[int]]] = field(default_factory=dict)  # name, file, position
    acknowledged: bool = False

    def play(self, call: str, arguments: str, result: int) -> None:
        if result < 0:
            return
        strings = [bytes.fromhex(found.replace("\\x", "")) for found in STRING.findall(arguments)]
        names = [self._name(os.fsdecode(string)) for string in strings] if call in _NAMING else []
        number = int(found.group()) if (found := re.match(r"\d+", arguments)) else -1
        match call:
            case "openat" | "creat" if names[0] is not None:
                self._open(result, names[0], arguments)
            case "close":
                self.open.pop(number, None)
            case "write" | "pwrite64" if number in self.open:
                self._write(number, strings[0][:result], arguments if call == "pwrite64" else None)
            case "ftruncate" if number in self.open:
                inode = self.open[number][1]
                assert inode is not None
                inode.pending.append((int(arguments.rsplit(",", 1)[1]), None))
            case "fsync" | "fdatasync" if number in self.open:
                self._sync(*self.open[number][:2])
            case "rename" if names[0] is not None and names[1] is not None:
                inode = self.disk.names.pop(names[0])
                self.disk.names[names[1]] = inode
                self.disk.pending.append(("rename", names[0], names[1], inode))
            case "unlink" if names[0] is not None:
                self.disk.names.pop(names[0], None)
                self.disk.pending.append(("remove", names[0], None, None))
            case "mkdir" if names[0] is not None:
                self.disk.directories.add(names[0])
                self.disk.pending.append(("make directory", names[0], None, None))
            case "sendto":
                self.acknowledged |= b"acknowledged" in strings[0]

    def _name(self, path: str) -> str | None:
        """The path within the library, or None outside of it; the parent directory is `..`."""
        name = os.path.relpath(path, self.root)
        return name if name == ".." or not name.startswith("..") else None

    def _open(self, handle: int, name: str, arguments: str) -> None:
        if name in self.disk.directories or name == "..":
            self.open[handle] = (name, None, [0])
            return
        inode = self.disk.names.get(name)
        if inode is None:
            inode = self.disk.names[name] = Inode()
            self.disk.pending.append(("make", name, None, inode))
        elif "O_TRUNC" in arguments:
            inode.pending.append((0, None))
        self.open[handle] = (name, inode, [0])

    def _write(self, handle: int, data: bytes, arguments: str | None) -> None:
        _, inode, position = self.open[handle]
        assert inode is not None
        offset = position[0] if arguments is None else int(arguments.rsplit(",", 1)[1])
        if arguments is None:
            position[0] += len(data)
        inode.pending.append((offset, data))

    def _sync(self, name: str, inode: Inode | None) -> None:
        if self.forgets(name):
            return
        if name == "..":
            if "." in self.disk.directories:
                self.disk.sure_directories.add(".")
        elif inode is None:
            self.disk.sync_directory(name)
        else:
            inode.content, inode.pending = inode.settled(lambda: True), []


_NAMING = ("openat", "creat", "rename", "unlink", "mkdir")


def cuts(operations: Sequence[Operation], n_cuts: int, seed: int, forgotten: str | None = None) -> Tally:
    """Cuts the power `n_cuts` times during each operation; `forgotten` names the syncs that are left out."""
    tally = Tally()
    forgets = FORGOTTEN[forgotten] if forgotten else lambda _: False
    with place() as home:
        for number, operation in enumerate(operations):
            start, trial, log = home / f"start-{number}", home / "trial", home / "log"
            operation.prepare(start)
            before = state(start)
            if start.exists():
                shutil.copytree(start, trial)
            ended = in_child(operation.work, trial, ["-e", f"trace={CALLS}", "-xx", "-s", "10000000", "-o", str(log)])
            assert ended.acknowledged, ended
            after = state(trial)
            calls = [(found[0], found[1], int(found[2])) for found in LINE.findall(log.read_text())]
            shutil.rmtree(trial)
            chance = random.Random(f"{seed} {number}")
            for cut in _moments(len(calls), n_cuts, chance):
                player = Player(Disk.of(start), str(trial), forgets)
                for call in calls[:cut]:
                    player.play(*call)
                player.disk.after_cut(trial, _arrival(chance))
                _conclude(trial, [after] if player.acknowledged else [before, after], f"{operation.name} {cut}", tally)
                tally.n_acknowledged += player.acknowledged
                shutil.rmtree(trial, ignore_errors=True)
    return tally


def _arrival(chance: random.Random) -> Callable[[], bool]:
    """Decides whether a write arrives: none, few, some, most or all of them."""
    likely = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    return lambda: chance.random() < likely


def _moments(n_calls: int, n_cuts: int, chance: random.Random) -> Iterator[int]:
    for number in range(n_cuts):
        yield n_calls if number % 10 == 0 else chance.randint(0, n_calls)


def _conclude(trial: Path, allowed: list[State], where: str, tally: Tally) -> None:
    tally.n_trials += 1
    tally.n_hit += 1
    try:
        n_before = n_files(trial)
        left = check_state(trial, allowed)
        tally.n_garbage += n_before > 2 * len(left)
    except AssertionError as failure:
        tally.failures.append(f"power cut after {where} calls: {failure}")
