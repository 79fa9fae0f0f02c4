"""A name server that hangs, beside a running `serve`: the channel whose name it should know waits, no other does.

The monitor sees a file system of its own, in which the name server is ours; that needs root.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.live_stream import Air, on_air
from tests.support.running_source import LENGTH_S, write_air
from tests.support.serve_process import Serve, until

ADDRESS = ("127.9.9.9", 53)  # resolv.conf knows no other port
OUR_NAMES = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"')


class NameServer:
    """Hears every question and says nothing, until it `answers`: then every name is this machine."""

    def __init__(self) -> None:
        self.answers, self.n_asked = False, 0
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
                question, asker = self._socket.recvfrom(4096)
            except OSError:
                return
            self.n_asked += 1
            if self.answers:
                self._socket.sendto(_answer(question), asker)


def _answer(question: bytes) -> bytes:
    """127.0.0.1 for whoever asks for an address of the old kind, nothing for the rest."""
    end = question.index(b"\0", 12) + 5  # of the name, its type and class
    is_ipv4 = question[end - 4 : end - 2] == b"\0\1"
    head = question[:2] + b"\x81\x80" + b"\0\1" + (b"\0\1" if is_ipv4 else b"\0\0") + bytes(4)
    record = b"\xc0\x0c\0\1\0\1" + bytes(4) + b"\0\4" + bytes([127, 0, 0, 1])
    return head + question[12:end] + (record if is_ipv4 else b"")


def hanging(folder: Path) -> dict[str, float]:
    """Figures; raises AssertionError where the other channel noticed, or the first did not recover by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    names = folder / "resolv.conf"
    names.write_text(f"nameserver {ADDRESS[0]}\n")
    clip = write_air(folder / "air.ts")
    with NameServer() as server, on_air(Air(clip, LENGTH_S)) as web, on_air(Air(clip, LENGTH_S)) as other:
        config = folder / "copywatch.yaml"
        config.write_text(
            "data_dir: data\nweb: {port: 0}\nchannels:\n"
            f'  - {{name: named, url: "http://studio.example.org:{web.port}/", mode: economy}}\n'
            f'  - {{name: witness, url: "http://127.0.0.1:{other.port}/", mode: economy}}\n'
        )
        with Serve(config, program=[*OUR_NAMES, str(names), sys.executable, "-m", "monitor.cli"]) as serve:
            states = [{"channel": "named", "state": state} for state in ("stalled", "failed", "up")]

            def is_down() -> bool:
                return any(serve.value("copywatch_channel_state", **state) == 1 for state in states[:2])

            until(lambda: is_down() and server.n_asked > 0, lambda: "".join(serve.log))
            assert serve.problems() == {}
            n_asked, server.answers = server.n_asked, True
            until(lambda: serve.value("copywatch_channel_state", **states[2]) == 1, lambda: "".join(serve.log))
            until(lambda: serve.value("copywatch_frames_waiting", channel="witness") == 0, lambda: "seconds wait")
            assert serve.value("copywatch_gap_seconds_total", channel="witness") <= 0
            assert serve.value("copywatch_epochs_total", channel="witness") == 1
            seconds = serve.value("copywatch_frames_received_total", channel="witness")
            return {"asked_in_vain": n_asked, "witness_seconds": seconds}
