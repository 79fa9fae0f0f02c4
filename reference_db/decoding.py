"""Decoding in a child process that can be killed: a URL or file in, `Frame`s out.

FFmpeg cannot be interrupted and a malformed file may crash it, so every source is decoded by a
`python -m reference_db.decoding` of its own. It gets its request as JSON on stdin (a URL with a password shows up in
no process list), answers with records on stdout, and imports neither torch nor anything of the monitor. `DecodingChild`
is the parent's end of the pipe; below it is what runs in the child.

A record is a kind (1 byte), a length (4 bytes) and a body: I = VideoInfo as JSON, P = a picture, H = the last picture
held for another second, E = the error that ended it as JSON, Z = the end.
"""

import ctypes
import fcntl
import json
import logging
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self, TypeAlias
from urllib.parse import urlsplit

import av
import numpy as np
from av.error import FFmpegError
from av.stream import Disposition
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from reference_db.errors import MediaError
from reference_db.frames import JUMP_BACK_S, PICTURE_SHORT_SIDE, Frame, HeldOneFps, Mode, OneFps, VideoInfo

logger = logging.getLogger(__name__)

NO_PROGRESS_S = 30.0  # without a picture for so long, a child is given up
OPEN_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 10.0  # FFmpeg's own, for one packet of any stream; the watchdog backs them
PIPE_BYTES = 1 << 20  # the most an ordinary user may ask for: five pictures of decoding ahead
STDERR_BYTES = 4096  # of the child's last words
MAX_PIXELS = 8192 * 4352  # 8K; a header that claims more is a bomb
MAX_LONG_SIDE = 8 * PICTURE_SHORT_SIDE  # of what is handed over; a banner is squeezed to it
BAD_PACKETS_IN_A_ROW = 8  # one bad packet is skipped, so many are a bad stream
KEY_EVERY_S = 2.1  # economy needs key pictures this often: 2 s, and 60 pictures at 29.97
STEADY_S = 10.0  # and for so long, before `auto` trusts them

# What a file may be. Playlists (hls, concat, sdp) are not in it: they would open other files and hosts.
FILE_FORMATS = (
    "mov,mp4,matroska,webm,mpegts,mpeg,mpegvideo,avi,flv,asf,ogg,mxf,mxf_opatom,gxf,dv,rm,nut,wtv,gif,ivf,"
    "h264,hevc,m4v,obu,av1,vc1,yuv4mpegpipe,mp3,wav,flac,aac"
)
LIVE_FORMATS = FILE_FORMATS + ",hls,live_flv,rtsp,rtp,sdp,ac3,eac3,webvtt"
HTTP_PROTOCOLS = "http,https,httpproxy,tcp,tls,crypto"
RTSP_PROTOCOLS = "rtsp,rtsps,rtp,srtp,udp,tcp,tls,http,https"
# What each scheme may open in turn; a scheme that is not here is refused.
PROTOCOLS = {
    "file": "file",
    "http": HTTP_PROTOCOLS,
    "https": HTTP_PROTOCOLS,
    "rtmp": "rtmp,rtmps,tcp,tls",
    "rtmps": "rtmp,rtmps,tcp,tls",
    "rtsp": RTSP_PROTOCOLS,
    "rtsps": RTSP_PROTOCOLS,
    "udp": "udp",
    "rtp": "rtp,udp",
}
# All that a decoder needs of our environment; tokens and passwords stay here.
CHILD_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "http_proxy", "no_proxy", "SSL_CERT_FILE")

RECORD = struct.Struct("<cI")
PICTURE = struct.Struct("<qdHH")  # second, pts_s, height, width; then the pixels


def shown(url: str) -> str:
    """The URL or path as messages may name it: a file's name, or scheme and host without user, path or token."""
    if "://" not in url or url.startswith("file:"):
        return url.rsplit("/", 1)[-1] or url
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}"


