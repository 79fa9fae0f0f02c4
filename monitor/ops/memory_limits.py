"""Memory limits of this process: those of its control groups, and that of the machine.

Input: files of the kernel; output: bytes. File pages that were not used lately count as free, because the kernel can
drop them at once, as in Kubernetes' working set. A limit that cannot be read is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NO_LIMIT_BYTES = 1 << 60  # version 1 of control groups has a number near 2^63 for no limit


class MemoryLimit(NamedTuple):
    """A limit, and how much of it is used."""

    limit_bytes: float
    used_bytes: float

    def left_bytes(self, share: float) -> float:
        """Bytes until this share of the limit is used; negative beyond it."""
        return share * self.limit_bytes - self.used_bytes


def memory_limits(groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc")) -> list[MemoryLimit]:
    """Every limit of this process: those of its control groups and their parents, and the machine's."""
    return [*_group_limits(groups, process), *_machine_limit(process)]


def _group_limits(groups: Path, process: Path) -> Iterator[MemoryLimit]:
    try:
        lines = (process / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container its own group is the visible root, whatever the path is.
        own = root / path.strip("/")
        for folder in (own, *own.parents) if own.is_dir() else (root,):
            if folder.is_relative_to(root) and (limit := _group_limit(folder, *names)) is not None:
                yield limit


def _group_limit(folder: Path, limit_name: str, used_name: str, idle_name: str) -> MemoryLimit | None:
    try:
        limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
        idle = _number_of((folder / "memory.stat").read_text(), idle_name)
    except (OSError, ValueError):
        return None
    limit_bytes = math.inf if limit == "max" else float(limit)
    return None if limit_bytes >= NO_LIMIT_BYTES else MemoryLimit(limit_bytes, used - idle)


def _machine_limit(process: Path) -> Iterator[MemoryLimit]:
    try:
        text = (process / "meminfo").read_text()
        total, available = (1024 * _number_of(text, name) for name in ("MemTotal:", "MemAvailable:"))
    except (OSError, ValueError):
        return
    yield MemoryLimit(total, total - available)


def _number_of(text: str, name: str) -> int:
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == name:
            return int(rest.split()[0])
    raise ValueError(f"no {name}")
