"""The only door from the event loop to computing: encoder, network and index run in one worker thread.

The loop must stay free: heartbeats and HTTP share it. Each channel hands in one second at a time by a lane of its
own. The thread works in turns: a turn takes the seconds that wait, at most one of each channel and the oldest first,
encodes their pictures together, then leads their thoughts side by side, so that all tiles go through the network
together. A channel that is behind thus waits for itself only, and what comes out for one does not depend on the rest.
A channel that has kept us waiting waits a little in turn, so that others come to share its turn: the networks' weights
then go through the processor's caches once for all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from monitor.config.settings import Settings
from monitor.errors import ConfigError
from monitor.ingest.feature_windows import EncodedFrame
from monitor.matching.mask_step import MaskStepNet, TileReader, load_mask_step
from monitor.matching.tiles import SimilarityTile, TileMaps
from monitor.ops.health import Worker
from monitor.ops.metrics import Metrics
from reference_db.features.encoder import Encoder, is_informative, load_encoder
from reference_db.media.frames import Frame

P = ParamSpec("P")
T = TypeVar("T")

TURN = 8  # seconds of a turn at most: the first of them waits for the last
GATHER_S = 0.25  # that a second of live air may wait for company
MatchStep: TypeAlias = Generator[list[SimilarityTile], list[TileMaps], T]  # gives tiles, is sent their maps, returns


class Models:
    """The encoder and the network that reads its similarities."""

    def __init__(self, encoder: Encoder, net: MaskStepNet, *, threads: int = 1) -> None:
        self.encoder = encoder
        self.net = net
        self._reader = TileReader(net, threads=threads)
        weights = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
        self.name = f"{encoder.encoder_id}+{hashlib.sha256(weights).hexdigest()[:8]}"

    def read(self, tiles: list[SimilarityTile]) -> list[TileMaps]:
        """Mask and step map of each tile."""
        return self._reader.read(tiles)

    def encode(self, frames: list[Frame]) -> list[EncodedFrame]:
        """Feature row of each frame and whether it carries information; a held picture is encoded once."""
        places: dict[int, int] = {}
        pictures: list[NDArray[np.uint8]] = []
        for frame in frames:
            if id(frame.picture) not in places:
                places[id(frame.picture)] = len(pictures)
                pictures.append(frame.picture)
        rows = self.encoder.encode(pictures)
        informative = [is_informative(picture) for picture in pictures]
        return [(rows[n], informative[n]) for n in (places[id(frame.picture)] for frame in frames)]


def load_models(settings: Settings, mask_step: Path | None = None) -> Models:
    """The encoder that the settings name and the network; raises ConfigError where they do not belong together."""
    torch.set_num_threads(settings.compute.threads)
    faiss.omp_set_num_threads(settings.compute.threads)
    encoder = load_encoder(settings.encoder, threads=settings.compute.threads)
    net = load_mask_step(mask_step)
    if settings.encoder is None and net.trained_on != encoder.encoder_id:
        raise ConfigError(
            f"the Mask-Step weights were trained on features of {net.trained_on}, not of {encoder.encoder_id}; "
            "run scripts/train_vsal.py for this encoder"
        )
    return Models(encoder, net, threads=settings.compute.threads)


def run_step(models: Models, thought: MatchStep[T]) -> T:
    """What the thought comes to, led by itself."""
    try:
        tiles = next(thought)
        while True:
            tiles = thought.send(models.read(tiles))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class _Job:
    """One second of one channel on its way through a turn."""

    lane: ChannelSlot
    frame: Frame | None  # None where the feature row came along
    think: Callable[[NDArray[np.float32], bool], MatchStep[Any]]
    done: asyncio.Future[Any]
    encoded: EncodedFrame | None = None
    keep: Callable[[Any], Any] | None = None
    thought: MatchStep[Any] | None = None
    tiles: list[SimilarityTile] = field(default_factory=list)
    outcome: Any = None
    error: Exception | None = None

    def begin(self) -> None:
        assert self.encoded is not None
        self.thought = self.think(*self.encoded)
        self._go_on(lambda thought: next(thought))

    def go_on(self, maps: list[TileMaps]) -> None:
        self._go_on(lambda thought: thought.send(maps))

    def _go_on(self, step: Callable[[MatchStep[Any]], list[SimilarityTile]]) -> None:
        assert self.thought is not None
        try:
            self.tiles = step(self.thought)
        except StopIteration as end:
            self.outcome, self.thought = end.value, None
        except Exception as error:  # it is this channel's own; those beside it go on
            self.error, self.thought = error, None

    def kept(self) -> bool:
        """Has the outcome looked at once more; whether that made another of it."""
        if self.keep is None or self.error is not None:
            return False
        before = self.outcome
        try:
            self.outcome = self.keep(before)
        except Exception as error:
            self.error = error
        return self.outcome is not before

    def settle(self) -> None:
        """Tells who waits, in the loop."""
        if self.done.cancelled():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.outcome)


class ChannelSlot:
    """One channel's way to the worker thread: one second at a time, and a held picture is encoded once."""

    def __init__(self, compute: Batcher) -> None:
        self._compute = compute
        self._idle_since = -math.inf  # nothing of it is being worked on
        self.last: tuple[NDArray[np.uint8], EncodedFrame] | None = None  # used by the worker thread only

    def has(self, frame: Frame) -> bool:
        """Whether this picture was the last to be encoded."""
        return self.last is not None and self.last[0] is frame.picture

    async def second(
        self,
        frame: Frame,
        think: Callable[[NDArray[np.float32], bool], MatchStep[T]],
        keep: Callable[[T], T] | None = None,
    ) -> T:
        """What `think` comes to, given the frame's feature row and whether it carries information.

        `keep` may add a snapshot to it: in the same turn, since each way to the thread and back costs the loop.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await self._worked(_Job(self, frame, think, done, keep=keep), done)

    async def encoded(self, encoded: EncodedFrame, think: Callable[[NDArray[np.float32], bool], MatchStep[T]]) -> T:
        """The same for a second that was encoded elsewhere."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await self._worked(_Job(self, None, think, done, encoded), done)

    async def _worked(self, second: _Job, done: asyncio.Future[T]) -> T:
        loop = asyncio.get_running_loop()
        may_wait = loop.time() - self._idle_since >= GATHER_S  # a file, or a channel that is behind, may not
        self._compute.hand_in(second, may_wait)
        try:
            return await done
        finally:
            self._idle_since = loop.time()


