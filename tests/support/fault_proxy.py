"""A TCP proxy, and one with the faults of networks: stall, trickle, reset, close, cut, refuse."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

Fault = Literal["none", "stall", "trickle", "reset", "eof", "refuse"]
TRICKLE_S = 0.5  # between two bytes: often enough that no socket time-out fires


class Proxy(ABC):
    """Listens on a loopback port (0: a free one); each connection has its own thread."""

    def __init__(self, target: int, port: int = 0) -> None:
        self.target = target
        self.n_connections = 0
        self._open = True
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.n_connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @abstractmethod
    def _serve(self, client: socket.socket) -> None:
        """Serves one connection to its end."""


class FaultProxy(Proxy):
    """Forwards everything to `target` unless `fault` is set, which affects open and new connections."""

    def __init__(self, target: int) -> None:
        self.fault: Fault = "none"
        self.cut_after: int | None = None  # bytes of a reply, then the connection is closed
        self.damage: Callable[[bytes], bytes] | None = None  # changes the bytes of replies
        super().__init__(target)

    def _serve(self, client: socket.socket) -> None:
        if self.fault == "refuse":
            reset(client)
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            reset(client)
            return
        client.settimeout(0.05)  # so that no read blocks when the socket is closed: it would stay open
        server.settimeout(0.05)
        over = threading.Event()
        pump = threading.Thread(target=_pump, args=(client, server, over), daemon=True)
        pump.start()
        try:
            self._answer(client, server)
        finally:
            over.set()
            pump.join()
            if self.fault == "reset":
                reset(client)
            client.close()
            server.close()

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        n_sent = 0
        while self._open:
            if self.fault in ("reset", "eof", "refuse"):
                return
            if self.fault == "stall":
                time.sleep(0.05)  # the fault itself: nothing passes until it ends
                continue
            try:
                data = server.recv(1 if self.fault == "trickle" else 1 << 16)
                if not data:
                    return
                if self.cut_after is not None:
                    data = data[: self.cut_after - n_sent]
                client.sendall(data if self.damage is None else self.damage(data))
            except TimeoutError:
                continue
            except OSError:
                return
            n_sent += len(data)
            if self.cut_after is not None and n_sent >= self.cut_after:
                return
            if self.fault == "trickle":
                time.sleep(TRICKLE_S)  # the fault itself: a byte now and then


def _pump(client: socket.socket, server: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        try:
            data = client.recv(1 << 16)
            if not data:
                return
            server.sendall(data)
        except TimeoutError:
            continue
        except OSError:
            return


def reset(connection: socket.socket) -> None:
    """Closes with an RST."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
