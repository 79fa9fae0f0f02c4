"""A guard at the door of FFmpeg's own sockets, for the protocols that do not pass through the gateway.

An RTSP server may redirect to any host, or name any address for its packets, and FFmpeg asks nobody. So the two
functions by which libavformat reaches out, `connect` and `sendto`, are replaced in its table of imported functions by
ours, which ask `ReachPolicy` first. The name was looked up by then: what is checked is the very address that would be
connected to. Linux with ELF libraries of 64 bits only; elsewhere `watch` says so and the stream is not opened.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator

from reference_db.media.addresses import AddressRefused, ReachPolicy

PT_DYNAMIC = 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
PROT_READ, PROT_WRITE = 1, 2

_CONNECT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_SENDTO = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t,
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32),
    use_errno=True,
)
_kept: list[object] = []  # what C points to must not be collected


def watch(reach: ReachPolicy, on_refused: Callable[[str], None]) -> None:
    """From now on FFmpeg connects and sends to permitted addresses only.

    Raises AddressRefused where that cannot be had.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    real_connect, real_sendto = _CONNECT(("connect", libc)), _SENDTO(("sendto", libc))

    def is_refused(fd: int, address: int | None, length: int) -> bool:
        place = _place(address, length)
        if place is None:
            return False
        try:
            reach.check(place[0], place[1], is_stream=_is_stream(fd))
        except AddressRefused as refusal:
            on_refused(str(refusal))
            ctypes.set_errno(errno.EACCES)
            return True
        return False

    def connect(fd: int, address: int | None, length: int) -> int:
        return -1 if is_refused(fd, address, length) else real_connect(fd, address, length)

    def sendto(fd: int, data: int | None, size: int, flags: int, address: int | None, length: int) -> int:
        refused = is_refused(fd, address, length)
        return -1 if refused else real_sendto(fd, data, size, flags, address, length)

    ours = {b"connect": _CONNECT(connect), b"sendto": _SENDTO(sendto)}
    _kept.extend(ours.values())
    replaced = set()
    try:
        base = _base("libavformat")
        for name, slot in _imports(base):
            if name in ours:
                _write(libc, slot, ctypes.cast(ours[name], ctypes.c_void_p).value or 0)
                replaced.add(name)
    except (OSError, ValueError, struct.error):
        replaced.clear()
    if replaced != set(ours):
        raise AddressRefused("This system has no way to keep FFmpeg from following redirects; RTSP and RTMP are off.")


def _place(address: int | None, length: int) -> tuple[str, int] | None:
    """Numeric address and port of a socket address; None for what is neither IPv4 nor IPv6."""
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
    with socket.socket(fileno=os.dup(fd)) as one:
        return one.type == socket.SOCK_STREAM


def _base(library: str) -> int:
    with open("/proc/self/maps") as maps:
        for line in maps:
            if library in line:
                return int(line.partition("-")[0], 16)
    raise ValueError(f"{library} is not loaded")


def _imports(base: int) -> Iterator[tuple[bytes, int]]:
    """Name and slot of every function that the library at this address imports."""
    if ctypes.string_at(base, 5) != b"\x7fELF\x02":
        raise ValueError("not a library of 64 bits")
    (headers,) = struct.unpack_from("=Q", ctypes.string_at(base + 0x20, 8))
    size, count = struct.unpack_from("=HH", ctypes.string_at(base + 0x36, 4))
    dynamic: dict[int, int] = {}
    for number in range(count):
        kind, _, _, place = struct.unpack_from("=IIQQ", ctypes.string_at(base + headers + number * size, 24))
        while kind == PT_DYNAMIC:
            tag, value = struct.unpack_from("=qQ", ctypes.string_at(base + place, 16))
            if tag == 0:
                break
            dynamic[tag], place = value, place + 16

    def at(tag: int) -> int:  # the loader has made these absolute on most systems
        return dynamic[tag] if dynamic[tag] >= base else base + dynamic[tag]

    for table, length in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if table not in dynamic:
            continue
        for offset, info, _ in struct.iter_unpack("=QQq", ctypes.string_at(at(table), dynamic[length])):
            if symbol := info >> 32:
                (name,) = struct.unpack_from("=I", ctypes.string_at(at(DT_SYMTAB) + 24 * symbol, 4))
                yield ctypes.string_at(at(DT_STRTAB) + name), base + offset


def _write(libc: ctypes.CDLL, slot: int, value: int) -> None:
    page = os.sysconf("SC_PAGESIZE")
    start = slot // page * page
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(slot + 8 - start), PROT_READ | PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.c_uint64.from_address(slot).value = value
