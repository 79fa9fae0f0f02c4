"""The only door from the event loop to computing: encoder, network and index run in one worker thread.

The loop must stay free (heartbeats and HTTP share it), and one thread in order is what keeps results the same
from run to run.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from monitor.errors import ConfigError
from monitor.matching.mask_step import MaskStepNet, load_mask_step, predict
from monitor.matching.tiles import SimilarityTile, TileMaps
from monitor.metrics import Metrics
from monitor.settings import Settings
from reference_db.encoder import Encoder, is_informative, load_encoder
from reference_db.frames import Frame

P = ParamSpec("P")
T = TypeVar("T")


class Models:
    """The encoder and the network that reads its similarities."""

    def __init__(self, encoder: Encoder, net: MaskStepNet) -> None:
        self.encoder = encoder
        self.net = net
        weights = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
        self.name = f"{encoder.encoder_id}+{hashlib.sha256(weights).hexdigest()[:8]}"

    def read(self, tiles: list[SimilarityTile]) -> list[TileMaps]:
        """Mask and step map of each tile."""
        if not tiles:
            return []
        cells, inside = np.stack([tile.cells for tile in tiles]), np.stack([tile.inside for tile in tiles])
        mask, step = predict(self.net, cells, inside)
        return [TileMaps(mask[n], step[n]) for n in range(len(tiles))]

    def encode(self, frames: list[Frame]) -> list[tuple[NDArray[np.float32], bool]]:
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
    return Models(encoder, net)


class Compute:
    """One worker thread."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self.models = models
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, stage: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, done in the worker thread and timed as `stage`."""

        def timed() -> T:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._metrics.stage_duration.labels(stage).observe(time.perf_counter() - began)

        return await asyncio.get_running_loop().run_in_executor(self._pool, timed)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
