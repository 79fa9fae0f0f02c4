"""Planted features: films of random rows, channels with pieces of them, and a network that reads similarity alone."""

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
    """A film in which no second is like another."""
    rows = np.random.default_rng(seed).standard_normal((n_seconds, 512))
    return Recording(name, unit(rows), np.ones(n_seconds, bool))


def cut(source: Recording, start_s: int, end_s: int) -> Recording:
    return Recording(source.name, source.rows[start_s:end_s], source.informative[start_s:end_s])


def blurred(source: Recording, amount: float, seed: int = 7) -> Recording:
    """The film as a copier leaves it: each row moved by noise of this length."""
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
