"""The identity of a process, so that a record on disk can name the process that wrote it.

A process id alone is reused by the system; with the boot, the process namespace and the start time it is unique.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def process_identity() -> str:
    """Boot, process namespace, process id and start time of this process."""
    return f"{_boot()} {_namespace()} {os.getpid()} {_start_time(os.getpid())}"


def is_gone(identity: str) -> bool | None:
    """Whether the process has ended; None if that cannot be seen from here, as of another container's process."""
    boot, namespace, pid, started = identity.split(" ")
    if boot != _boot():
        return True
    if namespace != _namespace():
        return None
    found = _start_time(int(pid))
    if found is None and _exists(int(pid)):
        return None  # systemd's ProtectProc hides the processes of other users
    return found != started


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # systemd's ProcSubset hides it
        return "unknown"


@cache
def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _start_time(pid: int) -> str | None:
    """Clock ticks from the boot to the start of the process; None if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return status.rpartition(")")[2].split()[19]  # the name in parentheses may contain anything
