"""The gateway: a process beside the decoding child that opens its connections, so that the decoder needs no network.

`Gateway.start` forks it before FFmpeg is loaded. It runs the HTTP relay, and creates, binds and connects the sockets
that FFmpeg asks for (guard.py), after its rules have checked the address. The decoder gets the open socket. Requests
and answers are single messages on a Unix socket: JSON, and for `send` a line end and the bytes. The gateway dies with
the decoder.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from reference_db.media.addresses import AddressRefused, ReachPolicy, scheme_of
from reference_db.media.child_process import PR_SET_PDEATHSIG
from reference_db.media.sandbox.confinement import confine_gateway

if TYPE_CHECKING:
    from reference_db.media.http_relay import HttpRelay

MESSAGE_BYTES = 1 << 17  # a datagram and its header
MAX_SOCKETS = 32  # of those that it still holds for the decoder; RTSP needs some four per stream
FAMILIES = (socket.AF_INET, socket.AF_INET6)
KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM)
KIND_FLAGS = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC


class Gateway:
    """The decoder's end."""

    def __init__(self, control: socket.socket, notices: int) -> None:
        self._control, self._notices = control, notices
        self._lock = threading.Lock()
        self._socket_numbers: dict[int, int] = {}  # our file descriptor -> the gateway's number

    @classmethod
    def start(cls, request: dict[str, Any], unneeded: int) -> Gateway:
        """Forks the gateway of the request's address; `unneeded` is a descriptor that it closes. Needs one thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        notices, notify = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        parent = os.getpid()
        if os.fork() == 0:
            ours.close()
            os.close(notices)
            os.close(unneeded)
            _run(request, theirs, notify, parent)
        theirs.close()
        os.close(notify)
        return cls(ours, notices)

    def address(self) -> tuple[str, int]:
        """The URL that FFmpeg opens, and the relay's port or 0. Waits for the gateway; raises AddressRefused."""
        answer, _ = self._ask({"do": "address"})
        if "refused" in answer:
            raise AddressRefused(answer["refused"])
        return answer["url"], answer["port"]

    def facts(self, what: str) -> dict[str, Any]:
        """What it knows about the stream.

        `problems`: `refusals` (sentences), `last` and `truncation` (kind and sentence, or None). `progress`, of HTTP:
        `recording` (see `VideoInfo`), and of HLS `n_moves` and `segment_s` (see `PlaylistProgress`).
        """
        return self._ask({"do": what})[0]

    def warnings(self) -> list[str]:
        """The new sentences of its relay; does not wait."""
        try:
            return [line for line in os.read(self._notices, MESSAGE_BYTES).decode().split("\n") if line]
        except OSError:
            return []

    def open_socket(self, family: int, kind: int, protocol: int) -> int:
        """A new socket's file descriptor. Raises OSError."""
        answer, files = self._ask({"do": "socket", "family": family, "kind": kind, "protocol": protocol})
        _raise_error(answer)
        self._socket_numbers[files[0]] = answer["socket"]
        return files[0]

    def connect(self, fd: int, address: bytes) -> None:
        _raise_error(self._ask({"do": "connect", "socket": self._number(fd), "address": address.hex()})[0])

    def bind(self, fd: int, address: bytes) -> None:
        _raise_error(self._ask({"do": "bind", "socket": self._number(fd), "address": address.hex()})[0])

    def send(self, fd: int, data: bytes, flags: int, address: bytes) -> int:
        question = {"do": "send", "socket": self._number(fd), "flags": flags, "address": address.hex()}
        answer = self._ask(question, data)[0]
        _raise_error(answer)
        return int(answer["sent"])

    def resolve(self, host: str, family: int, kind: int) -> list[str]:
        """The numeric addresses of a host name; none if it is unknown."""
        answer = self._ask({"do": "resolve", "host": host, "family": family, "kind": kind})[0]
        return [str(address) for address in answer["addresses"]]

    def _number(self, fd: int) -> int:
        return self._socket_numbers.get(fd, -1)

    def _ask(self, question: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            self._control.send(json.dumps(question).encode() + b"\n" + data)
            message, files, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
        if not message:
            raise ConnectionResetError("The gateway has ended.")
        return json.loads(message), files


def _raise_error(answer: dict[str, Any]) -> None:
    if answer["error"]:
        raise OSError(answer["error"], os.strerror(answer["error"]))


# --- the process --------------------------------------------------------------------------------------------------


def _run(request: dict[str, Any], control: socket.socket, notify: int, parent: int) -> NoReturn:
    """Serves until the decoder ends. Never returns into the code that forked it."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _Server(request, control, notify).serve()
    except BaseException as error:
        os.write(2, f"gateway: {type(error).__name__}\n".encode())  # its message may contain the address
    os._exit(0)


class _Server:
    """Answers the decoder's requests, one after the other."""

    def __init__(self, request: dict[str, Any], control: socket.socket, notify: int) -> None:
        self._control, self._notify = control, notify
        self._url: str = request["url"]
        self._scheme = scheme_of(self._url)
        self._refused: str | None = None
        self._refusals: list[str] = []
        self._relay: HttpRelay | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._n_sockets = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._policy = ReachPolicy("", 0, tuple(request["allow"]))
        try:
            self._open(request)
        except AddressRefused as error:
            self._refused = str(error)

    def _open(self, request: dict[str, Any]) -> None:
        if self._scheme in ("udp", "rtp") and not self._url.partition("://")[2].lstrip("@").partition(":")[0]:
            return  # no host: it only receives
        self._policy = ReachPolicy.of(self._url, request["allow"], private=request["private"])
        if self._scheme in ("http", "https"):
            from reference_db.media.http_relay import HttpRelay

            self._relay = HttpRelay(self._url, self._policy, self._warn)

    def serve(self) -> None:
        confine_gateway()
        answers: dict[str, Callable[[dict[str, Any], bytes], dict[str, Any]]] = {
            "address": self._address,
            "problems": self._problems,
            "progress": self._progress,
            "connect": self._connect,
            "bind": self._bind,
            "send": self._send,
            "resolve": self._resolve,
        }
        while message := self._control.recv(MESSAGE_BYTES):
            line, _, data = message.partition(b"\n")
            question = json.loads(line)
            if question["do"] == "socket":
                self._answer_socket(question)
            else:
                self._control.send(json.dumps(answers[question["do"]](question, data)).encode())

    def _address(self, question: dict[str, Any], data: bytes) -> dict[str, Any]:
        if self._refused is not None:
            return {"refused": self._refused}
        if self._relay is not None:
            return {"url": self._relay.url, "port": self._relay.port}
        return {"url": self._url, "port": 0}

    def _problems(self, question: dict[str, Any], data: bytes) -> dict[str, Any]:
        last = self._relay.last_problem if self._relay is not None else None
        truncation = self._relay.truncation if self._relay is not None else None
        return {"refusals": self._refusals, "last": last, "truncation": truncation}

    def _progress(self, question: dict[str, Any], data: bytes) -> dict[str, Any]:
        if self._relay is None:
            return {}
        facts: dict[str, Any] = {"recording": self._relay.recording}
        if (progress := self._relay.progress) is not None:
            facts |= {"n_moves": progress.n_moves, "segment_s": progress.segment_s}
        return facts

    def _answer_socket(self, question: dict[str, Any]) -> None:
        family, kind = question["family"], question["kind"]
        try:
            if family not in FAMILIES or kind & ~KIND_FLAGS not in KINDS:
                raise PermissionError
            opened = socket.socket(family, kind, question["protocol"])
        except OSError as error:
            self._control.send(json.dumps({"error": error.errno or errno.EACCES}).encode())
            return
        while len(self._sockets) >= MAX_SOCKETS:
            self._sockets.pop(next(iter(self._sockets))).close()
        self._n_sockets += 1
        self._sockets[self._n_sockets] = opened
        answer = json.dumps({"error": 0, "socket": self._n_sockets}).encode()
        socket.send_fds(self._control, [answer], [opened.fileno()])

    def _connect(self, question: dict[str, Any], data: bytes) -> dict[str, Any]:
        opened, address = self._sockets.get(question["socket"]), bytes.fromhex(question["address"])
        if opened is None:
            return {"error": errno.EBADF}
        if self._is_refused(opened, address):
            return {"error": errno.EACCES}
        error = self._call(self._libc.connect(opened.fileno(), address, len(address)))
        if opened.type == socket.SOCK_STREAM:  # the decoder's copy goes on; ours would keep the connection open
            self._sockets.pop(question["socket"]).close()
        return {"error": error}

    def _bind(self, question: dict[str, Any], data: bytes) -> dict[str, Any]:
        opened, address = self._sockets.get(question["socket"]), bytes.fromhex(question["address"])
        if opened is None:
            return {"error": errno.EBADF}
        if self._relay is not None or opened.type != socket.SOCK_DGRAM:  # only datagrams are received
            return {"error": errno.EACCES}
        return {"error": self._call(self._libc.bind(opened.fileno(), address, len(address)))}

    def _send(self, question: dict[str, Any], data: bytes) -> dict[str, Any]:
        opened, address = self._sockets.get(question["socket"]), bytes.fromhex(question["address"])
        if opened is None:
            return {"error": errno.EBADF}
        if self._is_refused(opened, address):
            return {"error": errno.EACCES}
        sent = self._libc.sendto(opened.fileno(), data, len(data), question["flags"], address, len(address))
        return {"error": self._call(sent), "sent": sent}

    def _resolve(self, question: dict[str, Any], data: bytes) -> dict[str, Any]:
        host = question["host"]
        found: list[Any] = []
        # Only RTSP and RTMP servers may name other hosts; and a name is a message to its DNS server.
        if self._relay is None and (host.lower() == self._policy.host or self._scheme not in ("udp", "rtp")):
            with suppress(OSError, UnicodeError):
                found = socket.getaddrinfo(host, None, question["family"], question["kind"])
        return {"addresses": list(dict.fromkeys(one[4][0] for one in found))}

    def _is_refused(self, opened: socket.socket, address: bytes) -> bool:
        try:
            host, port = host_and_port_of(address)
            if self._relay is not None:
                if (host, port) != ("127.0.0.1", self._relay.port):
                    raise AddressRefused("It leads to an address that is not part of the stream.")
            else:
                self._policy.check(host, port, is_stream=opened.type == socket.SOCK_STREAM)
        except Exception as error:  # a check that fails refuses too
            sentence = str(error) if isinstance(error, AddressRefused) else "Its address could not be checked."
            if sentence not in self._refusals and len(self._refusals) < MAX_SOCKETS:
                self._refusals.append(sentence)
            return True
        return False

    def _call(self, result: int) -> int:
        return ctypes.get_errno() if result < 0 else 0

    def _warn(self, _kind: str, sentence: str) -> None:
        with suppress(OSError):  # the decoder has not read so many yet
            os.write(self._notify, sentence.replace("\n", " ").encode()[:1000] + b"\n")


def host_and_port_of(address: bytes) -> tuple[str, int]:
    """Numeric address and port of a `struct sockaddr`; raises AddressRefused if it is neither IPv4 nor IPv6."""
    family = struct.unpack_from("=H", address)[0] if len(address) >= 2 else 0
    if family == socket.AF_INET and len(address) >= 8:
        return socket.inet_ntop(socket.AF_INET, address[4:8]), struct.unpack_from(">H", address, 2)[0]
    if family == socket.AF_INET6 and len(address) >= 24:
        return socket.inet_ntop(socket.AF_INET6, address[8:24]), struct.unpack_from(">H", address, 2)[0]
    raise AddressRefused("It leads to an address that is not an internet address.")
