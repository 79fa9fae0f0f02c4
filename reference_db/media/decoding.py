"""Decoding in a child process that can be killed: a URL or file in, `Frame`s out.

FFmpeg cannot be interrupted and a malformed file may crash it, so every source is decoded by its own
`python -m reference_db.media.decoder`. It reads its request as JSON from stdin (so that no process list shows a URL
with a password), answers with records on stdout, and imports neither torch nor the monitor. `DecodingChild` is the
parent's end of the pipe.

A record is a kind (1 byte), a length (4 bytes) and a body: I = VideoInfo as JSON, P = a picture, H = the last picture
held for another second, T = a still, K = a KeyPicture, W = a warning, S = its sandbox as JSON, E = the final error as
JSON, Z = the end, with the name of the recording that ended.
"""

import fcntl
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from reference_db.errors import MediaError
from reference_db.media.addresses import display_name
from reference_db.media.frames import KEY, PICTURE, RECORD, Frame, KeyPicture, Mode, VideoInfo
from reference_db.media.sandbox.confinement import Mechanism

logger = logging.getLogger(__name__)

NO_PROGRESS_S = 30.0  # a child without a picture for so long is killed
OPENING_S = 30.0  # more than FFmpeg's own time-out, for a busy machine
PIPE_BYTES = 1 << 20  # the default limit without privileges: the child decodes five pictures ahead
STDERR_BYTES = 4096  # the end of the child's stderr, for the log
REPORT_URL = "http://127.0.0.1:9/"  # of a child that opens nothing
MAX_WARNINGS = 16  # different warnings of one child that are logged

# The variables that a decoder needs; tokens and passwords in our environment are not passed on.
CHILD_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
NETWORK_ENVIRONMENT = ("http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")


