"""An RTSP proxy that does to the pictures what networks do: it loses packets, tears them and cuts them in the middle.

It stands between a player and a server that sends by datagrams. The player gets datagrams too or, `interleaved`, the
same packets within its TCP connection, as behind a firewall.
"""

from __future__ import annotations

import contextlib
import random
import re
import select
import socket
import struct

from tests.support.fault_proxy import Proxy, reset

HEADERS_END = b"\r\n\r\n"
FRAME = struct.Struct(">cBH")  # a dollar, the channel, the length of the packet that follows


class RtspProxy(Proxy):
    """Each share is of packets; set it at any time. `cut` resets the connection in the middle of the next packet."""

    def __init__(self, target: int, *, interleaved: bool, seed: int = 0) -> None:
        self.interleaved = interleaved
        self.lost = 0.0
        self.torn = 0.0  # packets whose middle is lost, so that nobody knows any more where the next begins
        self.cut = False
        self.n_spoilt = 0
        self.luck = random.Random(seed)
        super().__init__(target)

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            reset(client)
            return
        session = _Session(self, client, server)
        try:
            while self._open and session.step():
                pass
        finally:
            session.close()


class _Session:
    def __init__(self, proxy: RtspProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._asked, self._answered = bytearray(), bytearray()
        self._ways: dict[socket.socket, int] = {}  # where the server sends to -> port or channel of the player

    def step(self) -> bool:
        """Passes on what has come; False when somebody hung up."""
        sockets = [self._client, self._server, *self._ways]
        try:
            for ready in select.select(sockets, [], [], 0.05)[0]:
                if ready in self._ways:
                    self._pass_packet(ready.recv(1 << 16), self._ways[ready])
                    continue
                data = ready.recv(1 << 16)
                if not data:
                    return False
                if ready is self._client:
                    self._asked += data
                    for message in _messages(self._asked):
                        self._server.sendall(self._request(message))
                else:
                    self._answered += data
                    for message in _messages(self._answered):
                        self._client.sendall(self._reply(message))
        except OSError:
            return False
        return True

    def close(self) -> None:
        for one in (self._client, self._server, *self._ways):
            with contextlib.suppress(OSError):
                one.close()

    def _request(self, message: bytes) -> bytes:
        """With our ports where the player names its own."""
        wanted = re.search(rb"Transport: [^\r]*?(interleaved|client_port)=(\d+)-(\d+)[^\r]*", message)
        if wanted is None or (wanted[1] == b"interleaved") != self._proxy.interleaved:
            return message  # the server refuses what it does not have, and the player asks for the other
        ours = _two_ports()
        self._ways |= {one: int(theirs) for one, theirs in zip(ours, wanted.group(2, 3), strict=True)}
        first = ours[0].getsockname()[1]
        asked = f"Transport: RTP/AVP/UDP;unicast;client_port={first}-{first + 1}".encode()
        return message.replace(wanted[0], asked)

    def _reply(self, message: bytes) -> bytes:
        given = re.search(rb"Transport: [^\r]*", message)
        if given is None or not self._ways or not self._proxy.interleaved:
            return message
        low, high = sorted(self._ways.values())[-2:]
        return message.replace(given[0], f"Transport: RTP/AVP/TCP;unicast;interleaved={low}-{high}".encode())

    def _pass_packet(self, packet: bytes, place: int) -> None:
        proxy = self._proxy
        if proxy.luck.random() < proxy.lost:
            proxy.n_spoilt += 1
            return
        if not proxy.interleaved:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                out.sendto(packet, ("127.0.0.1", place))
            return
        framed = FRAME.pack(b"$", place, len(packet)) + packet
        if proxy.cut:
            proxy.cut = False
            proxy.n_spoilt += 1
            self._client.sendall(framed[: len(framed) // 2])
            reset(self._client)
            raise ConnectionResetError
        if proxy.luck.random() < proxy.torn:
            proxy.n_spoilt += 1
            framed = framed[: len(framed) // 3] + framed[len(framed) // 2 :]
        self._client.sendall(framed)


def _messages(content: bytearray) -> list[bytes]:
    """Takes whole messages from the front; packets in between, which only report, are left out."""
    found = []
    while content:
        if content[:1] == b"$":
            length = 4 + int.from_bytes(content[2:4], "big") if len(content) >= 4 else 4
            if len(content) < length:
                break
        else:
            end = content.find(HEADERS_END)
            body = re.search(rb"content-length: *(\d+)", content[: max(end, 0)], re.I)
            length = end + len(HEADERS_END) + (int(body[1]) if body else 0)
            if end < 0 or len(content) < length:
                break
            found.append(bytes(content[:length]))
        del content[:length]
    return found


def _two_ports() -> tuple[socket.socket, socket.socket]:
    """An even port and the one after it, as RTP and its reports have them."""
    while True:
        first = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        second = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            if port % 2 == 0:
                second.bind(("127.0.0.1", port + 1))
                return first, second
        except OSError:
            pass  # somebody has it
        first.close()
        second.close()
