"""Hostile addresses: what a playlist or a redirect may name to reach private addresses, and whether it does.

A canary listens on loopback, over IPv4 and IPv6, on a port that no setting allows. A connection to it is a breach.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self

from reference_db.media.addresses import ReachPolicy
from reference_db.media.http_relay import HttpRelay
from tests.support.live_stream import WebServer

AT_ONCE = 8  # visits; most wait for an unknown host name
# Notations of this host.
HOSTS = (
    *(
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "127.127.127.127",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "017700000001",
    ),
    *("0", "0.0.0.0", "localhost", "LOCALHOST", "localhost.", "ip6-localhost", "[::1]", "[::]", "[::ffff:127.0.0.1]"),
    *(
        "[0:0:0:0:0:ffff:7f00:1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[::1%25lo]",
        "127。0。0。1",
        "①②⑦.0.0.1",
        "user@127.0.0.1",
    ),
    *(
        "cdn.example.com@127.0.0.1",
        "127.0.0.1\\@cdn.example.com",
        "127.0.0.1#@cdn.example.com",
        "127.0.0.1%2f@cdn.example.com",
    ),
)
SHAPES = (
    "http://{host}:{port}/x.ts",
    "https://{host}:{port}/x.ts",
    "//{host}:{port}/x.ts",
    "HTTP://{host}:{port}/",
    "http:\\\\{host}:{port}\\x",
)
OTHERS = (
    *(
        "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "FILE:/etc/passwd",
        "/etc/passwd",
        "..//../etc/passwd",
        "concat:a|b",
    ),
    *(
        "tcp://{host}:{port}",
        "udp://{host}:{port}",
        "rtp://{host}:{port}",
        "rtsp://{host}:{port}/x",
        "rtmp://{host}:{port}/x/y",
    ),
    *(
        "gopher://{host}:{port}/_x",
        "ftp://{host}:{port}/x",
        "sftp://{host}:{port}/x",
        "tls://{host}:{port}",
        "unix:/run/x.sock",
    ),
    *(
        "crypto+http://{host}:{port}/x",
        "crypto:http://{host}:{port}/x",
        "hls+http://{host}:{port}/x",
        "async:http://{host}:{port}/x",
    ),
    *(
        "cache:http://{host}:{port}/x",
        "subfile,,start,0,end,9,,:http://{host}:{port}/x",
        "data:video/mp2t;base64,AAAA",
        "pipe:0",
    ),
    *(
        "http://{host}:{port}/\r\nX: y",
        "http://{host}:{port}/ x",
        "http://[{host}:{port}/",
        "http://:{port}/",
        "http://",
        "://",
        "javascript:1",
    ),
)


class Canary:
    """Listens and counts connections."""

    def __init__(self) -> None:
        self.visits = 0
        self._listeners = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._listeners[0].getsockname()[1]
        with suppress(OSError):  # a machine without IPv6
            self._listeners.append(socket.create_server(("::1", self.port), family=socket.AF_INET6))
        for listener in self._listeners:
            threading.Thread(target=self._listen, args=(listener,), daemon=True).start()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def addresses(port: int) -> list[str]:
    shapes = [shape.replace("{host}", host) for shape in SHAPES for host in HOSTS]
    shapes += [other.replace("{host}", "127.0.0.1") for other in OTHERS]
    return [one.replace("{port}", str(port)) for one in shapes]


def _visit(link: str) -> None:
    with suppress(OSError, ValueError):
        urllib.request.urlopen(link, timeout=20).close()


def run() -> dict[str, Any]:
    """Tries them all as playlist lines, as keys and as redirects; `failures` counts breaches and unreplaced links."""
    with Canary() as canary:
        urls = addresses(canary.port)
        plain = [url for url in urls if not set(url) & set('\r\n"')]
        playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n"
        playlist += "".join(f'#EXT-X-KEY:METHOD=AES-128,URI="{url}"\n#EXTINF:1,\n{url}\n' for url in plain)

        def answer(request: BaseHTTPRequestHandler) -> None:
            if request.path == "/live.m3u8":
                request.send_response(200)
                request.end_headers()
                request.wfile.write(playlist.encode())
            elif (number := request.path.removeprefix("/to/")).isdigit():
                request.send_response(302)
                request.send_header("Location", plain[int(number)].encode().decode("latin-1"))
                request.end_headers()
            else:  # a line that names another file of the same server
                request.send_error(404)

        with WebServer(answer) as web:
            base = f"http://127.0.0.1:{web.port}"
            relay = HttpRelay(f"{base}/live.m3u8", ReachPolicy.of(f"{base}/live.m3u8"))
            with urllib.request.urlopen(relay.url, timeout=20) as reply:
                lines = reply.read().decode("utf-8", "replace").splitlines()
            links = [word for line in lines for word in line.split('"') if "://" in word]
            links += [relay.local_url(f"{base}/to/{n}") for n in range(len(plain))]
            n_direct = sum(not link.startswith(f"http://127.0.0.1:{relay.port}/") for link in links)
            with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
                list(pool.map(_visit, links))
    figures = {"addresses": len(urls), "tried": len(links), "reached": canary.visits, "not_replaced": n_direct}
    return {**figures, "failures": canary.visits + n_direct}
