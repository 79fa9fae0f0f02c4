"""The decoding child's program: one request on stdin, records on stdout. `DecodingChild` starts it.

A channel has no frames until it runs, so it imports little: neither torch nor numpy, and FFmpeg only after the gateway
was forked, which imports the HTTP relay meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from reference_db.media.addresses import AddressRefused, scheme_of
from reference_db.media.child_process import receive_request
from reference_db.media.frames import RECORD

if TYPE_CHECKING:
    from reference_db.media.socket_guard.gateway import Gateway

KEY_WAIT_S = 1.5  # a key picture's record can wait for the next picture, if there is one
RECORD_BYTES = 1 << 18  # a picture's record is one write: each write wakes the parent


def main() -> None:
    """Answers one request and exits."""
    request, pipe = receive_request(RECORD_BYTES)
    out = RecordWriter(pipe)
    try:
        gateway = start_gateway(request, pipe.fileno())
    except AddressRefused as error:
        _fail(out, "unsupported", str(error))
    import av

    from reference_db.media.decoding_session import DecodingSession

    av.logging.set_level(None)
    session = DecodingSession(request, gateway)
    try:
        for kind, body in session.records():
            _write_warnings(out, gateway)
            out.write(kind, body)
        out.write(b"Z", session.recording().encode())
    except Exception as error:
        failure, message = session.explain(error)
        _write_warnings(out, gateway)
        _fail(out, failure, message)
    os._exit(0)  # skips the clean-up, which may hang in FFmpeg


def start_gateway(request: dict[str, Any], unneeded: int) -> Gateway | None:
    """The gateway of a stream; None for a file. Raises AddressRefused if its scheme is not supported."""
    if not request["live"] or scheme_of(request["url"]) == "file":
        return None
    from reference_db.media.socket_guard.gateway import Gateway

    return Gateway.start(request, unneeded)


class RecordWriter:
    """The pipe to the parent."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._flushed_s = 0.0

    def write(self, kind: bytes, body: bytes) -> None:
        try:
            self._out.write(RECORD.pack(kind, len(body)))
            self._out.write(body)
            now_s = time.monotonic()
            if kind != b"K" or now_s - self._flushed_s > KEY_WAIT_S:
                self._flushed_s = now_s
                self._out.flush()
        except BrokenPipeError:
            os._exit(0)  # the parent has closed its end


def _write_warnings(out: RecordWriter, gateway: Gateway | None) -> None:
    for sentence in gateway.warnings() if gateway is not None else ():
        out.write(b"W", sentence.encode())


def _fail(out: RecordWriter, kind: str, message: str) -> NoReturn:
    out.write(b"E", json.dumps({"kind": kind, "message": message}).encode())
    os._exit(0)  # skips the clean-up, which may hang in FFmpeg


if __name__ == "__main__":
    main()
