"""Socket guard: checks every address that FFmpeg connects or sends to, for protocols that bypass the HTTP relay.

An RTSP server may redirect to any host, or name any address for its packets, and FFmpeg does not check them. So the two
functions by which libavformat opens connections, `connect` and `sendto`, are replaced in its table of imported
functions (GOT) by ours, which ask `ReachPolicy` first. The host name is resolved by then: the guard checks the very
address that FFmpeg would connect to. Needs Linux and 64-bit ELF; elsewhere `install` raises and the stream is not
opened. README.md in this folder has the details.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator

from reference_db.media.addresses import AddressRefused, ReachPolicy

LIBRARY = "libavformat"
# Constants of <elf.h> and <sys/mman.h>.
PT_DYNAMIC = 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
PROT_READ, PROT_WRITE = 1, 2

_CONNECT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_SENDTO = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t,
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32),
    use_errno=True,
)
_callbacks: list[object] = []  # C holds pointers to these; they must not be garbage-collected


def install(policy: ReachPolicy, on_refused: Callable[[str], None]) -> None:
    """From now on FFmpeg connects and sends to permitted addresses only; other calls fail with EACCES.

    `on_refused` is called with the sentence of each refusal. Raises AddressRefused if the guard cannot be installed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    real_connect, real_sendto = _CONNECT(("connect", libc)), _SENDTO(("sendto", libc))

    def is_refused(fd: int, address: int | None, length: int) -> bool:
        try:
            if host_and_port := _host_and_port(address, length):
                policy.check(*host_and_port, is_stream=_is_stream(fd))
        except Exception as error:  # a check that fails refuses too
            on_refused(str(error) if isinstance(error, AddressRefused) else "Its address could not be checked.")
            ctypes.set_errno(errno.EACCES)
            return True
        return False

    def connect(fd: int, address: int | None, length: int) -> int:
        return -1 if is_refused(fd, address, length) else real_connect(fd, address, length)

    def sendto(fd: int, data: int | None, size: int, flags: int, address: int | None, length: int) -> int:
        refused = is_refused(fd, address, length)
        return -1 if refused else real_sendto(fd, data, size, flags, address, length)

    replacements = {b"connect": _CONNECT(connect), b"sendto": _SENDTO(sendto)}
    _callbacks.extend(replacements.values())
    replaced = set()
    try:
        for name, slot in _imported_functions(_base_address(LIBRARY)):
            if name in replacements:
                _write_pointer(libc, slot, ctypes.cast(replacements[name], ctypes.c_void_p).value or 0)
                replaced.add(name)
    except (OSError, ValueError, struct.error):
        replaced.clear()
    if replaced != set(replacements):
        raise AddressRefused("This system cannot stop FFmpeg from following redirects; RTSP and RTMP are disabled.")


def _host_and_port(address: int | None, length: int) -> tuple[str, int] | None:
    """Numeric address and port of a `struct sockaddr`; None if it is neither IPv4 nor IPv6."""
    if not address:
        return None
    raw = ctypes.string_at(address, length)
    family = struct.unpack_from("=H", raw)[0] if len(raw) >= 2 else 0
    if family == socket.AF_INET and len(raw) >= 8:
        return socket.inet_ntop(socket.AF_INET, raw[4:8]), struct.unpack_from(">H", raw, 2)[0]
    if family == socket.AF_INET6 and len(raw) >= 24:
        return socket.inet_ntop(socket.AF_INET6, raw[8:24]), struct.unpack_from(">H", raw, 2)[0]
    return None


def _is_stream(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as copy:
        return copy.type == socket.SOCK_STREAM


def _base_address(library: str) -> int:
    """Where the dynamic loader mapped the library."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if library in line:
                return int(line.partition("-")[0], 16)
    raise ValueError(f"{library} is not loaded")


def _imported_functions(base: int) -> Iterator[tuple[bytes, int]]:
    """Name and pointer's address of every function that the library at this address imports."""
    if ctypes.string_at(base, 5) != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF library")
    dynamic = _dynamic_section(base)

    def at(tag: int) -> int:  # on most systems the loader has made these absolute
        return dynamic[tag] if dynamic[tag] >= base else base + dynamic[tag]

    for table, length in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if table not in dynamic:
            continue
        for offset, info, _ in struct.iter_unpack("=QQq", ctypes.string_at(at(table), dynamic[length])):
            if symbol := info >> 32:
                (name,) = struct.unpack_from("=I", ctypes.string_at(at(DT_SYMTAB) + 24 * symbol, 4))
                yield ctypes.string_at(at(DT_STRTAB) + name), base + offset


def _dynamic_section(base: int) -> dict[int, int]:
    """The library's dynamic section, tag -> value, found by its program headers."""
    (headers,) = struct.unpack_from("=Q", ctypes.string_at(base + 0x20, 8))
    size, count = struct.unpack_from("=HH", ctypes.string_at(base + 0x36, 4))
    dynamic: dict[int, int] = {}
    for number in range(count):
        kind, _, _, entry = struct.unpack_from("=IIQQ", ctypes.string_at(base + headers + number * size, 24))
        while kind == PT_DYNAMIC:
            tag, value = struct.unpack_from("=qQ", ctypes.string_at(base + entry, 16))
            if tag == 0:
                break
            dynamic[tag], entry = value, entry + 16
    return dynamic


def _write_pointer(libc: ctypes.CDLL, slot: int, value: int) -> None:
    page = os.sysconf("SC_PAGESIZE")
    start = slot // page * page
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(slot + 8 - start), PROT_READ | PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.c_uint64.from_address(slot).value = value
