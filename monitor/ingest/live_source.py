"""Live sources: a network stream, read by a decoding child process that can be killed.

The source reconnects for ever, 1 to 30 s apart. What was missed meanwhile is a gap, or a new epoch where the clock
broke. Pictures that were received before (a dead origin serves its last segments at every connection) are dropped: only
new ones make a channel `up`. A live stream cannot wait: when the buffer is full its oldest frame is dropped and
counted. A stream that arrives faster than real time (a recording behind a live URL) is read in real time.
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
from monitor.ingest.repeats import RepeatDetector
from monitor.ingest.sources import Position, Sample, SampleBuffer, read_in_thread
from monitor.ops.backoff import Backoff
from monitor.ops.logs import channel_logs
from monitor.ops.metrics import Metrics
from reference_db.errors import MediaError
from reference_db.media.addresses import redact_url
from reference_db.media.decoding import DecodingChild
from reference_db.media.frames import Frame, KeyPicture

logger = logging.getLogger(__name__)

# Why a connection ended -> the state of the channel. Any other reason means `failed`.
STATE_OF = {
    "stalled": "stalled",
    "ended": "stalled",
    "lost": "stalled",
    "restarted": "stalled",
    "repeated": "stalled",
    "looped": "stalled",
    "no_video": "no_video",
    "denied": "denied",
    "missing": "denied",
    "refused": "denied",
}
# What is wrong with the pictures, with the seconds for which it has been so.
IMPAIRMENTS = {
    "black": "the picture has been black or one colour for {} s",
    "frozen": "the same picture has been shown for {} s: a frozen encoder or a slate",
}
PACE = 1.02  # stream seconds read per second once the burst is used up; a clock that runs fast is not held back
QUIET_SEGMENTS = 3  # lengths of a segment of HLS without a new one, after which the channel is stalled
BURST_S = 60.0  # stream seconds that may arrive at once: relays and playlists start with some of the past


@dataclass(frozen=True, slots=True)
class LiveTimeouts:
    """Time limits of a live source; tests shorten them."""

    opening_s: float = 30.0
    no_progress_s: float = 10.0
    segments_s: float = 30.0  # the same for a connection of HLS, which arrives one segment at a time
    first_retry_s: float = 1.0
    last_retry_s: float = 30.0
    denied_retry_s: float = 5.0  # the least delay after the server refused us
    repeated_retry_s: float = 5.0  # the longest delay after a connection that served old pictures until its time-out
    steady_s: int = 10  # a connection that delivered so many seconds resets the retry delay
    crashes: int = 5  # of the decoder within `crash_window_s`, after which it is started once per window
    crash_window_s: float = 60.0
    silence_s: float = MAX_SILENCE_S
    impaired_s: int = IMPAIRED_S


class LiveSource:
    """One network stream; see `Source` for the contract."""

    def __init__(
        self,
        settings: ChannelSettings,
        metrics: Metrics,
        *,
        timeouts: LiveTimeouts | None = None,
        real_time: bool = True,
    ) -> None:
        self.channel = settings.name
        self.state = "starting"
        self._settings = settings
        self._metrics = metrics
        self._status = metrics.channels.of(settings.name)
        self._address = hashlib.sha256(redact_url(settings.url).encode()).hexdigest()[:16]
        self._timeouts = timeouts or LiveTimeouts()
        self._pacer = _RealTimePacer() if real_time else None
        self._closed = False
        self._halted = threading.Event()  # the reading thread has to end
        self._child: DecodingChild | None = None
        self._clock = StreamClock(settings.name, max_silence_s=self._timeouts.silence_s)
        self._health = PictureHealth(self._timeouts.impaired_s)
        self._retries = _RetryPolicy(self._timeouts)
        self._repeats = RepeatDetector()
        self._n_delivered = self._n_repeated = self._n_damaged = 0  # of this connection: frames, repeats, damaged
        self._new_at: tuple[datetime, float | None] | None = None  # arrival of the newest frame, also on a steady clock
        self._finished = ""  # the recording that was read to its end
        self._newest: tuple[ChannelEpoch, int] | None = None
        self._n_connections = 0
        self._gap_reason = "unseen"
        self._enter("starting")

    def resume(self, position: Position) -> None:
        """Continues the clock. The time until the first frame is a gap; after a long silence a new epoch starts."""
        if position.get("address") != self._address:
            return
        self._clock.resume(position)
        assert self._clock.epoch is not None
        self._newest = (self._clock.epoch, math.floor(position["last_s"]))
        self._gap_reason = "restart"
        self._repeats.resume(position.get("keys", {}))
        self._note_new(datetime.fromisoformat(position["last_arrival"]), None)

    async def samples(self) -> AsyncGenerator[Sample, None]:
        """Ends only when the source is closed; connection errors are retried here."""
        if not self._closed:
            self._halted.clear()
        if self._n_connections:  # the reader failed: what it had not processed may come again
            self._repeats.forget()
            self._finished = ""
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

    def _enter(self, state: str, cause: str | None = None, reason: str | None = None) -> None:
        self._status.enter(state, reason, cause)
        self.state = state

    def _read(self, buffer: SampleBuffer) -> None:
        """The reading thread: one connection after another until halted."""
        try:
            with channel_logs(self.channel):
                while not self._halted.is_set():
                    self._n_delivered = self._n_repeated = self._n_damaged = 0
                    self._n_connections += 1
                    self._repeats.connect()
                    reason, message = self._read_connection(buffer)
                    if self._halted.is_set():
                        break
                    if STATE_OF.get(reason) == "stalled" and self._sends_nothing_new:
                        reason, message = self._nothing_new()
                    wait_s = self._retries.delay_s(reason, self._n_delivered)
                    state = "failed" if self._retries.is_crash_loop else STATE_OF.get(reason, "failed")
                    logger.warning("%s (%s); reconnecting in %.0f s", message, state, wait_s)
                    self._enter(state, reason, message)
                    self._gap_reason = "restart" if self._gap_reason == "restart" else "reconnect"
                    if self._halted.wait(wait_s):
                        break
                    self._status.count_reconnect(reason)
        except Exception as error:  # the consumer must see whatever ends the thread
            buffer.end(error)
        buffer.end()

    def _read_connection(self, buffer: SampleBuffer) -> tuple[str, str]:
        """Reads one connection to its end; returns why it ended, as a reason and as a message."""
        settings, timeouts = self._settings, self._timeouts
        with DecodingChild(
            settings.url,
            live=True,
            mode=settings.mode,
            allow=settings.allow,
            private=settings.private,
            opening_s=timeouts.opening_s,
            no_progress_s=timeouts.no_progress_s,
        ) as self._child:
            self._child.on_quiet, self._child.on_key = self._be_quiet, self._push_key
            try:
                for frame in self._child.frames():
                    info = self._child.info()
                    if info.recording and info.recording == self._finished:
                        break
                    if "hls" in info.format:
                        self._child.no_progress_s = timeouts.segments_s
                        self._child.quiet_s = max(timeouts.no_progress_s, QUIET_SEGMENTS * info.segment_s)
                    self._count_damage()
                    if self._halted.is_set() or not self._deliver(frame, buffer):
                        break
            except MediaError as error:
                return self._child.failure or "failed", str(error).rstrip(".")
            self._finished = self._child.recording or self._finished
            return "ended", f"{self._child.name} has ended"

    def _count_damage(self) -> None:
        assert self._child is not None
        self._metrics.damaged_pictures.labels(self.channel).inc(self._child.n_damaged - self._n_damaged)
        self._n_damaged = self._child.n_damaged

    def _deliver(self, frame: Frame, buffer: SampleBuffer) -> bool:
        """Puts the frame into the buffer; False once reading has to end."""
        arrived_at, steady_s = datetime.now(UTC), time.monotonic()
        if not self._is_new(frame, arrived_at, steady_s):
            return not self._halted.wait(self._pace_s(self._n_connections, frame.second, steady_s))
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
        self._note_new(arrived_at, steady_s)
        self._check_picture(second, frame)
        if self._halted.wait(self._pace_s(epoch, stream_s, steady_s)):
            return False
        self._newest = (epoch, second)
        self._n_delivered += 1
        position = {"address": self._address, "keys": self._repeats.stored(), **self._clock.position()}
        if not buffer.put(Sample(epoch, second, frame, arrived_at, self._gap_reason, position)):
            return False
        self._gap_reason = "unseen"
        return True

    def _is_new(self, frame: Frame, arrived_at: datetime, steady_s: float) -> bool:
        """Whether the frame was not received before; counts it and checks the state if it was."""
        assert self._child is not None
        silent_s = self._silent_s(arrived_at, steady_s)
        verdict = self._repeats.push(
            self._child.key_of(frame),
            frame.second,
            in_segments="hls" in self._child.info().format,
            is_silent=silent_s > self._timeouts.silence_s,
        )
        if verdict == "new":
            return True
        self._n_repeated += 1
        self._status.count_received()
        self._status.count_dropped("repeated")
        if silent_s > min(self._child.quiet_s, self._child.no_progress_s):
            self._stall(*self._nothing_new())
        return False

    def _push_key(self, key: KeyPicture) -> None:
        assert self._child is not None
        if "hls" in self._child.info().format:
            self._repeats.push_key(key)

    def _be_quiet(self) -> None:
        """Called while a segment of HLS is overdue; the connection stays open for longer."""
        assert self._child is not None
        quiet = "stalled", f"{self._child.name} has sent no picture for {self._child.quiet_s:g} s"
        self._stall(*(self._nothing_new() if self._sends_nothing_new else quiet))

    def _stall(self, cause: str, message: str) -> None:
        """Ends `up` without ending the connection."""
        if self.state in ("up", "impaired"):
            logger.warning("%s (stalled)", message)
            self._enter("stalled", cause, message)

    def _note_new(self, arrived_at: datetime, steady_s: float | None) -> None:
        self._new_at = arrived_at, steady_s
        self._status.note_new_frame(arrived_at)

    def _silent_s(self, arrived_at: datetime, steady_s: float) -> float:
        """The time since the newest frame; 0 before the first."""
        if self._new_at is None:
            return 0.0
        last_at, last_steady_s = self._new_at
        return (arrived_at - last_at).total_seconds() if last_steady_s is None else steady_s - last_steady_s

    @property
    def _sends_nothing_new(self) -> bool:
        """Whether this connection sends pictures, but only old ones."""
        return self._repeats.is_looped or (self._n_repeated > 0 and not self._n_delivered)

    def _nothing_new(self) -> tuple[str, str]:
        """Cause and sentence of a stream that sends only what was received before."""
        assert self._child is not None
        since = "" if self._new_at is None else f" since {self._new_at[0]:%Y-%m-%d %H:%M:%S} UTC"
        if self._repeats.is_looped:
            return "looped", f"{self._child.name} sends the same pictures again and again; nothing new{since}"
        return "repeated", f"{self._child.name} serves only pictures that were received before; nothing new{since}"

    def _pace_s(self, epoch: object, stream_s: float, steady_s: float) -> float:
        return 0.0 if self._pacer is None else self._pacer.wait_s(epoch, stream_s, steady_s)

    def _check_picture(self, second: int, frame: Frame) -> None:
        impairment = self._health.push(second, frame)
        state = "up" if impairment is None else "impaired"
        if state != self.state:
            message = None if impairment is None else IMPAIRMENTS[impairment].format(self._timeouts.impaired_s)
            if message is not None:
                logger.warning("%s", message)
            self._enter(state, impairment, message)


class _RealTimePacer:
    """Slows down a stream that arrives faster than real time."""

    def __init__(self) -> None:
        self._epoch: object = None
        self._last: tuple[float, float] = (0.0, 0.0)  # stream and steady time of the last frame
        self._burst_s = BURST_S  # that is left

    def wait_s(self, epoch: object, stream_s: float, steady_s: float) -> float:
        """How long to wait before the frame at this stream time is delivered."""
        if self._epoch == epoch:
            moved_s, passed_s = stream_s - self._last[0], steady_s - self._last[1]
            self._burst_s = min(BURST_S, self._burst_s + PACE * passed_s - moved_s)
        self._epoch, self._last = epoch, (stream_s, steady_s)
        return max(0.0, -self._burst_s)


class _RetryPolicy:
    """Delays between connections: 1 to 30 s with jitter; none after a crash of the decoder, unless it crashes often."""

    def __init__(self, timeouts: LiveTimeouts) -> None:
        self._timeouts = timeouts
        self._backoff = Backoff(timeouts.first_retry_s, timeouts.last_retry_s, jitter=0.2)
        self._crashes: deque[float] = deque(maxlen=timeouts.crashes)

    @property
    def is_crash_loop(self) -> bool:
        is_full = len(self._crashes) == self._timeouts.crashes
        return is_full and time.monotonic() - self._crashes[0] <= self._timeouts.crash_window_s

    def delay_s(self, reason: str, n_delivered: int) -> float:
        """The delay after a connection that delivered so many frames and ended for this reason."""
        timeouts = self._timeouts
        if n_delivered >= timeouts.steady_s:
            self._backoff.reset()
        if reason == "crashed":
            self._crashes.append(time.monotonic())
            return timeouts.crash_window_s if self.is_crash_loop else 0.0
        if reason == "restarted":
            return timeouts.first_retry_s
        if reason in ("repeated", "looped"):
            return min(timeouts.repeated_retry_s, self._backoff.take_s())
        if STATE_OF.get(reason) == "denied":
            self._backoff.raise_to(timeouts.denied_retry_s)
        return self._backoff.take_s()
