"""The socket guard: FFmpeg follows RTSP redirects by itself, so its own sockets are checked."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import pytest

from reference_db.errors import MediaError
from reference_db.media.addresses import AddressRefused, ReachPolicy
from reference_db.media.decoding import DecodingChild
from reference_db.media.socket_guard import guard, imports
from reference_db.media.socket_guard.gateway import Gateway
from tests.chaos.hostile import Canary

README = Path(guard.__file__).with_name("README.md")
# Functions of libc by which a library could reach an address without `connect` and `sendto`.
UNGUARDED = {b"sendmsg", b"sendmmsg", b"syscall", b"dlsym", b"io_uring_setup"}


@contextmanager
def redirecting(to: str) -> Iterator[int]:
    """An RTSP server that answers every request with a redirect; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                    with client:
                        while request := client.recv(4096).decode():
                            number = next(line for line in request.splitlines() if line.lower().startswith("cseq"))
                            answer = f"RTSP/1.0 302 Moved\r\n{number}\r\nLocation: {to}\r\n\r\n"
                            client.sendall(answer.encode())
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(("allow", "visits"), [((), 0), (("127.0.0.0/8",), 1)])
def test_a_redirect_to_a_private_address_is_followed_only_if_it_is_allowed(allow: tuple[str, ...], visits: int) -> None:
    with (
        Canary() as canary,
        redirecting(f"rtsp://127.0.0.1:{canary.port}/inner") as port,
        DecodingChild(f"rtsp://u:s3cret@127.0.0.1:{port}/live", live=True, allow=allow) as child,
    ):
        with pytest.raises(MediaError) as caught:
            list(child.frames())
        assert (child.failure == "refused") == (not allow)
        assert "s3cret" not in str(caught.value)
        assert min(canary.visits, 1) == visits


OWN_NAMES = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
OPENING = """
import sys
from reference_db.errors import MediaError
from reference_db.media.decoding import DecodingChild
with DecodingChild(sys.argv[1], live=True, private=sys.argv[2] == "private", opening_s=20) as child:
    try:
        child.info()
    except MediaError as error:
        print(child.failure, error)
"""


@pytest.mark.system
@pytest.mark.parametrize("scheme", ["http", "rtsp", "rtmp"])
def test_a_name_that_leads_inside_is_connected_to_only_if_an_admin_named_it_as_private(
    scheme: str, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 rebind.example\n")
    with Canary() as canary:
        for named, visits in (("", 0), ("private", 1)):
            opening = [*OWN_NAMES, str(hosts), sys.executable, "-c", OPENING]
            url = f"{scheme}://rebind.example:{canary.port}/x"
            done = subprocess.run([*opening, url, named], capture_output=True, text=True)
            assert min(canary.visits, 1) == visits, done
            assert done.stdout.startswith("refused ") == (not named), done


def test_datagrams_of_the_configured_host_may_use_any_port() -> None:
    policy = ReachPolicy("127.0.0.1", 554)
    policy.check("127.0.0.1", 554, is_stream=True)
    policy.check("127.0.0.1", 6000, is_stream=False)
    policy.check("8.8.8.8", 1, is_stream=True)
    for address, port, is_stream in (("127.0.0.1", 555, True), ("127.0.0.2", 554, True), ("10.0.0.1", 6000, False)):
        with pytest.raises(AddressRefused):
            policy.check(address, port, is_stream=is_stream)


def test_the_page_names_the_installed_versions_as_checked() -> None:
    libavformat = ".".join(map(str, av.library_versions["libavformat"]))
    row = f"| {av.__version__} | {av.ffmpeg_version_info} | {libavformat} | {platform.machine()}, glibc |"
    assert row in README.read_text().splitlines(), f"check this PyAV as {README} says, then add: {row}"


def test_libavformat_reaches_addresses_by_guarded_functions_only() -> None:
    imported = {name for name, _ in imports.imported_functions(imports.base_address(guard.LIBRARY))}
    assert {b"socket", b"connect", b"bind", b"sendto", b"getaddrinfo"} <= imported
    assert imported & UNGUARDED == set()


@pytest.mark.parametrize("library", ["no-such-library", "libpython", "[stack]"])
def test_a_library_that_cannot_be_patched_is_refused(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LIBRARY", library)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(AddressRefused, match="RTSP and RTMP are disabled"):
        guard.install(Gateway(ours, -1))
