"""The losses against loops over the paper's sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import training_oracles as oracles
from training.labels import label_by_id
from training.losses import mask_loss, step_loss, vsal_loss

torch.set_num_threads(1)


def probabilities(logits: Tensor) -> list[list[list[float]]]:
    """y[class][i][j] of one pair's logits [classes, M, N], by the textbook softmax."""
    classes, height, width = logits.shape
    out = [[[0.0] * width for _ in range(height)] for _ in range(classes)]
    for i in range(height):
        for j in range(width):
            for c, p in enumerate(oracles.softmax(logits[:, i, j].tolist())):
                out[c][i][j] = p
    return out


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), n_pairs=st.integers(1, 3))
def test_losses_are_the_papers_sums(seed: int, n_pairs: int) -> None:
    rng = np.random.default_rng(seed)
    live, ref = rng.integers(0, 6, (n_pairs, 7)), rng.integers(0, 6, (n_pairs, 5))
    live[:, 3], ref[:, 3] = 2, 2  # at least one step to learn
    labels = label_by_id(live, ref)
    mask_logits = torch.from_numpy(rng.normal(size=(n_pairs, 2, 7, 5)))
    step_logits = torch.from_numpy(rng.normal(size=(n_pairs, 3, 6, 4)))
    masks, steps = [], []
    for k in range(n_pairs):
        r = oracles.paths(live[k].tolist(), ref[k].tolist())
        masks.append(oracles.mask_loss(probabilities(mask_logits[k]), r))
        steps.append(oracles.step_loss(probabilities(step_logits[k]), oracles.responsible_targets(r, 7, 5)))
    lm = mask_loss(mask_logits, torch.from_numpy(labels.on_path))
    ls = step_loss(step_logits, torch.from_numpy(labels.step.astype(np.float64)))
    assert lm.item() == pytest.approx(np.mean(masks))
    assert ls.item() == pytest.approx(np.mean(steps))
    assert vsal_loss(lm, ls).item() == pytest.approx(np.mean(masks) + np.mean(steps))
    assert vsal_loss(lm, ls, 0.25).item() == pytest.approx(np.mean(masks) + 0.25 * np.mean(steps))


def test_a_negative_has_a_mask_loss_and_no_step_loss() -> None:
    nothing = torch.zeros(1, 4, 4, dtype=torch.bool)
    assert step_loss(torch.randn(1, 3, 3, 3), torch.zeros(1, 3, 3, 3)).item() == 0
    assert mask_loss(torch.zeros(1, 2, 4, 4), nothing).item() == pytest.approx(np.log(2))


def test_a_negative_does_not_lower_the_step_loss_of_others() -> None:
    logits, target = torch.randn(1, 3, 3, 3), torch.zeros(1, 3, 3, 3)
    target[0, 1, 1, 0] = 1
    with_negative = step_loss(logits.repeat(2, 1, 1, 1), torch.cat([target, torch.zeros_like(target)]))
    assert with_negative.item() == pytest.approx(step_loss(logits, target).item())


def test_cells_that_do_not_count_change_nothing() -> None:
    logits, on_path = torch.randn(1, 2, 4, 4), torch.eye(4, dtype=torch.bool)[None]
    counted = torch.ones(1, 4, 4, dtype=torch.bool)
    counted[:, :, 3] = False
    other = logits.clone()
    other[..., 3] += 10
    assert mask_loss(logits, on_path, counted).item() == mask_loss(other, on_path, counted).item()
    assert mask_loss(logits, on_path, counted).item() == pytest.approx(
        mask_loss(logits[..., :3], on_path[..., :3]).item()
    )


def test_weight_and_focus_raise_the_share_of_the_path() -> None:
    logits = torch.zeros(1, 2, 4, 4)
    logits[:, 0] = 2  # sure of background everywhere
    on_path = torch.eye(4, dtype=torch.bool)[None]
    plain = mask_loss(logits, on_path).item()
    y0 = 1 / (1 + np.exp(-2))
    assert plain == pytest.approx((12 * -np.log(y0) + 4 * -np.log(1 - y0)) / 16)
    assert mask_loss(logits, on_path, path_weight=3).item() == pytest.approx(
        (12 * -np.log(y0) + 3 * 4 * -np.log(1 - y0)) / 16
    )
    assert mask_loss(logits, on_path, focus=2).item() == pytest.approx(
        (12 * -np.log(y0) * (1 - y0) ** 2 + 4 * -np.log(1 - y0) * y0**2) / 16
    )


def test_a_step_without_weight_does_not_count() -> None:
    logits, target = torch.randn(1, 3, 2, 2), torch.zeros(1, 2, 2, 3)
    target[0, 0, 0, 0] = target[0, 1, 1, 2] = 1
    weight = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])
    first = target.clone()
    first[0, 1, 1] = 0
    assert step_loss(logits, target, weight).item() == pytest.approx(step_loss(logits, first).item())
    # Weights of three to one give the weighted mean.
    one, other = step_loss(logits, first).item(), step_loss(logits, target - first).item()
    weight[0, 0, 0], weight[0, 1, 1] = 3, 1
    assert step_loss(logits, target, weight).item() == pytest.approx((3 * one + other) / 4)
