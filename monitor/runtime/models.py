"""The two networks of matching: the encoder of pictures and the Mask-Step network that reads similarity tiles."""

from __future__ import annotations

import hashlib
from pathlib import Path

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from monitor.config.settings import Settings
from monitor.errors import ConfigError
from monitor.ingest.feature_windows import EncodedFrame
from monitor.matching.mask_step import MaskStepNet, TileReader, load_mask_step
from monitor.matching.tiles import SimilarityTile, TileMaps
from reference_db.features.encoder import Encoder, load_encoder
from reference_db.features.picture_detail import is_informative
from reference_db.media.frames import Frame


class Models:
    """The encoder and the network that reads its similarities. `name` changes with the weights of either."""

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
    """The encoder that the settings name and the network; raises ConfigError if they do not belong together."""
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
