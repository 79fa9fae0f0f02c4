"""Network streams: a killable decoding child, a clock, and a buffer that forgets the oldest.

The source reconnects for ever, 1 to 30 s apart; what was missed in between is a gap, or a new epoch where the
clock was broken. A stream that cannot wait drops inside the buffer, and each drop is counted.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime

from monitor.ingest.clock import ChannelEpoch, StreamClock
from monitor.ingest.ledger import FrameLedger
from monitor.ingest.sources import Position, Sample, SampleBuffer, read_in_thread
from monitor.metrics import Metrics
from monitor.settings import ChannelSettings
from reference_db.addresses import redact_url
from reference_db.decoding import DecodingChild
from reference_db.errors import MediaError

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0


class LiveSource:
    """One network stream."""

    def __init__(self, settings: ChannelSettings, metrics: Metrics) -> None:
        self.channel = settings.name
        self.state = "starting"
        self._settings = settings
        self._metrics = metrics
        self._ledger = FrameLedger(settings.name, metrics)
        self._address = hashlib.sha256(redact_url(settings.url).encode()).hexdigest()[:16]
        self._closed = False
        self._halted = threading.Event()  # nobody reads now
        self._child: DecodingChild | None = None
        self._clock = StreamClock(settings.name)
        self._newest: tuple[ChannelEpoch, int] | None = None
        self._gap_reason = "unseen"

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
        buffer = SampleBuffer(self._ledger, wait=False)
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

    def _read(self, buffer: SampleBuffer) -> None:
        """The reading thread: one child after another until halted."""
        retry_s = FIRST_RETRY_S
        try:
            while not self._halted.is_set():
                reason = "ended"
                try:
                    if self._read_once(buffer):
                        retry_s = FIRST_RETRY_S
                except MediaError as error:
                    reason = self._child.failure or "failed" if self._child else "failed"
                    logger.warning("%s; trying again in %.0f s", error, retry_s)
                self._metrics.channel_up.labels(self.channel).set(0)
                self.state = reason
                self._gap_reason = "restart" if self._gap_reason == "restart" else "reconnect"
                if self._halted.wait(retry_s * random.uniform(0.8, 1.2)):
                    break
                self._metrics.reconnects.labels(self.channel, reason).inc()
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        except Exception as error:  # whatever ends the thread must reach the loop
            buffer.end(error)
        buffer.end()

    def _read_once(self, buffer: SampleBuffer) -> bool:
        """One connection, to its end. True if it brought a picture."""
        came = False
        with DecodingChild(self._settings.url, live=True, mode=self._settings.mode) as self._child:
            if self._halted.is_set():
                return came
            for frame in self._child.frames():
                if not came:
                    self.state, came = "up", True
                    self._metrics.channel_up.labels(self.channel).set(1)
                arrived_at = datetime.now(UTC)
                # The frame stands for the middle of its second; its place on the grid moves with the clock's laps.
                epoch, stream_s = self._clock.place(frame.second + 0.5, arrived_at)
                second = math.floor(stream_s)
                if self._newest is not None and self._newest[0] == epoch and second <= self._newest[1]:
                    self._ledger.received()
                    self._ledger.dropped("backward")
                    continue
                self._newest = (epoch, second)
                position = {"address": self._address, **self._clock.position()}
                if not buffer.put(Sample(epoch, second, frame, arrived_at, self._gap_reason, position)):
                    break
                self._gap_reason = "unseen"
        return came
