"""The decoding child's program: one request on stdin, records on stdout. `DecodingChild` starts it.

A channel has no frames until it runs, so it imports little: no torch, numpy only to rotate a picture, the HTTP relay
only for HTTP.
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

from reference_db.media.addresses import SCHEME_RULES, AddressRefused, ReachPolicy, display_name, scheme_of
from reference_db.media.child_process import receive_request
from reference_db.media.frames import MAX_PIXELS, RECORD, Mode
from reference_db.media.sampling import MediaRefused, VideoSampler

if TYPE_CHECKING:
    from reference_db.media.http_relay import HttpRelay

# FFmpeg's own time-outs, the second for one packet of any stream: longer than the parent's, since a playlist may have
# nothing new for the length of a segment, and a channel may send one picture every few seconds.
OPEN_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 40.0
RECORD_BYTES = 1 << 18  # a picture's record is one write: each write wakes the parent
MEMORY_BYTES = 2 << 30  # address space; the decoder's buffers of an 8K stream fit
# Trusted certificates, for the protocols in which FFmpeg itself verifies them.
CERTIFICATES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# Live streams: FFmpeg would read 20 pictures to measure the frame rate, 4 s of a channel at 5 fps, and wait for a key
# picture; a few suffice for the clock, and decoding starts with the key picture anyway.
LIVE_OPTIONS = {"fpsprobesize": "4", "analyzeduration": "3000000"}
# HLS: start at the newest segment, fetch one after the other; relay and formats decide what may be opened.
HLS_OPTIONS = {
    "live_start_index": "-1",
    "http_persistent": "0",
    "http_multiple": "0",
    "extension_picky": "0",
    "allowed_extensions": "ALL",
    "allowed_segment_extensions": "ALL",
}


def main() -> None:
    """Answers one request and exits."""
    request, pipe = receive_request(RECORD_BYTES)
    out = RecordWriter(pipe)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain the address
    av.logging.set_level(None)
    session = DecodingSession(request, out)
    try:
        for kind, body in session.records():
            out.write(kind, body)
        out.write(b"Z", b"")
    except Exception as error:
        failure, message = session.explain(error)
        out.write(b"E", json.dumps({"kind": failure, "message": message}).encode())
    os._exit(0)  # skips the clean-up, which may hang in FFmpeg


class RecordWriter:
    """The pipe to the parent; the relay's threads write warnings while a picture is being written."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def write(self, kind: bytes, body: bytes) -> None:
        try:
            with self._lock:
                self._out.write(RECORD.pack(kind, len(body)))
                self._out.write(body)
                if kind != b"K":  # it can wait for the next record
                    self._out.flush()
        except BrokenPipeError:
            os._exit(0)  # the parent has closed its end


