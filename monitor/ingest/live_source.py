"""Network streams: a killable decoding child, a clock, and a buffer that forgets the oldest.

The source reconnects for ever, 1 to 30 s apart; what was missed in between is a gap, or a new epoch where the
clock was broken. A stream that cannot wait drops inside the buffer, and each drop is counted. One that comes faster
than time passes (a recording behind a live address) is read no faster than time passes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

from monitor.config.settings import ChannelSettings
from monitor.ingest.clock import MAX_SILENCE_S, ChannelEpoch, StreamClock
from monitor.ingest.picture_health import IMPAIRED_S, PictureHealth
from monitor.ingest.sources import Position, Sample, SampleBuffer, read_in_thread
from monitor.ops.backoff import Backoff
from monitor.ops.logs import channel_logs
from monitor.ops.metrics import Metrics
from reference_db.errors import MediaError
from reference_db.media.addresses import redact_url
from reference_db.media.decoding import DecodingChild
from reference_db.media.frames import Frame

logger = logging.getLogger(__name__)

# Why a connection ended -> what the channel is then. Whatever is not here has failed.
STATE_OF = {
    "stalled": "stalled",
    "ended": "stalled",
    "lost": "stalled",
    "no_video": "no_video",
    "denied": "denied",
    "missing": "denied",
    "refused": "denied",
}
PACE = 1.02  # stream seconds a second that are read once the burst is used up; a fast clock is not held back
BURST_S = 60.0  # that may come at once: relays and playlists begin with a little of the past


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a live source waits for what. Tests are less patient."""

    opening_s: float = 30.0
    no_progress_s: float = 10.0
    segments_s: float = 30.0  # the same for HLS, which comes a segment at a time
    first_retry_s: float = 1.0
    last_retry_s: float = 30.0
    denied_retry_s: float = 5.0  # at least, where somebody refuses us
    steady_s: int = 10  # after a connection that brought so many seconds of air, the first retry is soon again
    crashes: int = 5  # of the decoder within `crash_window_s`: from then on it is started once in that time
    crash_window_s: float = 60.0
    silence_s: float = MAX_SILENCE_S
    impaired_s: int = IMPAIRED_S


