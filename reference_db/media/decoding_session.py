"""One decoding session: opens an address by the rules of its scheme in the sandbox, and yields its records.

All that FFmpeg and Python load is loaded here, before `DecodingSession.records` enters the sandbox; afterwards no file
can be opened, so nothing may be imported later.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import av
import av.subtitles.codeccontext  # PyAV would load these when a stream has them
import av.subtitles.stream
from av.error import FFmpegError

from reference_db.media.addresses import SCHEME_RULES, AddressRefused, display_name, scheme_of
from reference_db.media.child_process import wipe_environment
from reference_db.media.frames import MAX_PIXELS, Mode, VideoInfo
from reference_db.media.sampling import CODECS, MediaRefused, VideoSampler
from reference_db.media.sandbox.confinement import Mechanism, Needs, confine_decoder
from reference_db.media.socket_guard import guard
from reference_db.media.socket_guard.gateway import Gateway

# FFmpeg's own time-outs, the second for one packet of any stream: longer than the parent's, since a playlist may have
# nothing new for the length of a segment, and a channel may send one picture every few seconds.
OPEN_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 40.0
# From when on a connection shows that the source produces now. Two servers of one network may differ by a segment, so
# one move of a playlist is not enough; what any other server has stored arrives at once.
FRESH_MOVES, FRESH_S = 2, 5.0
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


class DecodingSession:
    """One request: opens the address by the rules of its scheme, yields its records, explains why it ended."""

    def __init__(self, request: dict[str, Any], gateway: Gateway | None) -> None:
        self._url: str = request["url"]
        self._live: bool = request["live"]
        self._mode: Mode = request["mode"]
        self._no_video_s: float = request["no_video_s"]
        self._stills: bool = request.get("stills", False)
        self._report_only: bool = request.get("report", False)
        self._gateway = gateway
        self._sampler: VideoSampler | None = None
        self._needs = Needs()
        self._first_key_s: float | None = None
        self._is_fresh = False

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """The records of the request. Enters the sandbox on the way."""
        if self._report_only:
            yield b"S", json.dumps([asdict(mechanism) for mechanism in self._report()]).encode()
            return
        url, options = self.ffmpeg_input()
        yield from self._confine()
        yield from self.decode(url, options)

    def decode(self, url: str, options: dict[str, str]) -> Iterator[tuple[bytes, bytes]]:
        """The records of FFmpeg's input."""
        with av.open(
            url, options=options, timeout=(OPEN_TIMEOUT_S, READ_TIMEOUT_S), metadata_errors="surrogateescape"
        ) as container:
            name = display_name(self._url)
            self._sampler = VideoSampler(
                container, name, self._live, self._mode, self._no_video_s, self._stills, self._check_fresh
            )
            info = self._info()
            yield b"I", json.dumps(asdict(info)).encode()
            for record in self._sampler.records():
                if not info.width and record[0] == b"P":  # the size was not known when it was opened
                    info = self._info()
                    yield b"I", json.dumps(asdict(info)).encode()
                yield record
        if truncation := self._ask_gateway("problems").get("truncation"):
            raise MediaRefused(*truncation)

    def recording(self) -> str:
        """See `VideoInfo.recording`."""
        return str(self._ask_gateway("progress").get("recording", ""))

    def _info(self) -> VideoInfo:
        assert self._sampler is not None
        progress = self._ask_gateway("progress")
        segment_s, recording = progress.get("segment_s", 0.0), progress.get("recording", "")
        return replace(self._sampler.info(), segment_s=segment_s, recording=recording)

    def _check_fresh(self) -> bool:
        """Whether the source has shown that it produces now: its playlist moves, or it still sends after a while."""
        if self._first_key_s is None:
            self._first_key_s = time.monotonic()
        if not self._is_fresh:
            progress, sent_s = self._ask_gateway("progress"), time.monotonic() - self._first_key_s
            n_moves = progress.get("n_moves")
            is_flowing = sent_s >= FRESH_S and not progress.get("recording")
            self._is_fresh = is_flowing if n_moves is None else n_moves >= FRESH_MOVES
        return self._is_fresh

    def explain(self, error: Exception) -> tuple[str, str]:
        """Kind and sentence of the error that ended it. PyAV's own message would contain the URL with its password."""
        if isinstance(error, MediaRefused):
            return error.args
        if isinstance(error, AddressRefused):
            return "unsupported", str(error)
        problems = self._ask_gateway("problems")
        if refusals := problems.get("refusals"):
            return "refused", refusals[0]
        if (truncation := problems.get("truncation")) and truncation[0] == "restarted":
            return truncation[0], truncation[1]
        has_pictures = self._sampler is not None and self._sampler.has_pictures
        if (problem := problems.get("last")) and not has_pictures:
            return problem[0], problem[1]
        return _classify(error, display_name(self._url), has_pictures=has_pictures)

    def ffmpeg_input(self) -> tuple[str, dict[str, str]]:
        """The URL that FFmpeg opens, and its options; opens the file, or makes FFmpeg ask the gateway."""
        options = {"max_pixels": str(MAX_PIXELS), "codec_whitelist": CODECS}
        scheme = scheme_of(self._url) if self._live else "file"
        protocols, formats = SCHEME_RULES[scheme]
        options |= {"protocol_whitelist": protocols, "format_whitelist": formats}
        if scheme == "file":
            return self._file_input(), options
        options |= LIVE_OPTIONS
        assert self._gateway is not None
        url, relay_port = self._gateway.address()
        self._guard(scheme)
        if relay_port:
            proxy = f"http://127.0.0.1:{relay_port}"  # any other URL that FFmpeg opens goes to the relay too
            wipe_environment()  # the relay has its own copy
            return url, options | HLS_OPTIONS | {"http_proxy": proxy}
        if scheme in ("rtsp", "rtsps"):
            options["rtsp_flags"] = "prefer_tcp"  # firewalls often drop datagrams silently
        if scheme in ("rtmps", "rtsps"):
            certificates = _certificates()
            self._needs = replace(self._needs, readable=tuple(certificates.values()))
            options |= {"tls_verify": "1", **certificates}
        return url, options

    def _file_input(self) -> str:
        path = os.path.abspath(self._url.partition("://")[2] if self._live else self._url)
        fd = _open_file(path)
        if not guard.install_file(path, fd):
            self._needs = Needs(readable=(path,))
        return "file:" + path

    def _guard(self, scheme: str) -> None:
        assert self._gateway is not None
        try:
            guard.install(self._gateway)
        except AddressRefused:
            if scheme in ("rtsp", "rtsps", "rtmp", "rtmps"):
                raise
            self._needs = Needs(sockets=True)  # FFmpeg reaches the relay, or receives, by its own sockets

    def _confine(self) -> Iterator[tuple[bytes, bytes]]:
        """Enters the sandbox; a warning if this system has no seccomp, without which it holds little."""
        for mechanism in confine_decoder(self._needs):
            if mechanism.name == "seccomp" and not mechanism.in_force:
                yield b"W", f"Its decoder runs without a seccomp filter: {mechanism.detail}.".encode()

    def _report(self) -> list[Mechanism]:
        """What confines a decoder on this system."""
        self.ffmpeg_input()
        sockets = "FFmpeg asks it for every connection" if not self._needs.sockets else "libavformat cannot be changed"
        file = guard.install_file(os.devnull, os.open(os.devnull, os.O_RDONLY))
        opened = "only the one that was opened before" if file else "libavutil cannot be changed"
        mechanisms = confine_decoder(self._needs)
        return [
            *mechanisms,
            Mechanism("gateway", not self._needs.sockets, sockets),
            Mechanism("files", file, opened),
        ]

    def _ask_gateway(self, what: str) -> dict[str, Any]:
        try:
            return self._gateway.facts(what) if self._gateway is not None else {}
        except OSError:
            return {}  # it has ended


def _certificates() -> dict[str, str]:
    for path in (os.environ.get("SSL_CERT_FILE"), *CERTIFICATES):
        if path and os.path.exists(path):
            return {"ca_file": path}
    return {}


def _open_file(path: str) -> int:
    name = display_name(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise MediaRefused("missing", f"{name} is a directory; name a video file.")
        if not stat.S_ISREG(status.st_mode):
            raise MediaRefused("missing", f"{name} is not a regular file; name a video file.")
        if status.st_size == 0:
            raise MediaRefused("unreadable", f"{name} is empty.")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        case av.error.HTTPNotFoundError():
            return "missing", f"{name} has nothing at this address (404); check the path."
        case av.error.FileNotFoundError():
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
