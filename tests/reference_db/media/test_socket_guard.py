"""RTSP redirects: FFmpeg follows them by itself, so its own sockets are guarded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reference_db.errors import MediaError
from reference_db.media.addresses import AddressRefused, ReachPolicy
from reference_db.media.decoding import DecodingChild
from tests.chaos.hostile import Canary


@contextmanager
def redirecting(to: str) -> Iterator[int]:
    """An RTSP server that sends everybody elsewhere; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                    with client:
                        while asked := client.recv(4096).decode():
                            number = next(line for line in asked.splitlines() if line.lower().startswith("cseq"))
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
def test_a_redirect_to_a_private_address_is_followed_only_where_it_is_allowed(
    allow: tuple[str, ...], visits: int
) -> None:
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


def test_datagrams_of_the_named_host_may_use_any_port() -> None:
    reach = ReachPolicy("127.0.0.1", 554)
    reach.check("127.0.0.1", 554, is_stream=True)
    reach.check("127.0.0.1", 6000, is_stream=False)
    reach.check("8.8.8.8", 1, is_stream=True)
    for address, port, is_stream in (("127.0.0.1", 555, True), ("127.0.0.2", 554, True), ("10.0.0.1", 6000, False)):
        with pytest.raises(AddressRefused):
            reach.check(address, port, is_stream=is_stream)