class DecodingChild:
    """A decoder in a process of its own; iterate `frames()` in one thread, `kill()` it from any.

    A file's time begins at its first picture; with `live`, times are the stream's own, as they come. The child dies
    with the thread that made it (PR_SET_PDEATHSIG), so make it in one that lives as long.
    """

    def __init__(
        self, url: str, *, live: bool = False, mode: Mode = "exact", no_progress_s: float = NO_PROGRESS_S
    ) -> None:
        self.name = shown(url)
        self.failure: str | None = None  # what kind of error ended it: missing, denied, stalled, crashed, ...
        self._no_progress_s = no_progress_s
        self._killed = False
        self._info: VideoInfo | None = None
        self._stderr = bytearray()
        self._unread = bytearray()
        environment = {name: os.environ[name] for name in CHILD_ENVIRONMENT if name in os.environ}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "reference_db.decoding"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C is for us; we end the child ourselves
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        request = {"url": url, "live": live, "mode": mode, "parent": os.getpid()}
        try:
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; reading its answer tells why

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def info(self) -> VideoInfo:
        """What the video says of itself; waits until it is open."""
        if self._info is None:
            body = self._read_record(b"I")[1]
            self._info = VideoInfo(**json.loads(body))
        return self._info

    def frames(self) -> Iterator[Frame]:
        """The frames until the video ends or `kill` is called; raises MediaError."""
        try:
            self.info()
        except _Killed:
            return
        picture: NDArray[np.uint8] | None = None
        while True:
            try:
                kind, body = self._read_record(b"PHZ")
            except _Killed:
                return
            if kind == b"Z":
                return
            second, pts_s, height, width = PICTURE.unpack_from(body)
            if kind == b"P":
                picture = np.frombuffer(body, np.uint8, offset=PICTURE.size).reshape(height, width, 3)
            assert picture is not None
            yield Frame(second, pts_s, picture, held=kind == b"H")

    def kill(self) -> None:
        """Ends the child at once, whatever it is doing; a reader in another thread then sees the end."""
        self._killed = True
        self._process.kill()

    def close(self) -> None:
        """Ends the child and lets go of its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe
            pipe.close()

    def _read_record(self, kinds: bytes) -> tuple[bytes, bytes]:
        deadline = time.monotonic() + self._no_progress_s
        kind, length = RECORD.unpack(self._read(RECORD.size, deadline))
        body = self._read(length, deadline)
        if kind == b"E":
            raise self._failed(**json.loads(body))
        if kind not in kinds:
            raise self._failed("crashed", f"The decoder of {self.name} answered out of turn.")
        return kind, body

    def _read(self, n_bytes: int, deadline: float) -> bytes:
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        poll.register(self._err, select.POLLIN)
        while len(self._unread) < n_bytes:
            ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if not ready:
                self._process.kill()
                raise self._failed("stalled", f"{self.name} gave no picture for {self._no_progress_s:g} s.")
            if self._err in ready:
                words = os.read(self._err, STDERR_BYTES)
                self._stderr = (self._stderr + words)[-STDERR_BYTES:]
                if not words:
                    poll.unregister(self._err)
            if self._out in ready:
                part = os.read(self._out, PIPE_BYTES)
                if not part:
                    raise self._ended()
                self._unread += part
        taken = bytes(self._unread[:n_bytes])
        del self._unread[:n_bytes]
        return taken

    def _ended(self) -> Exception:
        if self._killed:
            return _Killed()
        code = self._process.wait()
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._stderr:
            logger.debug("last words of the decoder of %s: %s", self.name, self._stderr.decode(errors="replace"))
        return self._failed("crashed", f"The decoder of {self.name} died ({reason}); the video may be damaged.")

    def _failed(self, kind: str, message: str) -> MediaError:
        self.failure = kind
        return MediaError(message)


class _Killed(Exception):
    """The end, because `kill` was called."""


# From here on: what runs in the child.


class _Refused(Exception):
    """What is wrong, as a kind and a sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)


