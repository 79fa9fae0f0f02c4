"""Landlock: this process gives up files, TCP and signals to others, on kernels that have it (5.13 and later).

Input: the files that may still be read. Everything else that the running kernel's Landlock can forbid is forbidden for
this thread and all that it starts. Open files stay usable.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on all machines
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Rights on files by the version of Landlock that introduced the highest bit.
FILE_BITS = {1: 13, 2: 14, 3: 15, 5: 16}
TCP_VERSION, TCP_RIGHTS = 4, 0b11  # bind, connect
SCOPE_VERSION, SCOPES = 6, 0b11  # abstract Unix sockets, signals


def version() -> int:
    """The kernel's version of Landlock. Raises OSError with the reason if there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG))
    if found > 0:
        return int(found)
    reasons = {
        errno.ENOSYS: "the kernel is older than 5.13 or has no Landlock",
        errno.EOPNOTSUPP: "Landlock is disabled when the kernel boots (lsm=)",
        errno.EPERM: "a container's seccomp profile forbids it",
    }
    number = ctypes.get_errno()
    raise OSError(number, reasons.get(number, os.strerror(number)))


def restrict(readable: Iterable[str] = (), *, can_read: bool = False, has_network: bool = False) -> int:
    """Forbids files, except to read the `readable` (with `can_read`, any), and TCP unless `has_network`.

    Returns the version in force. Needs no_new_privs. Raises OSError if it is not available.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    supported = version()
    rights = (1 << max(bits for since, bits in FILE_BITS.items() if since <= supported)) - 1
    if can_read:
        rights &= ~(READ_FILE | READ_DIR)
    network = TCP_RIGHTS if supported >= TCP_VERSION and not has_network else 0
    scopes = SCOPES if supported >= SCOPE_VERSION else 0
    size = 24 if supported >= SCOPE_VERSION else 16 if supported >= TCP_VERSION else 8
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, network, scopes))
    ruleset = _check(libc.syscall(ctypes.c_long(CREATE_RULESET), attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)))
    try:
        for path in readable:
            _permit(libc, ruleset, path)
        _check(libc.syscall(ctypes.c_long(RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    finally:
        os.close(ruleset)
    return supported


def _permit(libc: ctypes.CDLL, ruleset: int, path: str) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", READ_FILE, file))
        _check(
            libc.syscall(ctypes.c_long(ADD_RULE), ctypes.c_int(ruleset), RULE_PATH_BENEATH, rule, ctypes.c_uint32(0))
        )
    finally:
        os.close(file)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
