"""The losses of the Mask-Step CNN: L = Lm + lambda * Ls, as in the paper, and the options of our own recipe.

The loss of a batch is the mean over its pairs. A pair without responsible cells (a negative) has no step loss.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def mask_loss(
    mask_logits: Tensor, on_path: Tensor, counted: Tensor | None = None, *, path_weight: float = 1.0, focus: float = 0.0
) -> Tensor:
    """Lm: the mean over a matrix's cells of -log y of the true class, from logits [B, 2, M, N] and R [B, M, N].

    `counted` [B, M, N] excludes cells from the mean (padding, ties) or weighs them. Beyond the paper: cells in R weigh
    `path_weight`, and every cell (1 - y)^focus, so that easy background does not dominate the path (focal loss).
    """
    log_y = F.log_softmax(mask_logits, dim=1)
    log_true = torch.where(on_path, log_y[:, 1], log_y[:, 0])
    weight = torch.ones_like(log_true) if counted is None else counted.to(log_true.dtype)
    n_cells = weight.sum(dim=(1, 2)).clamp(min=1)
    if path_weight != 1.0:
        weight = torch.where(on_path, weight * path_weight, weight)
    if focus:
        weight = weight * (1 - log_true.exp()).clamp(min=0) ** focus
    return (-(log_true * weight).sum(dim=(1, 2)) / n_cells).mean()


def step_loss(step_logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Ls: cross-entropy over Q, divided by the sum of d, from logits [B, 3, M-1, N-1] and d [B, M-1, N-1, 3].

    Beyond the paper, cells may have a `weight` [B, M-1, N-1].
    """
    if weight is not None:
        target = target * weight[..., None]
    log_z = F.log_softmax(step_logits, dim=1).permute(0, 2, 3, 1)
    total = target.sum(dim=(1, 2, 3))
    per_pair = -(log_z * target).sum(dim=(1, 2, 3)) / total.clamp(min=1e-9)
    has_steps = total > 0
    return (per_pair * has_steps).sum() / has_steps.sum().clamp(min=1)


def vsal_loss(mask: Tensor, step: Tensor, weight: float = 1.0) -> Tensor:
    """L = Lm + lambda * Ls, with lambda = 1 in the paper."""
    return mask + weight * step
