"""Helpers for tests of live channels: clips to stream, and a live source that is read in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.config.settings import ChannelSettings
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.live_source import LiveSource, LiveTimeouts
from monitor.ingest.sources import Sample
from monitor.ops.metrics import Metrics
from tests.support import media

FPS, LENGTH_S = 5, 4
SHORT_TIMEOUTS = LiveTimeouts(
    opening_s=60,  # a busy machine needs long to start a process
    no_progress_s=4,
    segments_s=8,
    first_retry_s=0.1,
    last_retry_s=1.0,
    denied_retry_s=0.2,
    crash_window_s=20,
    impaired_s=6,
)
WAIT_S = 180.0  # for a busy machine; normally a few seconds


def write_stream_clip(path: Path, seed: int = 1, *, width: int = 160, height: int = 90, codec: str = "libx264") -> Path:
    """A clip for `LiveStream`: four seconds with a key frame in each."""
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    shown: Callable[[float], NDArray[np.uint8]] = lambda t: media.picture(seed, t, width, height)  # noqa: E731
    return media.write_clip(path, ((t, shown(t)) for t in times), fps=FPS, gop=FPS, b_frames=0, codec=codec)


def write_still(path: Path, level: int | None = None) -> Path:
    """One grey level, or one still picture if there is no level."""
    still = media.picture(7, 0.0, 160, 90) if level is None else np.full((90, 160, 3), level, np.uint8)
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    return media.write_clip(path, ((t, still) for t in times), fps=FPS, gop=FPS, b_frames=0)


class RunningSource:
    """A live source that a thread reads, and all its samples; without `pictures` only a corner of each."""

    def __init__(self, source: LiveSource, metrics: Metrics, *, pictures: bool = True) -> None:
        self.source, self.metrics = source, metrics
        self.samples: list[Sample] = []
        self._with_pictures = pictures
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        async for sample in self.source.samples():
            if not self._with_pictures:
                corner = sample.frame.picture[:1, :1].copy()
                sample = replace(sample, frame=replace(sample.frame, picture=corner))
            self.samples.append(sample)

    def close(self) -> None:
        asyncio.run(self.source.close())
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.source.channel}: no {what}; {self.source.state}, {self.seconds}"
            time.sleep(0.02)  # polls: the source has its own thread

    def wait_for_state(self, state: str) -> None:
        self.wait(lambda: self.source.state == state, state)
        assert self.value("copywatch_channel_state", state=state) == 1
        assert self.value("copywatch_channel_up") == (state in ("up", "impaired"))

    def wait_for_more(self, n: int = 3) -> None:
        """Waits for so many more samples."""
        wanted = len(self.samples) + n
        self.wait(lambda: len(self.samples) >= wanted, f"{n} more samples")

    @property
    def pid(self) -> int:
        """The process id of the decoder; 0 before the first."""
        child = self.source._child
        return 0 if child is None else child.pid

    @property
    def seconds(self) -> list[int]:
        return [sample.second for sample in self.samples]

    @property
    def epochs(self) -> list[ChannelEpoch]:
        """In order; after a silence the next epoch may have the same name, because the clock is the same."""
        return list(dict.fromkeys(sample.epoch for sample in list(self.samples)))

    @property
    def holes(self) -> list[tuple[int, int, str]]:
        """(first, n, reason) of the seconds missing inside epochs."""
        return [
            (a.second + 1, b.second - a.second - 1, b.gap_reason)
            for a, b in pairwise(list(self.samples))
            if a.epoch == b.epoch and b.second > a.second + 1
        ]

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"channel": self.source.channel, **labels}) or 0.0


@contextmanager
def running_source(
    url: str,
    name: str = "ch",
    *,
    mode: str = "exact",
    timeouts: LiveTimeouts = SHORT_TIMEOUTS,
    metrics: Metrics | None = None,
    pictures: bool = True,
) -> Iterator[RunningSource]:
    metrics = metrics or Metrics(CollectorRegistry())
    settings = ChannelSettings.model_validate({"name": name, "url": url, "mode": mode})
    running = RunningSource(LiveSource(settings, metrics, timeouts=timeouts), metrics, pictures=pictures)
    try:
        yield running
    finally:
        running.close()
