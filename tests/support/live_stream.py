"""A live stream for tests: an endless MPEG-TS made of one short clip, with a clock that can be set.

The clip is sent again and again with rewritten time stamps, so that stream time continues; `LiveStream.at_s` is the
second on air. It runs at wall-clock speed times `speed`, so that a test can cover a minute in seconds.
"""

from __future__ import annotations

import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

PACKET = 188
CLOCK = 90_000
WRAP = 1 << 33


def retimed(packets: bytes, shift: int) -> bytes:
    """The packets with every PCR, PTS and DTS moved by so many ticks of the 90-kHz clock, wrapped at 33 bits."""
    out = bytearray(packets)
    for start in range(0, len(out), PACKET):
        flags, at = out[start + 3], start + 4
        if flags & 0x20:
            if out[at] >= 7 and out[at + 1] & 0x10:
                _put_pcr(out, at + 2, shift)
            at += 1 + out[at]
        if out[start + 1] & 0x40 and flags & 0x10 and out[at : at + 3] == b"\0\0\1" and out[at + 3] >= 0xC0:
            which = out[at + 7] >> 6
            if which & 2:
                _put_stamp(out, at + 9, shift)
            if which == 3:
                _put_stamp(out, at + 14, shift)
    return bytes(out)


def _put_pcr(out: bytearray, at: int, shift: int) -> None:
    (high,) = struct.unpack_from(">Q", bytes(out[at : at + 6]) + b"\0\0")
    base, rest = high >> 31, (high >> 16) & 0x7FFF
    out[at : at + 6] = ((((base + shift) % WRAP) << 15) | rest).to_bytes(6, "big")


def _put_stamp(out: bytearray, at: int, shift: int) -> None:
    a, b, c = out[at], int.from_bytes(out[at + 1 : at + 3], "big"), int.from_bytes(out[at + 3 : at + 5], "big")
    ticks = ((a >> 1 & 7) << 30 | (b >> 1) << 15 | c >> 1) + shift
    ticks %= WRAP
    out[at] = a & 0xF1 | (ticks >> 30) << 1
    out[at + 1 : at + 3] = ((ticks >> 15 & 0x7FFF) << 1 | 1).to_bytes(2, "big")
    out[at + 3 : at + 5] = ((ticks & 0x7FFF) << 1 | 1).to_bytes(2, "big")


class LiveStream:
    """One stream. `clip` is MPEG-TS of `length_s` whole seconds with one key frame per second."""

    def __init__(self, clip: Path, length_s: int, *, speed: float = 1.0, start_s: float = 0.0) -> None:
        self._packets = clip.read_bytes()
        self._n_packets = len(self._packets) // PACKET
        self.length_s, self.speed = length_s, speed
        self.jump_s = start_s  # added to every time stamp; change it to make the clock jump
        self._started_s = time.monotonic()

    @property
    def at_s(self) -> float:
        return (time.monotonic() - self._started_s) * self.speed

    def use(self, clip: Path) -> None:
        """Sends this clip from now on: another size or codec, or sound only."""
        self._packets = clip.read_bytes()
        self._n_packets = len(self._packets) // PACKET

    def pieces(self, from_s: float | None = None, burst_s: float = 1.0) -> Iterator[bytes]:
        """The stream from now on in pieces of an eighth of a second, each at its time."""
        tick = max(0, round(((self.at_s if from_s is None else from_s) - burst_s) * 8))
        while True:
            while tick / 8 > self.at_s:
                wait_s = min(0.05, max(0.001, (tick / 8 - self.at_s) / self.speed))
                time.sleep(wait_s)  # a live server sends at the pace of time
            yield self.piece(tick)
            tick += 1

    def piece(self, tick: int) -> bytes:
        """The packets of the tick-th eighth of a second."""
        lap, part = divmod(tick, 8 * self.length_s)
        begin = part * self._n_packets // (8 * self.length_s) * PACKET
        end = (part + 1) * self._n_packets // (8 * self.length_s) * PACKET
        return retimed(self._packets[begin:end], round((lap * self.length_s + self.jump_s) * CLOCK))

    def seconds(self, first: int, n_seconds: int) -> bytes:
        """Whole seconds of the stream, as a segment contains them."""
        return b"".join(self.piece(tick) for tick in range(8 * first, 8 * (first + n_seconds)))


class WebServer:
    """A real web server on a free port of loopback; `answer` handles each request."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None], trust: ssl.SSLContext | None = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    answer(self)
                except OSError:
                    return  # the client closed the connection

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if trust is not None:
            self._server.socket = trust.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_stream(stream: LiveStream) -> WebServer:
    """HTTP progressive: each client joins at the current second."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "video/mp2t")
        request.end_headers()
        for piece in stream.pieces():
            request.wfile.write(piece)

    return WebServer(answer)


class LivePlaylist:
    """HLS: a moving playlist with the last three segments of a stream; `frozen_at` stops it at a segment."""

    def __init__(self, stream: LiveStream, segment_s: int = 2) -> None:
        self._stream, self._segment_s = stream, segment_s
        self.frozen_at: int | None = None
        self.missing: set[int] = set()
        self.discontinuity: int | None = None
        self.less = 0  # subtracted from every number, as after a restart of the packager

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        newest = self.frozen_at if self.frozen_at is not None else int(self._stream.at_s) // self._segment_s - 1
        if request.path == "/live.m3u8":
            body = self._playlist(max(0, newest - 2), newest).encode()
        else:
            number = int(request.path.removeprefix("/s").removesuffix(".ts")) + self.less
            if number > newest or number in self.missing:
                request.send_error(404)
                return
            body = self._stream.seconds(number * self._segment_s, self._segment_s)
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _playlist(self, first: int, last: int) -> str:
        lines = ["#EXTM3U", "#EXT-X-VERSION:3", f"#EXT-X-TARGETDURATION:{self._segment_s}"]
        lines += [f"#EXT-X-MEDIA-SEQUENCE:{first - self.less}"]
        for number in range(first, last + 1):
            if number == self.discontinuity:
                lines.append("#EXT-X-DISCONTINUITY")
            lines += [f"#EXTINF:{self._segment_s},", f"s{number - self.less}.ts"]
        return "\n".join(lines) + "\n"
