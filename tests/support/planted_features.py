"""Planted features: films of random rows, channels with sections of them, an encoder and a network without training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.recordings import Recording
from monitor.matching.mask_step import MaskStepNet


def unit(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def film(name: str, n_seconds: int, seed: int) -> Recording:
    """A film in which no two seconds are similar."""
    rows = np.random.default_rng(seed).standard_normal((n_seconds, 512))
    return Recording(name, unit(rows), np.ones(n_seconds, bool))


def cut(source: Recording, start_s: int, end_s: int) -> Recording:
    return Recording(source.name, source.rows[start_s:end_s], source.informative[start_s:end_s])


def blurred(source: Recording, amount: float, seed: int = 7) -> Recording:
    """A copy of the film: noise of this length is added to each row."""
    noise = unit(np.random.default_rng(seed).standard_normal(source.rows.shape))
    return Recording(source.name, unit(source.rows.astype(np.float64) + amount * noise), source.informative)


def channel(name: str, parts: Sequence[Recording]) -> Recording:
    return Recording(
        name, np.concatenate([part.rows for part in parts]), np.concatenate([part.informative for part in parts])
    )


def plain_net() -> MaskStepNet:
    """A network written by hand: the mask is steep at similarity 0.5, every step goes right-down."""
    net = MaskStepNet()
    with torch.no_grad():
        for layer in (net.conv1, net.conv2, net.conv3, net.mask, net.step):
            layer.weight.zero_()
            assert layer.bias is not None
            layer.bias.zero_()
        for layer in (net.conv1, net.conv2, net.conv3):
            layer.weight[0, 0, 1, 1] = 1.0
        net.mask.weight[1, 0, 1, 1] = 20.0
        assert net.mask.bias is not None
        assert net.step.bias is not None
        net.mask.bias[1] = -10.0
        net.step.bias[0] = 1.0
    return net.eval()


class GridEncoder:
    """An encoder without training, by the colours of 16 x 10 cells; it counts its pictures."""

    def __init__(self, encoder_id: str = "grid/1") -> None:
        self.encoder_id = encoder_id
        self.n_pictures = 0

    def encode(self, pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        self.n_pictures += len(pictures)
        rows = np.zeros((len(pictures), 512), np.float32)
        for row, picture in zip(rows, pictures, strict=True):
            height, width = picture.shape[:2]
            cells = picture[: height // 10 * 10, : width // 16 * 16].reshape(10, height // 10, 16, width // 16, 3)
            levels = cells.mean(axis=(1, 3)).ravel()
            row[:480] = (levels - levels.mean()) / max(1e-6, float(np.linalg.norm(levels - levels.mean())))
        return rows