class DecodingChild:
    """A decoder in a process of its own; iterate `frames()` in one thread, `kill()` it from any.

    A file's time starts at its first picture; with `live`, times are the stream's own. The child dies with the thread
    that created it (PR_SET_PDEATHSIG), so create it in one that lives as long. `frames` calls `on_still` with the
    number and pixels of each still: number n shows the time n / STILLS_PER_S. It needs the mode `exact`.
    """

    def __init__(
        self,
        url: str,
        *,
        live: bool = False,
        mode: Mode = "exact",
        allow: Sequence[str] = (),
        private: bool = False,
        opening_s: float = OPENING_S,
        no_progress_s: float = NO_PROGRESS_S,
        report: bool = False,
        on_still: Callable[[int, NDArray[np.uint8]], None] | None = None,
    ) -> None:
        self.name = display_name(url)
        self.failure: str | None = None  # kind of the error that ended it: missing, denied, stalled, crashed, ...
        self.no_progress_s = no_progress_s  # may be changed while it runs
        self.quiet_s = math.inf  # after which without a picture `on_quiet` is called; may be changed while it runs
        self.on_quiet: Callable[[], None] = lambda: None
        self.on_key: Callable[[KeyPicture], None] = lambda key: None  # called in the thread that reads the frames
        self.keys: deque[KeyPicture] = deque(maxlen=32)  # the newest, live only
        self.n_damaged = 0  # pictures decoded with damage, live only
        self._on_still = on_still
        self.recording = ""  # at the end of a stream: `VideoInfo.recording`, also if it was live before
        self._opening_s = opening_s
        self._warned: set[str] = set()
        self._killed = False
        self._quiet_at_s = math.inf
        self._info: VideoInfo | None = None
        self._stderr = bytearray()
        self._unread = bytearray()
        needed = (*CHILD_ENVIRONMENT, *(NETWORK_ENVIRONMENT if live and not url.lower().startswith("file:") else ()))
        environment = {name: os.environ[name] for name in needed if name in os.environ}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "reference_db.media.decoder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C goes to the parent only, which ends the child itself
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(self._err, select.POLLIN)
        request = {"url": url, "live": live, "mode": mode, "allow": list(allow), "parent": os.getpid()}
        request["private"] = private  # its own host may have a private address
        request["report"] = report  # of its sandbox, and nothing else
        request["stills"] = on_still is not None
        request["no_video_s"] = 0.8 * no_progress_s  # so that the child, which knows the reason, reports first
        try:
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; reading its answer gives the reason

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
        """The video's metadata; waits until it is open. The size of a live one may be 0 before the first picture."""
        if self._info is None:
            self._read_record(b"I", self._opening_s)
        assert self._info is not None
        return self._info

    def mechanisms(self) -> list[Mechanism]:
        """The sandbox of a child that was started to report it."""
        _, body = self._read_record(b"S", self._opening_s)
        return [Mechanism(**one) for one in json.loads(body)]

    def frames(self) -> Iterator[Frame]:
        """The frames until the video ends or `kill` is called; raises MediaError."""
        try:
            self.info()
        except _Killed:
            return
        picture: NDArray[np.uint8] | None = None
        kinds = b"PHZ" if self._on_still is None else b"PHTZ"
        while True:
            try:
                kind, body = self._read_record(kinds, self.no_progress_s)
            except _Killed:
                return
            if kind == b"Z":
                self.recording = body.decode()
                return
            second, pts_s, age_s, height, width = PICTURE.unpack_from(body)
            if kind == b"T" and self._on_still is not None:
                self._on_still(second, np.frombuffer(body, np.uint8, offset=PICTURE.size).reshape(height, width, 3))
                continue
            if kind == b"P":
                picture = np.frombuffer(body, np.uint8, offset=PICTURE.size).reshape(height, width, 3)
            assert picture is not None
            yield Frame(second, pts_s, picture, kind == b"H", age_s)

    def key_of(self, frame: Frame) -> KeyPicture | None:
        """The key picture from which this frame was decoded; None where the stream has no time stamps."""
        return next((key for key in reversed(self.keys) if key.pts_s <= frame.pts_s), None)

    def kill(self) -> None:
        """Kills the child; a reader in another thread then sees the end."""
        self._killed = True
        self._process.kill()  # the kernel kills its gateway with it

    def close(self) -> None:
        """Kills the child and closes its pipes."""
        self.kill()
        self._process.wait()
        with suppress(ChildProcessError):  # in a container the gateway, an orphan now, may have become our child
            os.waitid(os.P_PGID, self._process.pid, os.WEXITED)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe
            pipe.close()

    def _read_record(self, kinds: bytes, timeout_s: float) -> tuple[bytes, bytes]:
        deadline, self._quiet_at_s = time.monotonic() + timeout_s, time.monotonic() + self.quiet_s
        while True:
            kind, length = RECORD.unpack(self._read(RECORD.size, deadline, timeout_s))
            body = self._read(length, deadline, timeout_s)
            if kind == b"K":  # not progress: it may be a key picture that cannot be decoded
                self.n_damaged, *key = KEY.unpack(body)
                self.keys.append(KeyPicture(*key))
                self.on_key(self.keys[-1])
            elif kind == b"W":
                self._warn(body.decode())
            elif kind == b"I":
                self._info = VideoInfo(**json.loads(body))
                if kind in kinds:
                    return kind, body
            elif kind == b"E":
                raise self._failed(**json.loads(body))
            elif kind in kinds:
                return kind, body
            else:
                raise self._failed("crashed", f"The decoder of {self.name} sent an unexpected record.")

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(sentence)
            logger.warning("%s: %s", self.name, sentence)

    def _read(self, n_bytes: int, deadline: float, timeout_s: float) -> bytes:
        while len(self._unread) < n_bytes:
            until_s = min(deadline, self._quiet_at_s)
            ready = {fd for fd, _ in self._poll.poll(max(0.0, until_s - time.monotonic()) * 1000)}
            if not ready and until_s < deadline:
                self._quiet_at_s = math.inf
                self.on_quiet()
            elif not ready:
                self._process.kill()
                raise self._failed("stalled", f"{self.name} sent no picture for {timeout_s:g} s.")
            if self._err in ready:
                output = os.read(self._err, STDERR_BYTES)
                self._stderr = (self._stderr + output)[-STDERR_BYTES:]
                if not output:
                    self._poll.unregister(self._err)
            if self._out in ready:
                received = os.read(self._out, PIPE_BYTES)
                if not received:
                    raise self._exit_error()
                self._unread += received
        with memoryview(self._unread) as unread:
            content = bytes(unread[:n_bytes])
        del self._unread[:n_bytes]
        return content

    def _exit_error(self) -> Exception:
        if self._killed:
            return _Killed()
        code = self._process.wait()
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._stderr:
            logger.debug("stderr of the decoder of %s: %s", self.name, self._stderr.decode(errors="replace"))
        return self._failed("crashed", f"The decoder of {self.name} died ({reason}); the video may be damaged.")

    def _failed(self, kind: str, message: str) -> MediaError:
        self.failure = kind
        return MediaError(message)


class _Killed(Exception):
    """`kill` was called."""


def decode_file(path: Path, *, mode: Mode = "exact") -> Iterator[Frame]:
    """The frames of a video file; time is presentation time minus the first picture's.

    Decoding runs in a child process, ahead of the reader by what fits in the pipe. Raises MediaError.
    """
    with DecodingChild(str(path), mode=mode) as child:
        yield from child.frames()


def probe(path: Path) -> VideoInfo:
    """The file's video metadata; raises MediaError if it has no video."""
    with DecodingChild(str(path)) as child:
        return child.info()


def sandbox_report() -> list[Mechanism]:
    """What confines a decoding child on this system: starts one that only reports it. Raises MediaError."""
    with DecodingChild(REPORT_URL, live=True, report=True) as child:
        return child.mechanisms()
