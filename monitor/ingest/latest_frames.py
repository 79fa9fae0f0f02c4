"""Latest frames: the newest picture of each channel, for the dashboard and the API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from monitor.ingest.sources import Position, Sample, Source
from reference_db.media.frames import Frame
from reference_db.media.jpeg import encode_jpeg

QUALITY = 75


class LatestFrames:
    """By channel. Frames are stored as they arrive and encoded only on request; any thread may call."""

    def __init__(self) -> None:
        self._frames: dict[str, Frame] = {}

    def wrap(self, source: Source) -> Source:
        """The same source; each frame that is taken from it becomes its channel's latest one."""
        return _RecordedSource(source, self._frames)

    def jpeg(self, channel: str) -> bytes | None:
        """The latest frame as JPEG; None before the first."""
        frame = self._frames.get(channel)
        return None if frame is None else encode_jpeg(frame.picture, quality=QUALITY)

    def forget(self, channel: str) -> None:
        """Drops the frame of a removed channel; call it after the last sample was taken from the channel's source."""
        self._frames.pop(channel, None)


class _RecordedSource:
    def __init__(self, source: Source, frames: dict[str, Frame]) -> None:
        self.channel = source.channel
        self._source, self._frames = source, frames

    def resume(self, position: Position) -> None:
        self._source.resume(position)

    async def samples(self) -> AsyncGenerator[Sample, None]:
        async with aclosing(self._source.samples()) as samples:
            async for sample in samples:
                self._frames[self.channel] = sample.frame
                yield sample

    async def close(self) -> None:
        await self._source.close()
