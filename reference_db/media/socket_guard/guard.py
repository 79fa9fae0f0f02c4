"""Socket guard: FFmpeg asks the gateway for its sockets, and gets one file, in place of calling the system.

An RTSP server may redirect to any host, or name any address for its packets, and FFmpeg does not check them. So the
functions by which libavformat reaches the network are replaced in its table of imported functions by ours, which ask
the gateway (gateway.py). It checks the very address that FFmpeg would connect to. In the same way libavutil gets the
one file that was opened before the sandbox was entered. README.md in this folder has the details.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

from reference_db.media.addresses import AddressRefused
from reference_db.media.socket_guard import imports
from reference_db.media.socket_guard.gateway import Gateway

LIBRARY = "libavformat"
FILE_LIBRARY = "libavutil"  # it opens files for libavformat
AI_NUMERICHOST, AI_NUMERICSERV = 0x4, 0x400
EAI_NONAME, EAI_AGAIN = -2, -3

_INT, _POINTER, _SIZE, _LENGTH = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
_TYPES: dict[bytes, Any] = {
    b"socket": ctypes.CFUNCTYPE(_INT, _INT, _INT, _INT, use_errno=True),
    b"connect": ctypes.CFUNCTYPE(_INT, _INT, _POINTER, _LENGTH, use_errno=True),
    b"bind": ctypes.CFUNCTYPE(_INT, _INT, _POINTER, _LENGTH, use_errno=True),
    b"sendto": ctypes.CFUNCTYPE(ctypes.c_ssize_t, _INT, _POINTER, _SIZE, _INT, _POINTER, _LENGTH, use_errno=True),
    b"getaddrinfo": ctypes.CFUNCTYPE(_INT, ctypes.c_char_p, ctypes.c_char_p, _POINTER, _POINTER, use_errno=True),
}
_OPEN = ctypes.CFUNCTYPE(_INT, ctypes.c_char_p, _INT, _INT, use_errno=True)


class _AddressInfo(ctypes.Structure):
    """`struct addrinfo` of Linux."""


_AddressInfo._fields_ = [
    ("flags", _INT),
    ("family", _INT),
    ("kind", _INT),
    ("protocol", _INT),
    ("address_length", _LENGTH),
    ("address", _POINTER),
    ("name", _POINTER),
    ("next", ctypes.POINTER(_AddressInfo)),
]


def install(gateway: Gateway) -> None:
    """From now on FFmpeg has no sockets but the gateway's. Raises AddressRefused if it cannot be installed."""
    libc = ctypes.CDLL(None, use_errno=True)
    real_sendto = _TYPES[b"sendto"](("sendto", libc))

    def open_socket(family: int, kind: int, protocol: int) -> int:
        return _result(lambda: gateway.open_socket(family, kind, protocol))

    def connect(fd: int, address: int | None, length: int) -> int:
        return _result(lambda: gateway.connect(fd, ctypes.string_at(address or 0, length)))

    def bind(fd: int, address: int | None, length: int) -> int:
        return _result(lambda: gateway.bind(fd, ctypes.string_at(address or 0, length)))

    def sendto(fd: int, data: int | None, size: int, flags: int, address: int | None, length: int) -> int:
        if not address:
            return int(real_sendto(fd, data, size, flags, None, 0))
        destination = ctypes.string_at(address, length)
        return _result(lambda: gateway.send(fd, ctypes.string_at(data or 0, size), flags, destination))

    functions = {
        b"socket": open_socket,
        b"connect": connect,
        b"bind": bind,
        b"sendto": sendto,
        b"getaddrinfo": _Resolver(libc, gateway).getaddrinfo,
    }
    callbacks = {name: _TYPES[name](function) for name, function in functions.items()}
    if imports.replace(LIBRARY, callbacks) != set(callbacks):
        raise AddressRefused("This system cannot stop FFmpeg from following redirects; RTSP and RTMP are disabled.")


def install_file(path: str, fd: int) -> bool:
    """From now on FFmpeg opens no file but this one, once, by its open `fd`. False if it cannot be installed."""
    left = [fd]

    def open_file(name: bytes, flags: int, mode: int) -> int:
        if left and name == os.fsencode(path) and not flags & (os.O_WRONLY | os.O_RDWR):
            return left.pop()
        ctypes.set_errno(errno.EACCES)
        return -1

    callback = _OPEN(open_file)
    return bool(imports.replace(FILE_LIBRARY, {b"open": callback, b"open64": callback}))


def _result(call: Callable[[], int | None]) -> int:
    """What the call returns; -1 and `errno` if it fails."""
    try:
        return call() or 0
    except OSError as error:
        ctypes.set_errno(error.errno or errno.EIO)
    except Exception:
        ctypes.set_errno(errno.EACCES)
    return -1


class _Resolver:
    """`getaddrinfo` with names that the gateway resolves: the C library itself would open files and sockets."""

    def __init__(self, libc: ctypes.CDLL, gateway: Gateway) -> None:
        self._real = _TYPES[b"getaddrinfo"](("getaddrinfo", libc))
        self._gateway = gateway

    def getaddrinfo(self, host: bytes | None, service: bytes | None, hints: int | None, result: int) -> int:
        try:
            wanted = _AddressInfo.from_address(hints) if hints else _AddressInfo()
            code = self._numeric(host, service, wanted, result)
            if host is None or code != EAI_NONAME:
                return code
            return self._by_name(host, service, wanted, result)
        except Exception:
            return EAI_AGAIN

    def _numeric(self, host: bytes | None, service: bytes | None, wanted: _AddressInfo, result: int) -> int:
        flags = wanted.flags | AI_NUMERICSERV | (AI_NUMERICHOST if host is not None else 0)
        hints = _AddressInfo(flags, wanted.family, wanted.kind, wanted.protocol)
        return int(self._real(host, service, ctypes.addressof(hints), result))

    def _by_name(self, host: bytes, service: bytes | None, wanted: _AddressInfo, result: int) -> int:
        """One list of the addresses of the name; the C library frees each entry by itself."""
        last: Any = None
        for address in self._gateway.resolve(host.decode(), wanted.family, wanted.kind):
            found = ctypes.POINTER(_AddressInfo)()
            if self._numeric(address.encode(), service, wanted, ctypes.addressof(found)) != 0:
                continue
            if last is None:
                _POINTER.from_address(result).value = ctypes.addressof(found.contents)
            else:
                last.next = found
            last = found.contents
            while last.next:
                last = last.next.contents
        return 0 if last is not None else EAI_NONAME