def main() -> None:
    """Answers one request; the process ends with it."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not print into the records
    request = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != request["parent"]:
        return
    av.logging.set_level(None)
    url, live = request["url"], request["live"]
    try:
        for kind, body in _answer(url, live, request["mode"]):
            _write(out, kind, body)
        _write(out, b"Z", b"")
    except Exception as error:
        failure, message = error.args if isinstance(error, _Refused) else _classified(error, shown(url))
        _write(out, b"E", json.dumps({"kind": failure, "message": message}).encode())


def _write(out: BinaryIO, kind: bytes, body: bytes) -> None:
    try:
        out.write(RECORD.pack(kind, len(body)))
        out.write(body)
        out.flush()
    except BrokenPipeError:
        os._exit(0)  # nobody is reading any more


def _answer(url: str, live: bool, mode: Mode) -> Iterator[tuple[bytes, bytes]]:
    options = {"max_pixels": str(MAX_PIXELS)}
    if live and not url.startswith("file:"):
        scheme = urlsplit(url).scheme.lower()
        _check_scheme(scheme)
        options |= {"protocol_whitelist": PROTOCOLS[scheme], "format_whitelist": LIVE_FORMATS}
    else:
        url = url.removeprefix("file:").removeprefix("//") if live else url
        _check_file(url)
        url = "file:" + os.path.abspath(url)
        options |= {"protocol_whitelist": "file", "format_whitelist": FILE_FORMATS}
    with av.open(
        url, options=options, timeout=(OPEN_TIMEOUT_S, READ_TIMEOUT_S), metadata_errors="surrogateescape"
    ) as container:
        sampling = _Sampling(container, shown(url), live, mode)
        yield b"I", json.dumps(asdict(sampling.info())).encode()
        yield from sampling.records()


def _check_scheme(scheme: str) -> None:
    if scheme == "srt":
        raise _Refused(
            "unsupported",
            "srt:// cannot be read directly; run `ffmpeg -i srt://... -c copy -f mpegts udp://127.0.0.1:PORT` beside "
            "Copywatch and watch udp://127.0.0.1:PORT.",
        )
    if scheme not in PROTOCOLS:
        known = ", ".join(PROTOCOLS)
        raise _Refused("unsupported", f"A stream's address begins with one of {known} and ://, not with {scheme!r}.")


def _check_file(path: str) -> None:
    name = shown(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise _Refused("missing", f"{name} is a directory; name a video file.")
        if not stat.S_ISREG(status.st_mode):
            raise _Refused("missing", f"{name} is not a regular file; name a video file.")
        if status.st_size == 0:
            raise _Refused("unreadable", f"{name} is empty.")
        open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise _Refused("missing", f"{name} does not exist; check the path.") from None
    except PermissionError:
        raise _Refused("denied", f"{name} may not be read; check its permissions.") from None
    except OSError as error:
        raise _Refused("unreadable", f"{name} cannot be read: {error.strerror}.") from None


def _classified(error: Exception, name: str) -> tuple[str, str]:
    """The kind and sentence for an error of PyAV's, whose own text would show the URL with its password."""
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
            return "unreadable", f"{name} asks for more memory than there is."
        case FFmpegError():
            return "failed", f"{name} cannot be read: {(error.strerror or type(error).__name__).rstrip('.')}."
    return "crashed", f"The decoder of {name} failed ({type(error).__name__})."