class Batcher:
    """One worker thread."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self.models = models
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self.worker = Worker()
        self._waiting: deque[_Job] = deque()  # bounded by the number of lanes: each waits for its second
        self._gathering: asyncio.TimerHandle | None = None

    def lane(self) -> ChannelSlot:
        """A way in for one more channel."""
        return ChannelSlot(self)

    def hand_in(self, second: _Job, may_wait: bool) -> None:
        """Has the second worked in one of the next turns; called in the loop."""
        loop = asyncio.get_running_loop()
        self._waiting.append(second)
        if not may_wait or len(self._waiting) >= TURN:
            self._begin(loop)
        elif self._gathering is None:
            self._gathering = loop.call_later(GATHER_S, self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has all that wait worked."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        for _ in range(-(-len(self._waiting) // TURN)):
            self.worker.given(self._pool.submit(self._turn, loop))

    async def run(self, stage: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, done in the worker thread and timed as `stage`."""

        def timed() -> T:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._metrics.stage_duration.labels(stage).observe(time.perf_counter() - began)

        done = self._pool.submit(timed)
        self.worker.given(done)
        return await asyncio.wrap_future(done)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """One turn; the last of them may find nothing left to do."""
        seconds = [self._waiting.popleft() for _ in range(min(TURN, len(self._waiting)))]
        if not seconds:
            return
        began = time.perf_counter()
        try:
            self._encode(seconds)
            self._match(seconds)
            self._keep(seconds)
        except Exception as error:  # encoder or network failed: each channel is told, and none waits for ever
            for second in seconds:
                second.error = second.error or error
        self._metrics.compute_busy.inc(time.perf_counter() - began)
        loop.call_soon_threadsafe(_settle, seconds)

    def _encode(self, seconds: list[_Job]) -> None:
        shown = [(second, second.frame) for second in seconds if second.frame is not None]
        new = [(second, frame) for second, frame in shown if not second.lane.has(frame)]
        began = time.perf_counter()
        for (second, frame), encoded in zip(new, self.models.encode([frame for _, frame in new]), strict=True):
            second.lane.last = (frame.picture, encoded)
        self._observe("encode", began, len(new))
        for second, _ in shown:
            assert second.lane.last is not None
            second.encoded = second.lane.last[1]

    def _match(self, seconds: list[_Job]) -> None:
        began = time.perf_counter()
        for second in seconds:
            second.begin()
        while thinking := [second for second in seconds if second.thought is not None]:
            maps = self.models.read([tile for second in thinking for tile in second.tiles])
            used = 0
            for second in thinking:
                n = len(second.tiles)
                second.go_on(maps[used : used + n])
                used += n
        self._observe("match", began, len(seconds))

    def _keep(self, seconds: list[_Job]) -> None:
        for second in seconds:
            began = time.perf_counter()
            if second.kept():
                self._observe("snapshot", began, 1)

    def _observe(self, stage: str, began: float, n: int) -> None:
        """Times a stage: what it took for each of n."""
        took_s = time.perf_counter() - began
        for _ in range(n):
            self._metrics.stage_duration.labels(stage).observe(took_s / n)

    def close(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _settle(seconds: list[_Job]) -> None:
    for second in seconds:
        second.settle()
