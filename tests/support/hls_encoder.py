"""A real encoder for tests: an ffmpeg process that writes HLS into a folder, and a real web server for that folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.live_stream import WebServer
from tests.support.stream_servers import Running, running

SEGMENT_S = 1


@contextmanager
def hls_encoder(clip: Path, folder: Path, *options: str) -> Iterator[Running]:
    """An ffmpeg that sends the clip in a loop, in real time, as a moving playlist of three segments."""
    folder.mkdir(exist_ok=True)
    command = ["ffmpeg", "-v", "error", "-re", "-stream_loop", "-1", "-i", str(clip), "-c", "copy", *options]
    command += ["-f", "hls", "-hls_time", str(SEGMENT_S), "-hls_list_size", "3"]
    command += ["-hls_flags", "delete_segments+omit_endlist", str(folder / "live.m3u8")]
    with running(command, stdin=subprocess.DEVNULL) as encoder:
        yield encoder


def serve_folder(folder: Path) -> WebServer:
    """An origin: serves what is in the folder now, whether the encoder lives or not."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        try:
            body = (folder / Path(urlsplit(request.path).path).name).read_bytes()
        except OSError:
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return WebServer(answer)