class _Clock:
    """Ticks of the stream to seconds: as they are when live, else counted from the file's first picture.

    A file whose clock jumps back (two recordings in one) goes on where it was.
    """

    def __init__(self, live: bool, time_base: Fraction, fps: float) -> None:
        self._live, self._time_base, self._step_s = live, time_base, 1 / fps
        self._origin = 0 if live else None
        self._shift_s = 0.0
        self._last_s: float | None = None

    def of_picture(self, ticks: int | None) -> float:
        if ticks is None:  # a raw stream has no times, only an order
            time_s = 0.0 if self._last_s is None else self._last_s + self._step_s
        else:
            if self._origin is None:
                self._origin = ticks
            time_s = self.of_packet(ticks)
            if not self._live and self._last_s is not None and time_s < self._last_s - JUMP_BACK_S:
                self._shift_s += self._last_s + self._step_s - time_s
                time_s = self._last_s + self._step_s
        self._last_s = time_s
        return time_s

    def of_packet(self, ticks: int) -> float:
        return float((ticks - (self._origin or 0)) * self._time_base) + self._shift_s


class _KeyPace:
    """Tells whether key pictures have been coming often enough, for long enough, to do without the others."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._steady_from_s = 0.0

    def push(self, key_s: float) -> None:
        if self._last_s is None or not 0 <= key_s - self._last_s <= KEY_EVERY_S:
            self._steady_from_s = key_s
        self._last_s = key_s

    def is_steady(self) -> bool:
        return self._last_s is not None and self._last_s - self._steady_from_s >= STEADY_S


Pick: TypeAlias = tuple[int, float, av.VideoFrame, bool]  # second, pts_s, picture, held


class _Sampling:
    """One open video's way from packets to records."""

    def __init__(self, container: av.container.InputContainer, name: str, live: bool, mode: Mode) -> None:
        stream = container.streams.best("video")
        if not isinstance(stream, av.VideoStream) or stream.disposition & Disposition.attached_pic:
            raise _Refused("no_video", f"{name} has no video, only sound or data.")
        if stream.codec_context is None:
            raise _Refused("unreadable", f"{name} has a video that no decoder here can read.")
        self._container, self._stream, self._name = container, stream, name
        self._decoder = stream.codec_context
        self._decoder.thread_count = 1
        self._decoder.thread_type = "NONE"
        self._decoder.options = {"max_pixels": str(MAX_PIXELS), "skip_loop_filter": "all"}
        if stream.codec_tag == "encv":
            self._refuse_encrypted()
        rate = stream.average_rate or stream.guessed_rate
        self._fps = float(rate) if rate else None
        self._time_base = stream.time_base or Fraction(1, 90_000)
        self._clock = _Clock(live, self._time_base, self._fps or 25.0)
        self._mode = mode
        self._economy = mode == "economy"
        self._pace = _KeyPace()
        self._one_fps: OneFps[av.VideoFrame] = OneFps()
        self._held: HeldOneFps[av.VideoFrame] = HeldOneFps()
        self._scaler = VideoReformatter()  # one, since each keeps its tables
        self._last_second: int | None = None
        self._end_s = 0.0
        self._n_bad = 0
        self._seen = False

    def info(self) -> VideoInfo:
        duration_s = None
        if self._stream.duration is not None:
            duration_s = float(self._stream.duration * self._time_base)
        elif self._container.duration is not None:
            duration_s = self._container.duration / av.time_base
        decoder = self._decoder
        return VideoInfo(duration_s, decoder.width, decoder.height, decoder.name, self._fps)

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        error: FFmpegError | None = None
        try:
            for packet in self._container.demux(self._stream):
                if packet.size:  # the last one is empty
                    yield from self._numbered(self._picks(packet))
        except FFmpegError as caught:
            error = caught  # what was read before it still counts
        yield from self._numbered(self._last_picks())
        if error is not None:
            raise error
        if not self._seen:
            limit = "pictures beyond 8192x4352 are not read"
            raise _Refused("unreadable", f"{self._name} holds no picture that can be decoded; {limit}.")

    def _numbered(self, picks: Iterator[Pick]) -> Iterator[tuple[bytes, bytes]]:
        """The records of the picks, each second once."""
        for second, pts_s, picture, held in picks:
            if self._last_second is None or not self._last_second - JUMP_BACK_S <= second <= self._last_second:
                self._last_second = second
                yield (b"H", PICTURE.pack(second, pts_s, 0, 0)) if held else self._record(second, pts_s, picture)

    def _picks(self, packet: "av.Packet[av.VideoStream]") -> Iterator[Pick]:
        if packet.has_sidedata("encryption_info"):
            self._refuse_encrypted()
        if packet.pts is None:
            self._economy = False  # without times there is nothing to hold a picture for
        elif packet.is_keyframe:
            yield from self._switch(packet.pts)
        if not self._economy:
            yield from self._pushed(self._decoded(packet))
            return
        if packet.is_keyframe:
            for picture in self._decoded(packet) + self._drained():
                yield from self._held.push(self._clock.of_picture(picture.pts), picture)
        if packet.pts is not None and self._seen:
            self._end_s = self._clock.of_packet(packet.pts)
            yield from self._held.reach(self._clock.of_packet(packet.pts if packet.dts is None else packet.dts))

    def _last_picks(self) -> Iterator[Pick]:
        if self._economy:
            yield from self._held.finish(self._end_s)
        else:
            yield from self._pushed(self._drained())
            yield from ((*pick, False) for pick in self._one_fps.finish())

    def _switch(self, key_pts: int) -> Iterator[Pick]:
        """Turns `auto` to economy or back; only a key picture can be decoded without those before it."""
        if self._mode != "auto":
            return
        self._pace.push(float(key_pts * self._time_base))
        if self._pace.is_steady() and not self._economy:
            yield from self._last_picks()
            self._economy, self._held = True, HeldOneFps()
        elif self._economy and not self._pace.is_steady():
            yield from self._held.reach(self._clock.of_packet(key_pts))
            self._economy, self._one_fps = False, OneFps()

    def _pushed(self, pictures: list[av.VideoFrame]) -> Iterator[Pick]:
        for picture in pictures:
            for pick in self._one_fps.push(self._clock.of_picture(picture.pts), picture):
                yield (*pick, False)

    def _decoded(self, packet: "av.Packet[av.VideoStream]") -> list[av.VideoFrame]:
        try:
            pictures = packet.decode()
        except FFmpegError as error:
            self._n_bad += self._seen  # before the first key picture all are bad
            if self._n_bad >= BAD_PACKETS_IN_A_ROW:
                raise _Refused("unreadable", f"{self._name} has too many damaged pictures in a row.") from error
            return []
        if pictures:
            self._seen, self._n_bad = True, 0
        return pictures

    def _drained(self) -> list[av.VideoFrame]:
        """The pictures that the decoder keeps back for reordering; it then starts anew."""
        try:
            pictures = self._decoder.decode(None)
        except FFmpegError:
            pictures = []
        self._decoder.flush_buffers()
        self._seen = self._seen or bool(pictures)
        return pictures

    def _record(self, second: int, pts_s: float, picture: av.VideoFrame) -> tuple[bytes, bytes]:
        ratio = self._stream.sample_aspect_ratio or Fraction(1)
        width, height = picture.width * float(ratio), float(picture.height)
        scale = PICTURE_SHORT_SIDE / min(width, height)
        small = self._scaler.reformat(
            picture,
            width=min(MAX_LONG_SIDE, max(PICTURE_SHORT_SIDE, round(width * scale))),
            height=min(MAX_LONG_SIDE, max(PICTURE_SHORT_SIDE, round(height * scale))),
            format="rgb24",
            interpolation=Interpolation.AREA,
        ).to_ndarray()
        upright = np.rot90(small, round(picture.rotation / 90))
        height_px, width_px = upright.shape[:2]
        return b"P", PICTURE.pack(second, pts_s, height_px, width_px) + upright.tobytes()

    def _refuse_encrypted(self) -> NoReturn:
        raise _Refused("unreadable", f"{self._name} is encrypted; register a copy without protection.")


if __name__ == "__main__":
    main()
