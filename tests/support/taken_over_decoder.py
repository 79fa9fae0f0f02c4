"""A decoding child that is taken over: the real program, whose decoder runs hostile code in place of decoding.

The request on stdin is that of `DecodingChild`, with the victim's data in `attack`. The hostile code starts where a bug
in FFmpeg would start it: inside `av.open`, after the set-up. Each attempt calls the C library and, past it, the system
itself. The report is a warning record: JSON, attempt -> "done" or the reason why not.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

from reference_db.media import decoder, decoding_session
from reference_db.media.decoding_session import DecodingSession
from reference_db.media.sandbox import landlock

LIBC = ctypes.CDLL(None, use_errno=True)
# Of x86-64 and aarch64, here again and not from the code under test.
X86 = platform.machine() == "x86_64"
SYSCALLS = {
    "openat": 257 if X86 else 56,
    "socket": 41 if X86 else 198,
    "connect": 42 if X86 else 203,
    "sendmsg": 46 if X86 else 211,
    "execve": 59 if X86 else 221,
    "execveat": 322 if X86 else 281,
    "ptrace": 101 if X86 else 117,
    "process_vm_readv": 310 if X86 else 270,
    "kill": 62 if X86 else 129,
    "clone": 56 if X86 else 220,
    "clone3": 435,
    "memfd_create": 319 if X86 else 279,
    "unlinkat": 263 if X86 else 35,
    "mkdirat": 258 if X86 else 34,
    "renameat2": 316 if X86 else 276,
    "prlimit64": 302 if X86 else 261,
    "io_uring_setup": 425,
    "open_by_handle_at": 304 if X86 else 265,
    "userfaultfd": 323 if X86 else 282,
    "bpf": 321 if X86 else 280,
    "unshare": 272 if X86 else 97,
    "pidfd_open": 434,
    "setns": 308 if X86 else 268,
}


def system_call(name: str, *arguments: Any) -> int:
    result = LIBC.syscall(ctypes.c_long(SYSCALLS[name]), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def address_of(port: int) -> bytes:
    return struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton("127.0.0.1") + bytes(8)


def connect(port: int) -> None:
    with socket.socket() as client:
        client.connect(("127.0.0.1", port))


def connect_through_the_gateway(session: DecodingSession, port: int) -> None:
    gateway = session._gateway
    assert gateway is not None, "there is none"
    gateway.connect(gateway.open_socket(socket.AF_INET, socket.SOCK_STREAM, 0), address_of(port))


def send_a_datagram(session: DecodingSession, port: int) -> None:
    gateway = session._gateway
    assert gateway is not None, "there is none"
    opened = gateway.open_socket(socket.AF_INET, socket.SOCK_DGRAM, 0)
    gateway.send(opened, b"secret", 0, address_of(port))


def run_a_program(path: bytes) -> None:
    arguments = (ctypes.c_char_p * 2)(path, None)
    system_call("execve", ctypes.c_char_p(path), arguments, None)


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def fork_by_system_call() -> None:
    if system_call("clone", ctypes.c_ulong(signal.SIGCHLD), None, None, None, None) == 0:
        os._exit(0)


def new_code() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def read_memory(pid: int) -> None:
    buffer = ctypes.create_string_buffer(8)
    area = struct.pack("=QQ", ctypes.addressof(buffer), 8)
    system_call("process_vm_readv", pid, area, ctypes.c_ulong(1), area, ctypes.c_ulong(1), ctypes.c_ulong(0))


def attempts(session: DecodingSession, attack: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Every attempt by name; one that returns has succeeded."""
    secret, folder, port, victim = attack["secret"].encode(), attack["folder"], attack["port"], attack["victim"]
    at_cwd = ctypes.c_int(-100)
    return {
        "read the data folder": lambda: open(secret).close(),
        "read it by system call": lambda: system_call("openat", at_cwd, ctypes.c_char_p(secret), 0, 0),
        "list the data folder": lambda: os.listdir(folder),
        "read /etc/passwd": lambda: open("/etc/passwd").close(),
        "read the memory of the parent": lambda: open(f"/proc/{victim}/mem").close(),
        "read the environment of the parent": lambda: open(f"/proc/{victim}/environ").close(),
        "read memory by system call": lambda: read_memory(victim),
        "write a file": lambda: open(os.path.join(folder, "new"), "w").close(),
        "overwrite a file": lambda: open(secret, "r+").close(),
        "create by system call": lambda: system_call(
            "openat", at_cwd, ctypes.c_char_p(os.fsencode(folder) + b"/new"), os.O_WRONLY | os.O_CREAT, 0o600
        ),
        "delete a file": lambda: system_call("unlinkat", at_cwd, ctypes.c_char_p(secret), 0),
        "create a folder": lambda: system_call("mkdirat", at_cwd, ctypes.c_char_p(secret + b".d"), 0o700),
        "rename a file": lambda: system_call(
            "renameat2", at_cwd, ctypes.c_char_p(secret), at_cwd, ctypes.c_char_p(secret + b"2"), 0
        ),
        "write to a file in memory": lambda: system_call("memfd_create", ctypes.c_char_p(b"x"), 0),
        "open by handle": lambda: system_call("open_by_handle_at", at_cwd, bytes(16), 0),
        "connect": lambda: connect(port),
        "open a socket by system call": lambda: system_call("socket", socket.AF_INET, socket.SOCK_STREAM, 0),
        "open a Unix socket": lambda: socket.socket(socket.AF_UNIX),
        "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "resolve a name": lambda: socket.getaddrinfo("name.invalid.example", 80),
        "connect by the gateway": lambda: connect_through_the_gateway(session, port),
        "send by the gateway": lambda: send_a_datagram(session, port),
        "start a program": lambda: os.execv(sys.executable, [sys.executable, "-c", "pass"]),
        "start it by system call": lambda: run_a_program(b"/bin/true"),
        "fork": fork,
        "fork by system call": fork_by_system_call,
        "fork by clone3": lambda: system_call("clone3", bytes(88), ctypes.c_size_t(88)),
        "trace the parent": lambda: system_call("ptrace", 16, victim, None, None),
        "let the parent trace it": lambda: system_call("ptrace", 0, 0, None, None),
        "kill the parent": lambda: system_call("kill", victim, 0),
        "hold the parent": lambda: system_call("pidfd_open", victim, 0),
        "load new code": new_code,
        "raise a limit": lambda: system_call("prlimit64", 0, 1, bytes(16), None),
        "io_uring": lambda: system_call("io_uring_setup", 1, bytes(120)),
        "bpf": lambda: system_call("bpf", 0, bytes(120), 120),
        "userfaultfd": lambda: system_call("userfaultfd", 1),
        "a namespace of its own": lambda: system_call("unshare", 0x10000000),
    }


