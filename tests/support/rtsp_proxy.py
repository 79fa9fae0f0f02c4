"""An RTSP proxy that damages the stream as networks do: it drops packets, truncates them and resets inside one.

The server sends datagrams. The player receives datagrams too or, if `interleaved`, the same packets inside its TCP
connection, as behind a firewall.
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
FRAME = struct.Struct(">cBH")  # a dollar sign, the channel, the length of the packet


class RtspProxy(Proxy):
    """`lost` and `torn` are shares of packets and may change at any time. `cut` resets inside the next packet."""

    def __init__(self, target: int, *, interleaved: bool, seed: int = 0) -> None:
        self.interleaved = interleaved
        self.lost = 0.0
        self.torn = 0.0  # packets that lose their middle, so that the start of the next is unknown
        self.cut = False
        self.n_damaged = 0
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
        self._requests, self._replies = bytearray(), bytearray()
        self._targets: dict[socket.socket, int] = {}  # receiving socket -> port or channel of the player

    def step(self) -> bool:
        """Forwards received data; False when a side has closed the connection."""
        sockets = [self._client, self._server, *self._targets]
        try:
            for ready in select.select(sockets, [], [], 0.05)[0]:
                if ready in self._targets:
                    self._pass_packet(ready.recv(1 << 16), self._targets[ready])
                    continue
                data = ready.recv(1 << 16)
                if not data:
                    return False
                if ready is self._client:
                    self._requests += data
                    for message in _messages(self._requests):
                        self._server.sendall(self._request(message))
                else:
                    self._replies += data
                    for message in _messages(self._replies):
                        self._client.sendall(self._reply(message))
        except OSError:
            return False
        return True

    def close(self) -> None:
        for one in (self._client, self._server, *self._targets):
            with contextlib.suppress(OSError):
                one.close()

    def _request(self, message: bytes) -> bytes:
        """The request with our ports in place of the player's."""
        wanted = re.search(rb"Transport: [^\r]*?(interleaved|client_port)=(\d+)-(\d+)[^\r]*", message)
        if wanted is None or (wanted[1] == b"interleaved") != self._proxy.interleaved:
            return message  # the server rejects it, and the player requests the other transport
        ours = _two_ports()
        self._targets |= {one: int(theirs) for one, theirs in zip(ours, wanted.group(2, 3), strict=True)}
        first = ours[0].getsockname()[1]
        transport = f"Transport: RTP/AVP/UDP;unicast;client_port={first}-{first + 1}".encode()
        return message.replace(wanted[0], transport)

    def _reply(self, message: bytes) -> bytes:
        given = re.search(rb"Transport: [^\r]*", message)
        if given is None or not self._targets or not self._proxy.interleaved:
            return message
        low, high = sorted(self._targets.values())[-2:]
        return message.replace(given[0], f"Transport: RTP/AVP/TCP;unicast;interleaved={low}-{high}".encode())

    def _pass_packet(self, packet: bytes, place: int) -> None:
        proxy = self._proxy
        if proxy.luck.random() < proxy.lost:
            proxy.n_damaged += 1
            return
        if not proxy.interleaved:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                out.sendto(packet, ("127.0.0.1", place))
            return
        framed = FRAME.pack(b"$", place, len(packet)) + packet
        if proxy.cut:
            proxy.cut = False
            proxy.n_damaged += 1
            self._client.sendall(framed[: len(framed) // 2])
            reset(self._client)
            raise ConnectionResetError
        if proxy.luck.random() < proxy.torn:
            proxy.n_damaged += 1
            framed = framed[: len(framed) // 3] + framed[len(framed) // 2 :]
        self._client.sendall(framed)


def _messages(content: bytearray) -> list[bytes]:
    """Removes complete messages from the front and returns them; interleaved reports are dropped."""
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
    """An even port and the next one, as RTP and RTCP use them."""
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
            pass  # in use
        first.close()
        second.close()
