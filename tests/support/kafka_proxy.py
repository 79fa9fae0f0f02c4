"""A proxy that knows Kafka's requests apart: a client behind it may see the broker, and not its coordinators."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from tests.support.fault_proxy import Proxy

# JoinGroup, Heartbeat, LeaveGroup, SyncGroup; OffsetCommit, OffsetFetch, FindCoordinator; and those of transactions
COORDINATION = frozenset({8, 9, 10, 11, 12, 13, 14, 22, 24, 25, 26, 28})


class ApiProxy(Proxy):
    """Passes requests on from one port to another; a connection that asks for one of `shut` is closed."""

    def __init__(self, port: int, target: int) -> None:
        self.shut: frozenset[int] = frozenset()
        self.n_refused = 0
        super().__init__(target, port)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self.target)) as server:
            threading.Thread(target=_answer, args=(server, client), daemon=True).start()
            while len(size := client.recv(4, socket.MSG_WAITALL)) == 4:
                request = client.recv(struct.unpack(">I", size)[0], socket.MSG_WAITALL)
                if struct.unpack_from(">H", request)[0] in self.shut:
                    self.n_refused += 1
                    break
                server.sendall(size + request)
            for one in (client, server):  # whoever reads them wakes up
                one.shutdown(socket.SHUT_RDWR)


def _answer(server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := server.recv(1 << 16):
            client.sendall(data)
        client.shutdown(socket.SHUT_RDWR)
