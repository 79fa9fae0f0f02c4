"""Sources: where a channel's pictures come from, whatever the protocol.

A source yields samples as they arrive, and as fast as they are taken from a file. Seconds rise within an epoch; what
is skipped was not seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from monitor.ingest.clock import ChannelEpoch
from monitor.ops.channel_status import ChannelStatus
from reference_db.media.decoding import DecodingChild
from reference_db.media.frames import Frame, Mode

ENDS_BYTES = 1 << 20  # of a file's beginning and end that tell it from others
BUFFER_S = 64  # seconds that may wait between a decoder and the loop


Position = Mapping[str, Any]  # plain values, ready for JSON


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One second of a channel as it arrived. `second` is stream time; the frame's own may be raw."""

    epoch: ChannelEpoch
    second: int
    frame: Frame
    arrived_at: datetime
    gap_reason: str  # why seconds just before it are missing, where any are
    position: Position  # from which its source goes on after it


class Source(Protocol):
    """What the pipeline asks of a channel."""

    channel: str

    def resume(self, position: Position) -> None:
        """Goes on from where an earlier life stood, before `samples`; a position of another stream is passed over."""
        ...

    def samples(self) -> AsyncGenerator[Sample, None]:
        """What has arrived, oldest first; ends with the stream."""
        ...

    async def close(self) -> None:
        """Stops reading; `samples` then ends."""
        ...


class SampleBuffer:
    """Hands samples from a decoder's thread to the loop. Bounded: `wait` holds the thread back, else the oldest goes.

    What was received is always handed over, dropped or still waiting, and the status counts which.
    """

    def __init__(self, status: ChannelStatus, *, wait: bool) -> None:
        self._status = status
        self._wait = wait
        self._samples: deque[Sample] = deque()
        self._changed = threading.Condition()
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._error: Exception | None = None

    def put(self, sample: Sample) -> bool:
        """Called by the decoder's thread. False once nobody takes any more."""
        with self._changed:
            while self._wait and len(self._samples) >= BUFFER_S and not self._ended:
                self._changed.wait()
            if self._ended:
                return False
            if len(self._samples) >= BUFFER_S:
                self._samples.popleft()
                self._samples[0] = replace(self._samples[0], gap_reason="overload")
                self._status.count_dropped("overload")
            self._samples.append(sample)
            self._status.count_received()
        self._wake()
        return True

    def end(self, error: Exception | None = None) -> None:
        """Called by either side: nothing more comes; what waits is still handed over."""
        with self._changed:
            self._ended = True
            self._error = self._error or error
            self._changed.notify_all()
        self._wake()

    def discard(self) -> None:
        """Called by the taking side, which leaves: what still waits is dropped."""
        self.end()
        with self._changed:
            for _ in self._samples:
                self._status.count_dropped("stopped")
            self._samples.clear()

    async def take(self) -> Sample | None:
        """The oldest that waits; None is the end. Raises the thread's error at the end."""
        while True:
            with self._changed:
                sample = self._samples.popleft() if self._samples else None
                self._changed.notify_all()
                ended, error = self._ended, self._error
                self._arrived.clear()
            if sample is not None:
                return sample
            if ended:
                if error is not None:
                    raise error
                return None
            await self._arrived.wait()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            return  # the loop is closed: nobody waits


async def read_in_thread(
    buffer: SampleBuffer, read: Callable[[SampleBuffer], None], halt: Callable[[], None], name: str
) -> AsyncGenerator[Sample, None]:
    """What `read` puts into the buffer from a thread of its own; leaving early ends the thread by `halt`."""
    thread = threading.Thread(target=read, args=(buffer,), name=name, daemon=True)
    thread.start()
    try:
        while sample := await buffer.take():
            yield sample
    finally:
        buffer.discard()
        halt()
        await asyncio.to_thread(thread.join)


class FileSource:
    """A video file as a channel, read as fast as the pipeline takes it; its seconds are the file's own."""

    def __init__(self, path: Path, status: ChannelStatus, *, mode: Mode = "exact") -> None:
        self.channel = status.channel
        self.path = path
        self._status = status
        self._mode: Mode = mode
        self._child: DecodingChild | None = None
        self._closed = False
        self._done_s = -1  # seconds that an earlier life has handed over
        self._has_ended = False

    def resume(self, position: Position) -> None:
        if position.get("file") == self._fingerprint():
            self._done_s, self._has_ended = position["second"], position.get("ended", False)

    async def samples(self) -> AsyncGenerator[Sample, None]:
        """Raises MediaError where the file cannot be read."""
        name = f"decode-{self.channel}"
        buffer = SampleBuffer(self._status, wait=True)
        async with aclosing(read_in_thread(buffer, self._read, self._halt, name)) as samples:
            async for sample in samples:
                yield sample

    async def close(self) -> None:
        self._closed = True
        self._halt()

    def _halt(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _read(self, buffer: SampleBuffer) -> None:
        if self._has_ended:
            buffer.end()
            return
        file = self._fingerprint()
        epoch = ChannelEpoch(self.channel, f"file-{file}", None)
        try:
            # Made in this thread, since the child dies with the thread that made it.
            with DecodingChild(str(self.path), mode=self._mode) as self._child:
                if self._closed:
                    self._child.kill()
                for frame in self._child.frames():
                    position = {"file": file, "second": frame.second}
                    sample = Sample(epoch, frame.second, frame, datetime.now(UTC), "not in the file", position)
                    if frame.second > self._done_s and not buffer.put(sample):
                        return
        except Exception as error:  # whatever ends the thread must reach the loop
            buffer.end(error)
        buffer.end()

    def _fingerprint(self) -> str:
        """Which file this is, by its length and its ends: another file of the same name is another stream."""
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                digest.update(file.read(ENDS_BYTES))
                digest.update(str(length := file.seek(0, os.SEEK_END)).encode())
                file.seek(max(0, length - ENDS_BYTES))
                digest.update(file.read(ENDS_BYTES))
        except OSError:
            return "unread"  # decoding says what is wrong with it
        return digest.hexdigest()[:16]