class DecodingSession:
    """One request: opens the address by the rules of its scheme, yields its records, explains why it ended."""

    def __init__(self, request: dict[str, Any], out: RecordWriter) -> None:
        self._url: str = request["url"]
        self._live: bool = request["live"]
        self._mode: Mode = request["mode"]
        self._allow: list[str] = request["allow"]
        self._private: bool = request["private"]
        self._no_video_s: float = request["no_video_s"]
        self._out = out
        self._refusals: list[str] = []  # addresses that the socket guard blocked
        self._relay: HttpRelay | None = None
        self._sampler: VideoSampler | None = None

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        url, options = self._ffmpeg_input()
        with av.open(
            url, options=options, timeout=(OPEN_TIMEOUT_S, READ_TIMEOUT_S), metadata_errors="surrogateescape"
        ) as container:
            self._sampler = VideoSampler(container, display_name(self._url), self._live, self._mode, self._no_video_s)
            info = self._sampler.info()
            yield b"I", json.dumps(asdict(info)).encode()
            for record in self._sampler.records():
                if not info.width and record[0] == b"P":  # the size was not known when it was opened
                    info = self._sampler.info()
                    yield b"I", json.dumps(asdict(info)).encode()
                yield record
        if self._relay is not None and self._relay.truncation is not None:
            raise MediaRefused(*self._relay.truncation)

    def explain(self, error: Exception) -> tuple[str, str]:
        """Kind and sentence of the error that ended it. PyAV's own message would contain the URL with its password."""
        if isinstance(error, MediaRefused):
            return error.args
        if isinstance(error, AddressRefused):
            return "unsupported", str(error)
        if self._refusals:
            return "refused", self._refusals[0]
        problem = self._relay.last_problem if self._relay is not None else None
        has_pictures = self._sampler is not None and self._sampler.has_pictures
        if problem is not None and not has_pictures:
            return problem
        return _classify(error, display_name(self._url), has_pictures=has_pictures)

    def _ffmpeg_input(self) -> tuple[str, dict[str, str]]:
        """The URL that FFmpeg opens, and its options."""
        url, options = self._url, {"max_pixels": str(MAX_PIXELS)}
        scheme = scheme_of(url) if self._live else "file"
        protocols, formats = SCHEME_RULES[scheme]
        options |= {"protocol_whitelist": protocols, "format_whitelist": formats}
        if scheme == "file":
            path = url.partition("://")[2] if self._live else url
            _check_file(path)
            return "file:" + os.path.abspath(path), options
        options |= LIVE_OPTIONS
        if scheme in ("http", "https"):
            from reference_db.media.http_relay import HttpRelay

            self._relay = HttpRelay(url, self._reach(), self._warn)
            proxy = f"http://127.0.0.1:{self._relay.port}"  # any other URL that FFmpeg opens goes to the relay too
            os.environ.pop("no_proxy", None)
            return self._relay.url, options | HLS_OPTIONS | {"http_proxy": proxy}
        if scheme in ("rtsp", "rtsps", "rtmp", "rtmps"):
            from reference_db.media.socket_guard import guard

            guard.install(
                ReachPolicy.of(url, self._allow, private=self._private),
                lambda sentence: self._refusals.append(sentence),
            )
        if scheme in ("rtsp", "rtsps"):
            options["rtsp_flags"] = "prefer_tcp"  # firewalls often drop datagrams silently
        if scheme in ("rtmps", "rtsps"):
            options |= {"tls_verify": "1", **_certificates()}
        return url, options

    def _reach(self) -> ReachPolicy:
        return ReachPolicy.of(self._url, self._allow, private=self._private)

    def _warn(self, _kind: str, sentence: str) -> None:
        self._out.write(b"W", sentence.encode())


def _certificates() -> dict[str, str]:
    for path in (os.environ.get("SSL_CERT_FILE"), *CERTIFICATES):
        if path and os.path.exists(path):
            return {"ca_file": path}
    return {}


def _check_file(path: str) -> None:
    name = display_name(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise MediaRefused("missing", f"{name} is a directory; name a video file.")
        if not stat.S_ISREG(status.st_mode):
            raise MediaRefused("missing", f"{name} is not a regular file; name a video file.")
        if status.st_size == 0:
            raise MediaRefused("unreadable", f"{name} is empty.")
        open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise MediaRefused("missing", f"{name} does not exist; check the path.") from None
    except PermissionError:
        raise MediaRefused("denied", f"{name} cannot be read; check its permissions.") from None
    except OSError as error:
        raise MediaRefused("unreadable", f"{name} cannot be read: {error.strerror}.") from None


def _classify(error: Exception, name: str, *, has_pictures: bool) -> tuple[str, str]:
    """Kind and sentence of an error of PyAV; `has_pictures`: after the first picture."""
    match error:
        case av.error.HTTPUnauthorizedError() | av.error.HTTPForbiddenError():
            return "denied", f"{name} denies access; check user, password or token."
        case av.error.HTTPNotFoundError() | av.error.FileNotFoundError():
            return "missing", f"{name} has nothing at this address; check the path."
        case av.error.HTTPError():
            return "failed", f"{name} answers with an HTTP error."
        case av.error.ExitError() | av.error.TimeoutError():
            return "stalled", f"{name} did not answer in time."
        case av.error.InvalidDataError() | av.error.ArgumentError() | av.error.DemuxerNotFoundError():
            return "unreadable", f"{name} is not a video in a supported format, or it is damaged."
        case av.error.DecoderNotFoundError():
            return "unreadable", f"{name} has a video that no decoder supports."
        case MemoryError():
            return "unreadable", f"{name} needs more memory than the decoder may use."
        case FFmpegError() if has_pictures:
            return "lost", f"{name} closed the connection: {(error.strerror or type(error).__name__).rstrip('.')}."
        case FFmpegError():
            return "unreachable", f"{name} cannot be opened: {(error.strerror or type(error).__name__).rstrip('.')}."
    return "crashed", f"The decoder of {name} failed ({type(error).__name__})."


if __name__ == "__main__":
    main()
