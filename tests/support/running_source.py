"""What tests of live channels share: clips for the air, and a source that is read while the test goes on."""

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
from monitor.ingest.live_source import LiveSource, Patience
from monitor.ingest.sources import Sample
from monitor.ops.metrics import Metrics
from tests.support import media

FPS, LENGTH_S = 5, 4
HASTY = Patience(
    opening_s=60,  # a busy machine takes long to start a process
    no_progress_s=4,
    segments_s=8,
    first_retry_s=0.1,
    last_retry_s=1.0,
    denied_retry_s=0.2,
    crash_window_s=20,
    impaired_s=6,
)
WAIT_S = 180.0  # a busy machine; what is waited for comes in a few


def write_air(path: Path, seed: int = 1, *, width: int = 160, height: int = 90, codec: str = "libx264") -> Path:
    """A clip for `Air`: four seconds, a key picture each second."""
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    shown: Callable[[float], NDArray[np.uint8]] = lambda t: media.picture(seed, t, width, height)  # noqa: E731
    return media.write_clip(path, ((t, shown(t)) for t in times), fps=FPS, gop=FPS, b_frames=0, codec=codec)


def write_still(path: Path, level: int | None = None) -> Path:
    """Black (a level) or one unmoving picture (none)."""
    still = media.picture(7, 0.0, 160, 90) if level is None else np.full((90, 160, 3), level, np.uint8)
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    return media.write_clip(path, ((t, still) for t in times), fps=FPS, gop=FPS, b_frames=0)


class Watching:
    """A live source and all that it has handed over; without `pictures`, of each a corner only."""

    def __init__(self, source: LiveSource, metrics: Metrics, *, pictures: bool = True) -> None:
        self.source, self.metrics = source, metrics
        self.samples: list[Sample] = []
        self._keeps_pictures = pictures
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        async for sample in self.source.samples():
            if not self._keeps_pictures:
                corner = sample.frame.picture[:1, :1].copy()
                sample = replace(sample, frame=replace(sample.frame, picture=corner))
            self.samples.append(sample)

    def close(self) -> None:
        asyncio.run(self.source.close())
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"{self.source.channel}: no {what}; {self.source.state}, {self.seconds}"
            time.sleep(0.02)  # between two looks: the source has a thread of its own

    def wait_for_state(self, state: str) -> None:
        self.wait(lambda: self.source.state == state, state)
        assert self.value("copywatch_channel_state", state=state) == 1
        assert self.value("copywatch_channel_up") == (state in ("up", "impaired"))

    def wait_for_more(self, n: int = 3) -> None:
        """So many seconds more than there are now."""
        wanted = len(self.samples) + n
        self.wait(lambda: len(self.samples) >= wanted, f"{n} more seconds")

    @property
    def pid(self) -> int:
        """Of the decoder; 0 before there is one."""
        child = self.source._child
        return 0 if child is None else child.pid

    @property
    def seconds(self) -> list[int]:
        return [sample.second for sample in self.samples]

    @property
    def epochs(self) -> list[ChannelEpoch]:
        """In order; after a silence another may have the name of the one before, since its clock is the same."""
        return list(dict.fromkeys(sample.epoch for sample in list(self.samples)))

    @property
    def holes(self) -> list[tuple[int, int, str]]:
        """(first, n, reason) of what is missing inside epochs."""
        return [
            (a.second + 1, b.second - a.second - 1, b.gap_reason)
            for a, b in pairwise(list(self.samples))
            if a.epoch == b.epoch and b.second > a.second + 1
        ]

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"channel": self.source.channel, **labels}) or 0.0


@contextmanager
def watching(
    url: str,
    name: str = "ch",
    *,
    mode: str = "exact",
    patience: Patience = HASTY,
    metrics: Metrics | None = None,
    pictures: bool = True,
) -> Iterator[Watching]:
    metrics = metrics or Metrics(CollectorRegistry())
    settings = ChannelSettings.model_validate({"name": name, "url": url, "mode": mode})
    watched = Watching(LiveSource(settings, metrics, patience=patience), metrics, pictures=pictures)
    try:
        yield watched
    finally:
        watched.close()
