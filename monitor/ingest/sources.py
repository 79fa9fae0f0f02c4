"""Sources: where the frames of a channel come from, whatever the protocol.

A live source yields samples as they arrive, a file source as fast as they are taken. Seconds rise within an epoch;
skipped seconds were not received.
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
from reference_db.errors import MediaError
from reference_db.media.decoding import DecodingChild
from reference_db.media.frames import Frame, Mode

ENDS_BYTES = 1 << 20  # of the start and of the end of a file, which identify it
BUFFER_S = 64  # samples, of a second each, that may wait between a decoder and the loop


Position = Mapping[str, Any]  # plain values, ready for JSON


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One second of a channel as it arrived. `second` is stream time; that of the frame may be raw."""

    epoch: ChannelEpoch
    second: int
    frame: Frame
    arrived_at: datetime
    gap_reason: str  # why the seconds just before it are missing, if any are
    position: Position  # where a source resumes after this sample


class Source(Protocol):
    """The frames of one channel. One runner uses it: `resume` at most once, then `samples`, then `close`.

    Nothing here may block the event loop: a source decodes in a thread and a child process of its own. It counts each
    frame that it receives or drops in its ChannelStatus; the runner counts those that it takes. The source commits
    nothing: every sample has the position after it, the runner stores that with the snapshot of the same sample, and
    after a restart of the process a new source of the channel is given it.
    """

    channel: str  # its name, which never changes

    def resume(self, position: Position) -> None:
        """Starts after this position of the previous run. Called before `samples`, in a thread: it may read a file.

        Raises nothing: the position of another stream (a changed file or URL) is ignored, and the source starts fresh.
        """
        ...

    def samples(self) -> AsyncGenerator[Sample, None]:
        """The samples in order of arrival, until the stream ends or `close` is called.

        One iterator at a time. The runner closes it (`aclosing`), which ends the reading thread, and may call `samples`
        again after a failure of its own: a live source continues with what arrives now, a file starts again after the
        position of `resume`. Samples received before the end are still yielded.

        A live source does not raise when a connection fails, it reconnects for ever. MediaError (the file cannot be
        decoded) or any other error ends this run of the channel only; the roster starts another with back-off.
        """
        ...

    async def close(self) -> None:
        """Ends `samples` soon, for good: a later call yields nothing. Returns at once; may be called again."""
        ...


class SampleBuffer:
    """Passes samples from a decoder's thread to the loop.

    Bounded: when it is full, `put` waits (`wait`) or drops the oldest sample. Every received sample is taken, dropped
    or still waiting, and the status counts which.
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
        """Called by the decoder's thread. False once no more samples are taken."""
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
        """Called by either side: no more samples are put; those that wait can still be taken."""
        with self._changed:
            self._ended = True
            self._error = self._error or error
            self._changed.notify_all()
        self._wake()

    def discard(self) -> None:
        """Called by the loop when it stops taking: drops the samples that wait."""
        self.end()
        with self._changed:
            for _ in self._samples:
                self._status.count_dropped("stopped")
            self._samples.clear()

    async def take(self) -> Sample | None:
        """The oldest sample that waits; None at the end. Raises the thread's error after the last sample."""
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
            return  # the loop is closed


async def read_in_thread(
    buffer: SampleBuffer, read: Callable[[SampleBuffer], None], halt: Callable[[], None], name: str
) -> AsyncGenerator[Sample, None]:
    """The samples that `read` puts into the buffer from a thread; closing early calls `halt` and joins the thread."""
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
    """A video file as a channel, read as fast as the runner takes its samples; stream time is the file's time."""

    def __init__(self, path: Path, status: ChannelStatus, *, mode: Mode = "exact") -> None:
        self.channel = status.channel
        self.path = path
        self._status = status
        self._mode: Mode = mode
        self._child: DecodingChild | None = None
        self._closed = False
        self._done_s = -1  # the last second of the previous run
        self._has_ended = False

    def resume(self, position: Position) -> None:
        if position.get("file") == self._fingerprint():
            self._done_s, self._has_ended = position["second"], position.get("ended", False)

    async def samples(self) -> AsyncGenerator[Sample, None]:
        """Raises MediaError where the file cannot be decoded."""
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
            # Started in this thread: the child ends with the thread that starts it.
            with DecodingChild(str(self.path), mode=self._mode) as self._child:
                if self._closed:
                    self._child.kill()
                for frame in self._child.frames():
                    self._status.enter(None)  # it may have failed before
                    position = {"file": file, "second": frame.second}
                    sample = Sample(epoch, frame.second, frame, datetime.now(UTC), "not in the file", position)
                    if frame.second > self._done_s and not buffer.put(sample):
                        return
        except Exception as error:  # the consumer must see whatever ends the thread
            reason = str(error).rstrip(".") if isinstance(error, MediaError) else "the file cannot be read"
            self._status.enter("failed", reason, self._child.failure if self._child is not None else None)
            buffer.end(error)
        buffer.end()

    def _fingerprint(self) -> str:
        """Identifies the file by its length and its ends: another file of the same name is another stream."""
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                digest.update(file.read(ENDS_BYTES))
                digest.update(str(length := file.seek(0, os.SEEK_END)).encode())
                file.seek(max(0, length - ENDS_BYTES))
                digest.update(file.read(ENDS_BYTES))
        except OSError:
            return "unread"  # decoding reports the error
        return digest.hexdigest()[:16]
