"""Each protocol against a real server on loopback: nginx for RTMP, VLC for RTSP, and our own servers for the rest."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.live_stream import PACKET, LivePlaylist, LiveStream, WebServer, serve_stream
from tests.support.running_source import LENGTH_S, RunningSource, running_source, write_stream_clip
from tests.support.stream_servers import free_port, published, rtmp_server, rtsp_server

pytestmark = pytest.mark.system  # nginx, VLC, ffmpeg


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream_clip(tmp_path_factory.mktemp("clips") / "air.ts")


def check_complete(running: RunningSource) -> None:
    """Samples arrive, none is missing, and their pictures have the expected size."""
    running.wait_for_state("up")
    running.wait_for_more(5)
    assert len(running.epochs) == 1
    assert running.holes == []
    assert {sample.frame.picture.shape for sample in running.samples} == {(192, 341, 3)}


def test_hls(clip: Path) -> None:
    playlist = LivePlaylist(LiveStream(clip, LENGTH_S, start_s=0))
    with (
        WebServer(playlist.answer) as web,
        running_source(f"http://127.0.0.1:{web.port}/live.m3u8", mode="auto") as running,
    ):
        check_complete(running)


def test_http_progressive(clip: Path) -> None:
    with (
        serve_stream(LiveStream(clip, LENGTH_S)) as web,
        running_source(f"http://127.0.0.1:{web.port}/live", mode="auto") as running,
    ):
        check_complete(running)


def test_udp(clip: Path) -> None:
    stream, stopped, port = LiveStream(clip, LENGTH_S), threading.Event(), free_port(socket.SOCK_DGRAM)

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            for piece in stream.pieces():
                for start in range(0, len(piece), 7 * PACKET):
                    out.sendto(piece[start : start + 7 * PACKET], ("127.0.0.1", port))
                if stopped.is_set():
                    return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with running_source(f"udp://127.0.0.1:{port}", mode="economy") as running:
            check_complete(running)
    finally:
        stopped.set()
        thread.join()


def test_rtmp(clip: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = f"rtmp://127.0.0.1:{stack.enter_context(rtmp_server(tmp_path))}/live/s3cretKey"
        publisher = stack.enter_context(published(clip, url))
        running = stack.enter_context(running_source(url))
        check_complete(running)
        publisher.kill()  # the publisher fails and comes back
        running.wait_for_state("stalled")
        stack.enter_context(published(clip, url))
        running.wait_for_state("up")
        running.wait_for_more()


def test_rtsp(clip: Path, tmp_path: Path) -> None:
    recording = tmp_path / "recording.ts"
    recording.write_bytes(LiveStream(clip, LENGTH_S).seconds(0, 300))  # VLC closes the connection where it repeats
    with rtsp_server(recording) as port, running_source(f"rtsp://user:s3cret@127.0.0.1:{port}/live") as running:
        check_complete(running)
