"""The decoding child: one request on stdin, records on stdout, then the end. `DecodingChild` starts it.

It starts as lightly as it can, since a channel is blind until it runs: no torch, no numpy unless a picture has to be
turned, the gateway only for the web.
"""

from __future__ import annotations

import json
import os
import resource
import stat
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import av
from av.error import FFmpegError

from reference_db.media.addresses import OPENS, AddressRefused, ReachPolicy, scheme_of, shown
from reference_db.media.child_process import receive_request
from reference_db.media.frames import MAX_PIXELS, Mode
from reference_db.media.sampling import RECORD, Refused, Sampling

if TYPE_CHECKING:
    from reference_db.media.http_relay import HttpRelay

# FFmpeg's own, the second for one packet of any stream: longer than the parent's patience, since a playlist may have
# nothing new for the length of a segment, and a channel may show a picture every few seconds.
OPEN_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 40.0
RECORD_BYTES = 1 << 18  # a picture's record is written at once: each write wakes the parent
MEMORY_BYTES = 2 << 30  # of address space; an 8K stream's reference pictures fit
# Where the trusted certificates are, for the protocols in which FFmpeg checks them.
CERTIFICATES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# Of live streams: FFmpeg would read 20 pictures to learn how many come in a second, 4 s of a channel that shows 5, and
# wait for a key picture; the clock tells as much from a few, and decoding begins with the key picture anyway.
LIVE_OPTIONS = {"fpsprobesize": "4", "analyzeduration": "3000000"}
# Of HLS: begin at the newest segment, fetch one after the other; the gateway and the formats decide what is opened.
HLS_OPTIONS = {
    "live_start_index": "-1",
    "http_persistent": "0",
    "http_multiple": "0",
    "extension_picky": "0",
    "allowed_extensions": "ALL",
    "allowed_segment_extensions": "ALL",
}


def main() -> None:
    """Answers one request; the process ends with it."""
    request, pipe = receive_request(RECORD_BYTES)
    out = Records(pipe)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold the address
    av.logging.set_level(None)
    answer = Answer(request, out)
    try:
        for kind, body in answer.records():
            out.write(kind, body)
        out.write(b"Z", b"")
    except Exception as error:
        failure, message = answer.explained(error)
        out.write(b"E", json.dumps({"kind": failure, "message": message}).encode())
    os._exit(0)  # without the clean-up that may hang in FFmpeg


