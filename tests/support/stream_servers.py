"""Real stream servers on free loopback ports: nginx for RTMP, VLC for RTSP."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.running_source import WAIT_S

Running = subprocess.Popen[bytes]


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], **options: object) -> Iterator[Running]:
    """A running program; its output is captured for error messages."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def wait_for_port(port: int, process: Running) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, f"the server exited: {process.communicate()[0].decode()}"
            assert time.monotonic() < deadline, "the server is not listening"
            time.sleep(0.1)  # polls: a server does not signal that it listens


@contextmanager
def rtmp_server(folder: Path) -> Iterator[int]:
    """The port of an nginx that relays streams published at /live/ANY-NAME."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    (folder / "nginx.conf").write_text(
        "load_module /usr/lib/nginx/modules/ngx_rtmp_module.so;\n"
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\n"
        "events { worker_connections 64; }\n"
        f"rtmp {{ server {{ listen 127.0.0.1:{port}; application live {{ live on; }} }} }}\n"
    )
    with running(["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]) as nginx:
        wait_for_port(port, nginx)
        yield port


@contextmanager
def published(clip: Path, url: str) -> Iterator[Running]:
    """An ffmpeg that publishes the clip in a loop."""
    command = ["ffmpeg", "-v", "error", "-re", "-stream_loop", "-1", "-i", str(clip), "-c", "copy", "-f", "flv", url]
    with running(command, stdin=subprocess.DEVNULL) as publisher:
        yield publisher


@contextmanager
def rtsp_server(clip: Path) -> Iterator[int]:
    """The port of a VLC that serves the clip in a loop at /live, over UDP only."""
    port = free_port()
    user: dict[str, object] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    home = {"HOME": "/tmp", "PATH": os.environ["PATH"], "DBUS_SESSION_BUS_ADDRESS": "none:"}
    with ExitStack() as stack:
        # World-readable: VLC does not run as root, and other users cannot read pytest's folders.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        open_clip = shutil.copy(clip, folder)
        sout = f"--sout=#rtp{{sdp=rtsp://127.0.0.1:{port}/live}}"
        command = ["cvlc", "-q", "--repeat", str(open_clip), sout, "--sout-keep"]
        vlc = stack.enter_context(running(command, env=home, cwd="/", stdin=subprocess.DEVNULL, **user))
        wait_for_port(port, vlc)
        yield port
