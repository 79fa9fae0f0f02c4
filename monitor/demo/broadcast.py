"""The demo's broadcast: an MPEG-TS file in, a live stream over HTTP on loopback out.

The stream has one clock, as a channel has: it starts with the first client, and later connections join at its current
second. A `Pace` says how far it may be, so that the demo can follow the wall clock or the progress of the monitor.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

# Sent at once at the start, as relays do, so that a reader can detect the format without waiting.
BURST_S = 4.0
_PACKET_BYTES = 188
_POLL_S = 0.05

Pace = Callable[[], float]  # stream second up to which bytes may be sent now


@dataclass(frozen=True, slots=True)
class _Chunk:
    at_s: float  # stream second at which its first byte is due
    start: int
    end: int


def wall_clock() -> Pace:
    """One stream second per second from now on, after a burst."""
    started = time.monotonic()
    return lambda: BURST_S + time.monotonic() - started


class BroadcastServer:
    """Serves the file at `url` while open: once, or with `repeat` again for clients that connect after its end.

    `pace` is called when a broadcast starts; `ended` is set when the last byte of the first one was sent.
    """

    def __init__(self, path: Path, pace: Callable[[], Pace] = wall_clock, *, repeat: bool = False) -> None:
        self._bytes = path.read_bytes()
        self._chunks = _chunks(self._bytes)
        self._start_pace = pace
        self._repeat = repeat
        self._lock = threading.Lock()
        self._pace: Pace | None = None  # of the running broadcast
        self._stop = threading.Event()
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="broadcast", daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/{path.name}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if server.ended.is_set() and not server._repeat:
                    self.send_error(404, "the broadcast is over")
                    return
                self.send_response(200)
                self.send_header("Content-Type", "video/mp2t")
                # In chunks, so that the end differs from a lost connection.
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    if server._transmit(self._send):
                        self._send(b"")
                except OSError:
                    return  # the client closed the connection

            def _send(self, piece: bytes) -> None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing: the demo prints its own lines."""

        return Handler

    def _transmit(self, send: Callable[[bytes], None]) -> bool:
        """True when the last byte was sent, False when the server is being closed."""
        pace, current_s = self._join()
        for chunk in self._chunks:
            if chunk.at_s < current_s:
                continue  # before this client connected
            while chunk.at_s > pace():
                if self._stop.wait(_POLL_S):
                    return False
            send(self._bytes[chunk.start : chunk.end])
        with self._lock:
            self._pace = None
        self.ended.set()
        return True

    def _join(self) -> tuple[Pace, float]:
        """The pace of the running broadcast and its current second; starts a broadcast if none runs."""
        with self._lock:
            if self._pace is None:
                self._pace = self._start_pace()
                return self._pace, 0.0
            return self._pace, self._pace() - BURST_S


def _chunks(stream: bytes) -> list[_Chunk]:
    """The stream cut at its clock values (PCR), so that each piece has its time."""
    marks = [(0, 0.0)]
    for start in range(0, len(stream) - _PACKET_BYTES + 1, _PACKET_BYTES):
        packet = stream[start : start + _PACKET_BYTES]
        if packet[3] & 0x20 and packet[4] >= 7 and packet[5] & 0x10:
            marks.append((start, (int.from_bytes(packet[6:11], "big") >> 7) / 90_000))
    first_s = marks[1][1] if len(marks) > 1 else 0.0
    ends = [start for start, _ in marks[1:]] + [len(stream)]
    return [
        _Chunk(max(0.0, at_s - first_s), start, end)
        for (start, at_s), end in zip(marks, ends, strict=True)
        if end > start
    ]
