"""A name server that does not respond: in a running `serve` only the channel that needs it waits, no other.

The monitor runs in its own mount namespace, in which resolv.conf names our server; this needs root.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.live_stream import LiveStream, serve_stream
from tests.support.running_source import LENGTH_S, write_stream_clip
from tests.support.serve_process import ServeProcess, wait_until

ADDRESS = ("127.9.9.9", 53)  # resolv.conf allows no other port
OWN_RESOLVER = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"')


class NameServer:
    """Ignores every query until `answers` is set: then every name is this machine."""

    def __init__(self) -> None:
        self.answers, self.n_queries = False, 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(ADDRESS)
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                query, client = self._socket.recvfrom(4096)
            except OSError:
                return
            self.n_queries += 1
            if self.answers:
                self._socket.sendto(_answer(query), client)


def _answer(query: bytes) -> bytes:
    """127.0.0.1 for an IPv4 query, an empty reply for others."""
    end = query.index(b"\0", 12) + 5  # end of name, type and class
    is_ipv4 = query[end - 4 : end - 2] == b"\0\1"
    head = query[:2] + b"\x81\x80" + b"\0\1" + (b"\0\1" if is_ipv4 else b"\0\0") + bytes(4)
    record = b"\xc0\x0c\0\1\0\1" + bytes(4) + b"\0\4" + bytes([127, 0, 0, 1])
    return head + query[12:end] + (record if is_ipv4 else b"")


def hanging(folder: Path) -> dict[str, float]:
    """Figures; AssertionError if the other channel was affected, or the first did not recover."""
    folder.mkdir(parents=True, exist_ok=True)
    resolver = folder / "resolv.conf"
    resolver.write_text(f"nameserver {ADDRESS[0]}\n")
    clip = write_stream_clip(folder / "stream.ts")
    with (
        NameServer() as server,
        serve_stream(LiveStream(clip, LENGTH_S)) as web,
        serve_stream(LiveStream(clip, LENGTH_S)) as other,
    ):
        config = folder / "copywatch.yaml"
        config.write_text(
            "data_dir: data\nweb: {port: 0}\nchannels:\n"
            f'  - {{name: named, url: "http://tv.example.org:{web.port}/", mode: economy, private: true}}\n'
            f'  - {{name: witness, url: "http://127.0.0.1:{other.port}/", mode: economy}}\n'
        )
        with ServeProcess(config, program=[*OWN_RESOLVER, str(resolver), sys.executable, "-m", "monitor.cli"]) as serve:
            states = [{"channel": "named", "state": state} for state in ("stalled", "failed", "up")]

            def is_down() -> bool:
                return any(serve.value("copywatch_channel_state", **state) == 1 for state in states[:2])

            wait_until(lambda: is_down() and server.n_queries > 0, lambda: "".join(serve.log))
            assert serve.problems() == {}
            n_queries, server.answers = server.n_queries, True
            wait_until(lambda: serve.value("copywatch_channel_state", **states[2]) == 1, lambda: "".join(serve.log))
            wait_until(lambda: serve.value("copywatch_frames_waiting", channel="witness") == 0, lambda: "seconds wait")
            assert serve.value("copywatch_gap_seconds_total", channel="witness") <= 0
            assert serve.value("copywatch_epochs_total", channel="witness") == 1
            seconds = serve.value("copywatch_frames_received_total", channel="witness")
            return {"unanswered_queries": n_queries, "witness_seconds": seconds}
