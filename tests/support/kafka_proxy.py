"""A proxy that can block kinds of Kafka requests: a client then reaches the broker, but not its coordinators."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from tests.support.fault_proxy import Proxy

# JoinGroup, Heartbeat, LeaveGroup, SyncGroup; OffsetCommit, OffsetFetch, FindCoordinator; and those of transactions
COORDINATION = frozenset({8, 9, 10, 11, 12, 13, 14, 22, 24, 25, 26, 28})


class ApiProxy(Proxy):
    """Forwards requests from one port to another; closes a connection that sends one of `blocked`."""

    def __init__(self, port: int, target: int) -> None:
        self.blocked: frozenset[int] = frozenset()
        self.n_refused = 0
        super().__init__(target, port)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self.target)) as server:
            threading.Thread(target=_forward_replies, args=(server, client), daemon=True).start()
            while len(size := client.recv(4, socket.MSG_WAITALL)) == 4:
                request = client.recv(struct.unpack(">I", size)[0], socket.MSG_WAITALL)
                if struct.unpack_from(">H", request)[0] in self.blocked:
                    self.n_refused += 1
                    break
                server.sendall(size + request)
            for one in (client, server):  # wakes up their readers
                one.shutdown(socket.SHUT_RDWR)


def _forward_replies(server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := server.recv(1 << 16):
            client.sendall(data)
        client.shutdown(socket.SHUT_RDWR)
