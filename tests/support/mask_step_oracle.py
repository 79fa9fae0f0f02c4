"""The maps of the Mask-Step CNN for matrices of any shape, tile by tile with plain torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from monitor.matching.mask_step import MaskStepNet


def predict(
    net: MaskStepNet, tiles: NDArray[np.float32], inside: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The mask maps T [B, M, N] and step maps D [B, M-1, N-1] of tiles [B, M, N].

    T is 0 outside the matrix; D is 0 right-down, 1 right or 2 down, and undefined where a cell of its 2x2 lies outside.
    """
    masks, steps = [], []
    with torch.inference_mode():
        for tile, is_inside in zip(tiles, inside, strict=True):
            within = torch.from_numpy(is_inside.astype(np.float32))[None, None]
            mask_logits, step_logits = net(torch.from_numpy(tile.copy())[None, None], within)
            masks.append((torch.softmax(mask_logits, dim=1)[0, 1] * within[0, 0]).numpy())
            steps.append(step_logits.argmax(dim=1)[0].to(torch.uint8).numpy())
    return np.stack(masks), np.stack(steps)
