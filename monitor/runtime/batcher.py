"""The batcher drives the match steps of all channels (`match_step.py`) in one worker thread.

The event loop stays free for heartbeats and HTTP: encoder, network and index run in the worker thread only. Each
channel submits one frame at a time through its own slot. A batch takes the waiting frames, oldest first and at most one
of each channel, encodes their pictures together, then runs their match steps side by side, so that the network reads
the tiles of all of them together. A channel that is behind thus delays only itself.
A live frame waits up to 250 ms so that frames of other channels can join its batch: the weights of the networks then
pass through the processor's caches once for all of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from monitor.ingest.feature_windows import EncodedFrame
from monitor.matching.tiles import SimilarityTile, TileMaps
from monitor.ops.health import Worker
from monitor.ops.metrics import Metrics
from monitor.runtime.match_step import MatchStep, NewStep
from monitor.runtime.models import Models
from reference_db.media.frames import Frame

P = ParamSpec("P")
T = TypeVar("T")

MAX_BATCH = 8  # frames: the first of them waits for the last
MAX_WAIT_S = 0.25  # for which a live frame may wait for others to join its batch


def run_step(models: Models, step: MatchStep[T]) -> T:
    """Runs one step to its end, in a batch of its own, and returns its result."""
    try:
        tiles = next(step)
        while True:
            tiles = step.send(models.read(tiles))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted frame: its match step while the batch runs, then the outcome for the caller."""

    slot: ChannelSlot
    frame: Frame | None  # None where the caller has the feature row
    new_step: NewStep[Any]
    caller: asyncio.Future[Any]
    encoded: EncodedFrame | None = None
    add_snapshot: Callable[[Any], Any] | None = None
    step: MatchStep[Any] | None = None  # None before its start and after its end
    tiles: list[SimilarityTile] = field(default_factory=list)
    outcome: Any = None
    error: Exception | None = None

    def start(self) -> None:
        """Runs the step up to its first tiles."""
        assert self.encoded is not None
        self.step = self.new_step(*self.encoded)
        self._advance(self.step.__next__)

    def resume(self, maps: list[TileMaps]) -> None:
        """Runs the step up to its next tiles, given the maps of the last."""
        assert self.step is not None
        self._advance(self.step.send, maps)

    def _advance(self, run: Callable[P, list[SimilarityTile]], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            self.tiles = run(*args, **kwargs)
        except StopIteration as end:
            self.outcome, self.step = end.value, None
        except Exception as error:  # ends this channel's job only
            self.error, self.step = error, None

    def try_snapshot(self) -> bool:
        """Gives the caller the chance to add a snapshot to the outcome; whether it did."""
        if self.add_snapshot is None or self.error is not None:
            return False
        before = self.outcome
        try:
            self.outcome = self.add_snapshot(before)
        except Exception as error:
            self.error = error
        return self.outcome is not before

    def finish(self) -> None:
        """Resolves the caller's future; in the event loop."""
        if self.caller.cancelled():
            return
        if self.error is not None:
            self.caller.set_exception(self.error)
        else:
            self.caller.set_result(self.outcome)


class ChannelSlot:
    """One channel's access to the worker thread: one frame at a time, and a held picture is encoded once."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._idle_since = -math.inf  # when its last job finished
        self.last_encoded: tuple[NDArray[np.uint8], EncodedFrame] | None = None  # used by the worker thread only

    def has_encoded(self, frame: Frame) -> bool:
        """Whether this picture was the last to be encoded."""
        return self.last_encoded is not None and self.last_encoded[0] is frame.picture

    async def submit(self, frame: Frame, new_step: NewStep[T], add_snapshot: Callable[[T], T] | None = None) -> T:
        """Encodes the frame, runs the step made of its feature row, and returns the step's result.

        `add_snapshot` may add a snapshot to the result: within the same batch, since each hand-over between the loop
        and the thread costs time.
        """
        caller: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await self._finished(_Job(self, frame, new_step, caller, add_snapshot=add_snapshot), caller)

    async def submit_encoded(self, encoded: EncodedFrame, new_step: NewStep[T]) -> T:
        """The same for a frame that another process encoded."""
        caller: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await self._finished(_Job(self, None, new_step, caller, encoded), caller)

    async def _finished(self, job: _Job, caller: asyncio.Future[T]) -> T:
        loop = asyncio.get_running_loop()
        may_wait = loop.time() - self._idle_since >= MAX_WAIT_S  # false for files and for channels that are behind
        self._batcher.enqueue(job, may_wait)
        try:
            return await caller
        finally:
            self._idle_since = loop.time()


class Batcher:
    """One worker thread and the jobs that wait for it."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self.models = models
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self.worker = Worker()
        self._waiting: deque[_Job] = deque()  # bounded by the number of slots: each has one job at a time
        self._timer: asyncio.TimerHandle | None = None  # runs while jobs wait for others to join them

    def slot(self) -> ChannelSlot:
        """Access for one more channel."""
        return ChannelSlot(self)

    def enqueue(self, job: _Job, may_wait: bool) -> None:
        """Adds the job to the next batch with room; called in the event loop."""
        loop = asyncio.get_running_loop()
        self._waiting.append(job)
        if not may_wait or len(self._waiting) >= MAX_BATCH:
            self._dispatch(loop)
        elif self._timer is None:
            self._timer = loop.call_later(MAX_WAIT_S, self._dispatch, loop)

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts as many batches as the waiting jobs fill."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for _ in range(-(-len(self._waiting) // MAX_BATCH)):
            self.worker.track(self._pool.submit(self._run_batch, loop))

    async def run(self, stage: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, done in the worker thread and timed as `stage`."""

        def timed() -> T:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._metrics.stage_duration.labels(stage).observe(time.perf_counter() - began)

        done = self._pool.submit(timed)
        self.worker.track(done)
        return await asyncio.wrap_future(done)

    def _run_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        """One batch; the last of several may find no jobs left."""
        jobs = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        if not jobs:
            return
        began = time.perf_counter()
        try:
            self._encode(jobs)
            self._match(jobs)
            self._add_snapshots(jobs)
        except Exception as error:  # the encoder or the network failed: every job ends with it, none waits for ever
            for job in jobs:
                job.error = job.error or error
        self._metrics.compute_busy.inc(time.perf_counter() - began)
        loop.call_soon_threadsafe(_finish, jobs)

    def _encode(self, jobs: list[_Job]) -> None:
        with_frame = [(job, job.frame) for job in jobs if job.frame is not None]
        new = [(job, frame) for job, frame in with_frame if not job.slot.has_encoded(frame)]
        began = time.perf_counter()
        for (job, frame), encoded in zip(new, self.models.encode([frame for _, frame in new]), strict=True):
            job.slot.last_encoded = (frame.picture, encoded)
        self._observe("encode", began, len(new))
        for job, _ in with_frame:
            assert job.slot.last_encoded is not None
            job.encoded = job.slot.last_encoded[1]

    def _match(self, jobs: list[_Job]) -> None:
        """Drives the steps of all jobs side by side: one network call for the tiles that they yield at a time."""
        began = time.perf_counter()
        for job in jobs:
            job.start()
        while running := [job for job in jobs if job.step is not None]:
            maps = self.models.read([tile for job in running for tile in job.tiles])
            used = 0
            for job in running:
                n = len(job.tiles)
                job.resume(maps[used : used + n])
                used += n
        self._observe("match", began, len(jobs))

    def _add_snapshots(self, jobs: list[_Job]) -> None:
        for job in jobs:
            began = time.perf_counter()
            if job.try_snapshot():
                self._observe("snapshot", began, 1)

    def _observe(self, stage: str, began: float, n: int) -> None:
        """Records the time since `began` as n equal observations of the stage."""
        took_s = time.perf_counter() - began
        for _ in range(n):
            self._metrics.stage_duration.labels(stage).observe(took_s / n)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _finish(jobs: list[_Job]) -> None:
    for job in jobs:
        job.finish()