class LiveSource:
    """One network stream."""

    def __init__(
        self,
        settings: ChannelSettings,
        metrics: Metrics,
        *,
        patience: Patience | None = None,
        real_time: bool = True,
    ) -> None:
        self.channel = settings.name
        self.state = "starting"
        self._settings = settings
        self._metrics = metrics
        self._status = metrics.channels.of(settings.name)
        self._address = hashlib.sha256(redact_url(settings.url).encode()).hexdigest()[:16]
        self._patience = patience or Patience()
        self._pace = _Pace() if real_time else None
        self._closed = False
        self._halted = threading.Event()  # nobody reads now
        self._child: DecodingChild | None = None
        self._clock = StreamClock(settings.name, max_silence_s=self._patience.silence_s)
        self._health = PictureHealth(self._patience.impaired_s)
        self._retry = _Retry(self._patience)
        self._n_brought = self._n_damaged = 0  # by this connection: seconds, damaged pictures
        self._newest: tuple[ChannelEpoch, int] | None = None
        self._gap_reason = "unseen"
        self._enter("starting")

    def resume(self, position: Position) -> None:
        """What airs until the first picture is a gap; after too long a silence, another epoch begins."""
        if position.get("address") != self._address:
            return
        self._clock.resume(position)
        assert self._clock.epoch is not None
        self._newest = (self._clock.epoch, math.floor(position["last_s"]))
        self._gap_reason = "restart"

    async def samples(self) -> AsyncGenerator[Sample, None]:
        """Ends when the source is closed; may be asked for again after its reader failed."""
        if not self._closed:
            self._halted.clear()
        buffer = SampleBuffer(self._status, wait=False)
        async with aclosing(read_in_thread(buffer, self._read, self._halt, f"live-{self.channel}")) as samples:
            async for sample in samples:
                yield sample

    async def close(self) -> None:
        self._closed = True
        self._halt()

    def _halt(self) -> None:
        self._halted.set()
        if self._child is not None:
            self._child.kill()

    def _enter(self, state: str, reason: str | None = None) -> None:
        self._status.enter(state, reason)
        self.state = state

    def _read(self, buffer: SampleBuffer) -> None:
        """The reading thread: one child after another until halted."""
        try:
            with channel_logs(self.channel):
                while not self._halted.is_set():
                    self._n_brought = self._n_damaged = 0
                    reason, words = self._connection(buffer)
                    if self._halted.is_set():
                        break
                    wait_s = self._retry.after(reason, self._n_brought)
                    state = "failed" if self._retry.is_crash_loop else STATE_OF.get(reason, "failed")
                    logger.warning("%s (%s); trying again in %.0f s", words, state, wait_s)
                    self._enter(state, reason)
                    self._gap_reason = "restart" if self._gap_reason == "restart" else "reconnect"
                    if self._halted.wait(wait_s):
                        break
                    self._status.count_reconnect(reason)
        except Exception as error:  # whatever ends the thread must reach the loop
            buffer.end(error)
        buffer.end()

    def _connection(self, buffer: SampleBuffer) -> tuple[str, str]:
        """One connection, to its end: why it ended, as a kind and in words."""
        settings, patience = self._settings, self._patience
        with DecodingChild(
            settings.url,
            live=True,
            mode=settings.mode,
            allow=settings.allow,
            opening_s=patience.opening_s,
            no_progress_s=patience.no_progress_s,
        ) as self._child:
            try:
                for frame in self._child.frames():
                    if "hls" in self._child.info().format:
                        self._child.no_progress_s = patience.segments_s
                    self._count_damage()
                    if self._halted.is_set() or not self._take(frame, buffer):
                        break
            except MediaError as error:
                return self._child.failure or "failed", str(error).rstrip(".")
            return "ended", f"{self._child.name} has ended"

    def _count_damage(self) -> None:
        assert self._child is not None
        self._metrics.damaged_pictures.labels(self.channel).inc(self._child.n_damaged - self._n_damaged)
        self._n_damaged = self._child.n_damaged

    def _take(self, frame: Frame, buffer: SampleBuffer) -> bool:
        """False once nobody takes any more."""
        arrived_at, steady_s = datetime.now(UTC), time.monotonic()
        # The frame stands for the middle of its second; its place on the grid moves with the clock's laps.
        epoch, stream_s = self._clock.place(frame.second + 0.5, arrived_at, steady_s)
        second = math.floor(stream_s)
        is_new_epoch = self._newest is None or self._newest[0] != epoch
        if is_new_epoch:
            self._metrics.epochs.labels(self.channel).inc()
        elif self._newest is not None and second <= self._newest[1]:
            self._status.count_received()
            self._status.count_dropped("backward")
            return True
        impairment = self._health.push(second, frame)
        state = "up" if impairment is None else "impaired"
        if state != self.state:
            if state == "impaired":
                logger.warning("black or frozen for %d s", self._patience.impaired_s)
            self._enter(state, impairment)
        if self._pace is not None and self._halted.wait(self._pace.wait_s(epoch, stream_s, steady_s)):
            return False
        self._newest = (epoch, second)
        self._n_brought += 1
        position = {"address": self._address, **self._clock.position()}
        if not buffer.put(Sample(epoch, second, frame, arrived_at, self._gap_reason, position)):
            return False
        self._gap_reason = "unseen"
        return True


class _Pace:
    """Holds a stream back that comes faster than time passes."""

    def __init__(self) -> None:
        self._epoch: ChannelEpoch | None = None
        self._last: tuple[float, float] = (0.0, 0.0)
        self._burst_s = BURST_S

    def wait_s(self, epoch: ChannelEpoch, stream_s: float, steady_s: float) -> float:
        """How long to wait before this second is handed over."""
        if self._epoch == epoch:
            moved_s, passed_s = stream_s - self._last[0], steady_s - self._last[1]
            self._burst_s = min(BURST_S, self._burst_s + PACE * passed_s - moved_s)
        self._epoch, self._last = epoch, (stream_s, steady_s)
        return max(0.0, -self._burst_s)


class _Retry:
    """When to connect again: 1 to 30 s with jitter, at once after a crash of the decoder, seldom when it keeps on."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._backoff = Backoff(patience.first_retry_s, patience.last_retry_s, jitter=0.2)
        self._crashes: deque[float] = deque(maxlen=patience.crashes)

    @property
    def is_crash_loop(self) -> bool:
        full = len(self._crashes) == self._patience.crashes
        return full and time.monotonic() - self._crashes[0] <= self._patience.crash_window_s

    def after(self, reason: str, n_brought: int) -> float:
        """Seconds to wait after a connection that brought so many seconds of air ended for this reason."""
        patience = self._patience
        if n_brought >= patience.steady_s:
            self._backoff.reset()
        if reason == "crashed":
            self._crashes.append(time.monotonic())
            return patience.crash_window_s if self.is_crash_loop else 0.0
        if STATE_OF.get(reason) == "denied":
            self._backoff.raise_to(patience.denied_retry_s)
        return self._backoff.take_s()
