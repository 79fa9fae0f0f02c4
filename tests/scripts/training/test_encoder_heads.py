"""ImageNet's trunk, its interpolation and the fitted last layer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from reference_db.errors import CatalogError
from training.encoder_heads import (
    IMAGENET,
    SHIPPED,
    Head,
    export,
    imagenet_encoder,
    interpolate_trunk,
    pooled_rows,
    start_encoder,
    whiten,
)


def test_whitening_gives_all_directions_unit_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4000, 24, generator=generator) @ torch.randn(24, 24, generator=generator) + 3
    weight, bias = whiten(rows, 0.0, 12)
    out = rows @ weight.T + bias
    torch.testing.assert_close(torch.cov(out.T), torch.eye(12), atol=2e-2, rtol=0)
    torch.testing.assert_close(out.mean(0), torch.zeros(12), atol=1e-3, rtol=0)


def test_imagenet_weights_are_folded_correctly() -> None:
    encoder = imagenet_encoder()
    picture = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    picture[:, 16:48, 16:48] = 200
    pooled = pooled_rows(encoder, picture)
    assert pooled.shape == (1, 1280)
    assert 0.02 < (pooled > 0.01).float().mean() < 0.98  # folded incorrectly, all are zero or all saturate
    assert pooled.max() < 6


def test_an_interpolated_trunk_lies_between_its_ends() -> None:
    start, trained = imagenet_encoder(), imagenet_encoder()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1)
    for share in (0.0, 0.25, 1.0):
        between = interpolate_trunk(start, trained, share)
        torch.testing.assert_close(between.head.weight, start.head.weight + share)
        torch.testing.assert_close(between.power, start.power + share)
        assert torch.equal(between.project.weight, trained.project.weight)


def test_a_training_may_start_from_exported_or_shipped_weights(tmp_path: Path) -> None:
    first = start_encoder(IMAGENET)
    path = tmp_path / "first.safetensors"
    head = Head("plain", first.project.weight, first.project.bias)
    assert export(first, head, path, {}) == hashlib.sha256(path.read_bytes()).hexdigest()
    again = start_encoder(str(path))
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-3, rtol=1e-3)  # half precision
    assert not torch.equal(start_encoder(SHIPPED).head.weight, again.head.weight)
    with pytest.raises(CatalogError, match="cannot read"):
        start_encoder(str(tmp_path / "none.safetensors"))
