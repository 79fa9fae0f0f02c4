"""Glimpses: the newest picture of each channel, for whoever wants to see what is on air."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from monitor.ingest.sources import Position, Sample, Source
from reference_db.media.frames import Frame
from reference_db.media.jpeg import encode_jpeg

QUALITY = 75


class LatestFrames:
    """By channel; pictures are kept as they come and made JPEGs only when asked for, in any thread."""

    def __init__(self) -> None:
        self._newest: dict[str, Frame] = {}

    def of(self, source: Source) -> Source:
        """The same source, watched."""
        return _Watched(source, self._newest)

    def jpeg(self, channel: str) -> bytes | None:
        """The newest picture; None where none has come."""
        frame = self._newest.get(channel)
        return None if frame is None else encode_jpeg(frame.picture, quality=QUALITY)

    def forget(self, channel: str) -> None:
        self._newest.pop(channel, None)


class _Watched:
    """A source whose newest frame is noted."""

    def __init__(self, source: Source, newest: dict[str, Frame]) -> None:
        self.channel = source.channel
        self._source, self._newest = source, newest

    def resume(self, position: Position) -> None:
        self._source.resume(position)

    async def samples(self) -> AsyncGenerator[Sample, None]:
        async with aclosing(self._source.samples()) as samples:
            async for sample in samples:
                self._newest[self.channel] = sample.frame
                yield sample

    async def close(self) -> None:
        await self._source.close()