class Records:
    """What the parent reads; the gateway's threads warn while a picture is being written."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def write(self, kind: bytes, body: bytes) -> None:
        try:
            with self._lock:
                self._out.write(RECORD.pack(kind, len(body)))
                self._out.write(body)
                if kind != b"K":  # which says nothing that cannot wait for the next
                    self._out.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody is reading any more


class Answer:
    """One request: the address opened by the rules of its kind, its records, and why it ended."""

    def __init__(self, request: dict[str, Any], out: Records) -> None:
        self._url: str = request["url"]
        self._live: bool = request["live"]
        self._mode: Mode = request["mode"]
        self._allow: list[str] = request["allow"]
        self._no_video_s: float = request["no_video_s"]
        self._out = out
        self._refusals: list[str] = []  # addresses that FFmpeg was kept from
        self._gateway: HttpRelay | None = None
        self._sampling: Sampling | None = None

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        url, options = self._opened()
        with av.open(
            url, options=options, timeout=(OPEN_TIMEOUT_S, READ_TIMEOUT_S), metadata_errors="surrogateescape"
        ) as container:
            self._sampling = Sampling(container, shown(self._url), self._live, self._mode, self._no_video_s)
            info = self._sampling.info()
            yield b"I", json.dumps(asdict(info)).encode()
            for record in self._sampling.records():
                if not info.width and record[0] == b"P":  # it was joined before it said its size
                    info = self._sampling.info()
                    yield b"I", json.dumps(asdict(info)).encode()
                yield record
        if self._gateway is not None and self._gateway.cut_off is not None:
            raise Refused(*self._gateway.cut_off)

    def explained(self, error: Exception) -> tuple[str, str]:
        """The kind and sentence of what ended it. PyAV's own text would show the URL with its password."""
        if isinstance(error, Refused):
            return error.args
        if isinstance(error, AddressRefused):
            return "unsupported", str(error)
        if self._refusals:
            return "refused", self._refusals[0]
        trouble = self._gateway.trouble if self._gateway is not None else None
        begun = self._sampling is not None and self._sampling.has_begun
        if trouble is not None and not begun:
            return trouble
        return _classified(error, shown(self._url), begun=begun)

    def _opened(self) -> tuple[str, dict[str, str]]:
        """The address for FFmpeg and its options."""
        url, options = self._url, {"max_pixels": str(MAX_PIXELS)}
        scheme = scheme_of(url) if self._live else "file"
        protocols, formats = OPENS[scheme]
        options |= {"protocol_whitelist": protocols, "format_whitelist": formats}
        if scheme == "file":
            path = url.partition("://")[2] if self._live else url
            _check_file(path)
            return "file:" + os.path.abspath(path), options
        options |= LIVE_OPTIONS
        if scheme in ("http", "https"):
            from reference_db.media.http_relay import HttpRelay

            self._gateway = HttpRelay(url, ReachPolicy.of(url, self._allow), self._warn)
            proxy = f"http://127.0.0.1:{self._gateway.port}"  # whatever else FFmpeg may think of, it meets the gateway
            os.environ.pop("no_proxy", None)
            return self._gateway.address, options | HLS_OPTIONS | {"http_proxy": proxy}
        if scheme in ("rtsp", "rtsps", "rtmp", "rtmps"):
            from reference_db.media.socket_guard.guard import watch

            watch(ReachPolicy.of(url, self._allow), lambda sentence: self._refusals.append(sentence))
        if scheme in ("rtsp", "rtsps"):
            options["rtsp_flags"] = "prefer_tcp"  # datagrams rarely pass a firewall, and nobody says so
        if scheme in ("rtmps", "rtsps"):
            options |= {"tls_verify": "1", **_certificates()}
        return url, options

    def _warn(self, _kind: str, sentence: str) -> None:
        self._out.write(b"W", sentence.encode())


def _certificates() -> dict[str, str]:
    for path in (os.environ.get("SSL_CERT_FILE"), *CERTIFICATES):
        if path and os.path.exists(path):
            return {"ca_file": path}
    return {}


def _check_file(path: str) -> None:
    name = shown(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise Refused("missing", f"{name} is a directory; name a video file.")
        if not stat.S_ISREG(status.st_mode):
            raise Refused("missing", f"{name} is not a regular file; name a video file.")
        if status.st_size == 0:
            raise Refused("unreadable", f"{name} is empty.")
        open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise Refused("missing", f"{name} does not exist; check the path.") from None
    except PermissionError:
        raise Refused("denied", f"{name} may not be read; check its permissions.") from None
    except OSError as error:
        raise Refused("unreadable", f"{name} cannot be read: {error.strerror}.") from None


def _classified(error: Exception, name: str, *, begun: bool) -> tuple[str, str]:
    """The kind and sentence for an error of PyAV's; `begun` once pictures had come."""
    match error:
        case av.error.HTTPUnauthorizedError() | av.error.HTTPForbiddenError():
            return "denied", f"{name} refuses us; check user, password or token."
        case av.error.HTTPNotFoundError() | av.error.FileNotFoundError():
            return "missing", f"{name} has nothing at this address; check the path."
        case av.error.HTTPError():
            return "failed", f"{name} answers with an HTTP error."
        case av.error.ExitError() | av.error.TimeoutError():
            return "stalled", f"{name} did not answer in time."
        case av.error.InvalidDataError() | av.error.ArgumentError() | av.error.DemuxerNotFoundError():
            return "unreadable", f"{name} is not a video in a format that is read here, or it is damaged."
        case av.error.DecoderNotFoundError():
            return "unreadable", f"{name} has a video that no decoder here can read."
        case MemoryError():
            return "unreadable", f"{name} asks for more memory than it may have."
        case FFmpegError() if begun:
            return "lost", f"{name} hung up: {(error.strerror or type(error).__name__).rstrip('.')}."
        case FFmpegError():
            return "unreachable", f"{name} cannot be opened: {(error.strerror or type(error).__name__).rstrip('.')}."
    return "crashed", f"The decoder of {name} failed ({type(error).__name__})."


if __name__ == "__main__":
    main()
