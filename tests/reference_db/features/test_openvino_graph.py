"""Torch networks as OpenVINO models: each operation gives what torch gives, and an unknown one is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_db.features.encoder import SameConv
from reference_db.features.engines import has_openvino, openvino_engine

pytestmark = pytest.mark.skipif(not has_openvino(), reason="OpenVINO has no wheels for this machine")


class Network(nn.Module):
    def __init__(self, calculate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.calculate = calculate

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.calculate(x),)


CALCULATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": nn.Conv2d(3, 5, 3, padding=1),
    "convolution of each channel": SameConv(3, 6, 5, 2, groups=3),
    "linear layer": nn.Linear(8, 4),
    "arithmetic": lambda x: (1 / (x * x + 2.0) - x) / 3 + x.relu() * 2,
    "activations": lambda x: F.relu6(3 * x) * torch.sigmoid(x) - torch.relu(x),
    "power of the mean": lambda x: x.flatten(2).clamp(min=1e-6).pow(2.5).mean(-1),
    "unit rows": lambda x: F.normalize(x, dim=-1),
    "unit rows of nothing": lambda x: F.normalize(x * 0.0, dim=-1),
    "slices": lambda x: x[:, 1, 2:, 1:-3],
    "padding": lambda x: F.pad(x, (1, 0, 2, 3)),
    "other axes and types": lambda x: (100 * x.permute(0, 2, 3, 1)).float(),
    "largest": lambda x: x.argmax(dim=1).to(torch.uint8),
}


@pytest.mark.parametrize("name", CALCULATIONS)
def test_a_translated_operation_gives_what_torch_gives(name: str) -> None:
    torch.manual_seed(0)
    x, network = torch.randn(1, 3, 8, 8), Network(CALCULATIONS[name]).eval().requires_grad_(False)
    engine = openvino_engine(network, (x,))
    assert engine is not None
    ((found,),) = engine([(x.numpy(),)])
    (expected,) = network(x)
    assert (found.dtype, found.shape) == (expected.numpy().dtype, expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_operation_without_translation_is_named() -> None:
    with pytest.raises(LookupError, match="torch's cos"):
        openvino_engine(Network(torch.cos), (torch.zeros(1, 3),))
    with pytest.raises(LookupError, match="norm of order 1"):
        openvino_engine(Network(lambda x: F.normalize(x, p=1.0)), (torch.zeros(1, 3),))
