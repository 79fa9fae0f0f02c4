"""Each protocol against a real server on loopback: nginx for RTMP, VLC for RTSP, and our own air for the others."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.air import PACKET, Air, LivePlaylist, WebServer, on_air
from tests.watching import LENGTH_S, WAIT_S, Watching, watching, write_air


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_air(tmp_path_factory.mktemp("clips") / "air.ts")


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A program while open; what it says is kept for who asks why it ended."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, f"the server ended: {process.communicate()[0].decode()}"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.1)  # between two tries: a server does not say when it listens


def comes_whole(watched: Watching) -> None:
    """Seconds come, one after the other, each with the picture of its second."""
    watched.wait_for_state("up")
    watched.wait_for_more(5)
    assert len(watched.epochs) == 1
    assert watched.holes == []
    assert {sample.frame.picture.shape for sample in watched.samples} == {(192, 341, 3)}


def test_hls(clip: Path) -> None:
    playlist = LivePlaylist(Air(clip, LENGTH_S, start_s=0))
    with WebServer(playlist.answer) as web, watching(f"http://127.0.0.1:{web.port}/live.m3u8", mode="auto") as watched:
        comes_whole(watched)


def test_http_progressive(clip: Path) -> None:
    with on_air(Air(clip, LENGTH_S)) as web, watching(f"http://127.0.0.1:{web.port}/live", mode="auto") as watched:
        comes_whole(watched)


def test_udp(clip: Path) -> None:
    air, over, port = Air(clip, LENGTH_S), threading.Event(), free_port(socket.SOCK_DGRAM)

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            for piece in air.pieces():
                for start in range(0, len(piece), 7 * PACKET):
                    out.sendto(piece[start : start + 7 * PACKET], ("127.0.0.1", port))
                if over.is_set():
                    return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with watching(f"udp://127.0.0.1:{port}", mode="economy") as watched:
            comes_whole(watched)
    finally:
        over.set()
        thread.join()


def test_rtmp(clip: Path, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "nginx.conf").write_text(
        "load_module /usr/lib/nginx/modules/ngx_rtmp_module.so;\n"
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr;\n"
        "events { worker_connections 64; }\n"
        f"rtmp {{ server {{ listen 127.0.0.1:{port}; application live {{ live on; }} }} }}\n"
    )
    url = f"rtmp://127.0.0.1:{port}/live/s3cretKey"
    publish = ["ffmpeg", "-v", "error", "-re", "-stream_loop", "-1", "-i", str(clip), "-c", "copy", "-f", "flv", url]
    with ExitStack() as stack:
        nginx = stack.enter_context(running(["nginx", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)]))
        wait_for_port(port, nginx)
        publisher = stack.enter_context(running(publish, stdin=subprocess.DEVNULL))
        watched = stack.enter_context(watching(url))
        comes_whole(watched)
        publisher.kill()  # the studio goes away, and comes back
        watched.wait_for_state("stalled")
        stack.enter_context(running(publish, stdin=subprocess.DEVNULL))
        watched.wait_for_state("up")
        watched.wait_for_more()


@pytest.fixture
def open_clip(clip: Path) -> Iterator[Path]:
    """Where anybody may read it: VLC does not run as root, and others may not look into pytest's folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copy(clip, folder))


def test_rtsp(open_clip: Path) -> None:
    port = free_port()
    command = [
        "cvlc",
        "-q",
        "--repeat",
        str(open_clip),
        f"--sout=#rtp{{sdp=rtsp://127.0.0.1:{port}/live}}",
        "--sout-keep",
    ]
    user: dict[str, object] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    home = {"HOME": "/tmp", "PATH": os.environ["PATH"], "DBUS_SESSION_BUS_ADDRESS": "none:"}
    with running(command, env=home, cwd="/", stdin=subprocess.DEVNULL, **user) as vlc:
        wait_for_port(port, vlc)
        with watching(f"rtsp://user:s3cret@127.0.0.1:{port}/live") as watched:
            watched.wait_for_state("up")
            watched.wait_for_more(5)
            assert {sample.frame.picture.shape for sample in watched.samples} == {(192, 341, 3)}