def report(session: DecodingSession, attack: dict[str, Any]) -> dict[str, str]:
    results: dict[str, str] = {}
    for name, attempt in attempts(session, attack).items():
        if attack["only"] and name not in attack["only"]:
            continue
        try:
            attempt()
            results[name] = "done"
        except OSError as error:
            results[name] = errno.errorcode.get(error.errno or 0, str(error))
        except (AssertionError, LookupError) as error:  # Python's own encoding of host names is in a file
            results[name] = str(error)
    return results


def no_landlock(*arguments: object, **options: object) -> int:
    raise OSError(errno.ENOSYS, "an old kernel")


def main() -> None:
    """`only` in the attack: these attempts, without the sandbox. `old_kernel`: without Landlock."""
    attack, decode = json.loads(sys.argv[1]), DecodingSession.decode

    def taken_over(session: DecodingSession, url: str, options: dict[str, str]) -> Iterator[tuple[bytes, bytes]]:
        yield b"W", json.dumps(report(session, attack)).encode()
        yield from decode(session, url, options)

    if attack["only"]:
        setattr(decoding_session, "confine_decoder", lambda needs: [])  # noqa: B010
    if attack["old_kernel"]:
        setattr(landlock, "restrict", no_landlock)  # noqa: B010
    setattr(DecodingSession, "decode", taken_over)  # noqa: B010
    decoder.main()


if __name__ == "__main__":
    main()
