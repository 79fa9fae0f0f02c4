"""The Mask-Step CNN: shapes, size, receptive field, padding, batches, and its weights on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from monitor.errors import ConfigError
from monitor.matching.mask_step import (
    SHIPPED_WEIGHTS,
    MaskStepNet,
    TileReader,
    load_mask_step,
    save_mask_step,
)
from monitor.matching.tiles import HALO, TILE_COLUMNS, TILE_ROWS, SimilarityTile
from reference_db.features.encoder import load_encoder
from tests.support.mask_step_oracle import predict

torch.set_num_threads(1)


def random_net(seed: int = 0) -> MaskStepNet:
    torch.manual_seed(seed)
    net = MaskStepNet().eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_(std=0.3)  # biases too: a zero bias would hide a leak from the padding
    return net


def random_tiles(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-0.2, 1, shape).astype(np.float32)


def test_the_layers_are_those_of_the_paper() -> None:
    net = MaskStepNet()
    shapes = {name: tuple(weight.shape) for name, weight in net.named_parameters() if name.endswith("weight")}
    assert shapes == {
        "conv1.weight": (8, 1, 3, 3),
        "conv2.weight": (16, 8, 3, 3),
        "conv3.weight": (32, 16, 3, 3),
        "mask.weight": (2, 32, 3, 3),
        "step.weight": (3, 32, 2, 2),
    }
    assert sum(weight.numel() for weight in net.parameters()) == 80 + 1168 + 4640 + 578 + 387


@pytest.mark.parametrize(("height", "width"), [(2, 2), (16, 16), (7, 40)])
def test_the_mask_covers_the_matrix_and_the_step_all_but_its_last_row_and_column(height: int, width: int) -> None:
    mask, step = random_net()(torch.zeros(3, 1, height, width))
    assert mask.shape == (3, 2, height, width)
    assert step.shape == (3, 3, height - 1, width - 1)


def test_a_mask_cell_sees_9x9_and_a_step_cell_8x8() -> None:
    net = MaskStepNet()
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(0.01)  # all positive: every path through the ReLUs is open
    s = torch.rand(1, 1, 21, 21, requires_grad=True)
    mask, step = net(s)
    seen_by_mask = torch.autograd.grad(mask[0, 1, 10, 10], s, retain_graph=True)[0][0, 0].nonzero()
    seen_by_step = torch.autograd.grad(step[0, 1, 10, 10], s)[0][0, 0].nonzero()
    assert (seen_by_mask.min().item(), seen_by_mask.max().item(), len(seen_by_mask)) == (6, 14, 81)
    assert (seen_by_step.min().item(), seen_by_step.max().item(), len(seen_by_step)) == (7, 14, 64)


def test_a_change_outside_the_receptive_field_changes_nothing() -> None:
    net = random_net()
    before = random_tiles(1, 1, 24, 24)
    inside = np.ones_like(before, bool)
    for row, col in ((5, 12), (15, 12), (12, 5), (12, 15)):  # one beyond the 9x9 around (10, 10)
        after = before.copy()
        after[0, row, col] += 5
        assert predict(net, after, inside)[0][0, 10, 10] == predict(net, before, inside)[0][0, 10, 10]
    after = before.copy()
    after[0, 6, 6] += 5
    assert predict(net, after, inside)[0][0, 10, 10] != predict(net, before, inside)[0][0, 10, 10]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    height=st.integers(2, 20),
    width=st.integers(2, 20),
    above=st.integers(0, 7),
    left=st.integers(0, 7),
    below=st.integers(0, 7),
    right=st.integers(0, 7),
)
def test_a_padded_tile_gives_the_maps_of_the_unpadded_matrix(
    seed: int, height: int, width: int, above: int, left: int, below: int, right: int
) -> None:
    net = random_net(seed % 7)
    unpadded = random_tiles(seed, 1, height, width)
    # The content of the padding must not matter, so it is noise.
    padded = random_tiles(seed + 1, 1, above + height + below, left + width + right)
    inside = np.zeros_like(padded, bool)
    here = (slice(None), slice(above, above + height), slice(left, left + width))
    padded[here], inside[here] = unpadded, True

    mask, step = predict(net, unpadded, np.ones_like(unpadded, bool))
    padded_mask, _ = predict(net, padded, inside)
    np.testing.assert_allclose(padded_mask[here], mask, atol=1e-5)
    assert not padded_mask[~inside].any()

    with torch.inference_mode():  # logits, since an argmax may tie
        _, unpadded_step = net(torch.from_numpy(unpadded)[None])
        _, padded_step = net(torch.from_numpy(padded)[None], torch.from_numpy(inside.astype(np.float32))[None])
    cut = padded_step[:, :, above : above + height - 1, left : left + width - 1]
    np.testing.assert_allclose(cut, unpadded_step, atol=1e-4, rtol=1e-5)
    assert step.shape == (1, height - 1, width - 1)


def random_production_tiles(seed: int, n: int) -> list[SimilarityTile]:
    """Tiles as a band cuts them, some of them at a border of the matrix."""
    rng = np.random.default_rng(seed)
    tiles = []
    for _ in range(n):
        inside = np.zeros((TILE_ROWS, TILE_COLUMNS), bool)
        inside[rng.integers(0, TILE_ROWS) :, rng.integers(0, 9) : rng.integers(30, TILE_COLUMNS + 1)] = True
        cells = rng.uniform(-0.2, 1, inside.shape).astype(np.float32)
        tiles.append(SimilarityTile(0, 0, np.where(inside, cells, np.float32(0)), inside))
    return tiles


def test_a_reader_gives_the_maps_of_the_network() -> None:
    net, tiles = random_net(4), random_production_tiles(1, 7)
    mask, step = predict(net, np.stack([t.cells for t in tiles]), np.stack([t.inside for t in tiles]))
    for n, maps in enumerate(TileReader(net).read(tiles)):
        np.testing.assert_allclose(maps.mask, mask[n, HALO:, HALO:-HALO], atol=1e-5)
        differ = maps.step[:, :-1] != step[n, HALO:, HALO:-HALO]
        assert differ[tiles[n].inside[HALO:-1, HALO : -HALO - 1]].sum() <= 3  # two directions may tie to the last bit


@pytest.fixture(scope="module")
def readers() -> list[TileReader]:
    return [TileReader(random_net(4), threads=threads) for threads in (1, 2)]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), n_tiles=st.integers(0, 17))
def test_the_maps_of_a_tile_do_not_depend_on_its_batch_to_the_bit(
    readers: list[TileReader], seed: int, n_tiles: int
) -> None:
    tiles = random_production_tiles(seed, n_tiles)
    expected = readers[0].read(tiles)
    order = np.random.default_rng(seed + 1).permutation(n_tiles).tolist()
    for reader, chosen in ((readers[0], order), (readers[0], order[:1]), (readers[1], order)):
        found = reader.read([tiles[n] for n in chosen])
        for n, maps in zip(chosen, found, strict=True):
            assert np.array_equal(maps.mask, expected[n].mask)
            assert np.array_equal(maps.step, expected[n].step)


def test_weights_are_stored_with_their_metadata(tmp_path: Path) -> None:
    net = random_net(5)
    save_mask_step(net, tmp_path / "w.safetensors", trained_on="lite0-abc", configuration={"seed": 5})
    back = load_mask_step(tmp_path / "w.safetensors")
    assert (back.trained_on, back.configuration, back.training) == ("lite0-abc", {"seed": 5}, False)
    tiles = random_tiles(0, 1, 8, 8)
    everywhere = np.ones_like(tiles, bool)
    assert np.array_equal(predict(back, tiles, everywhere)[0], predict(net, tiles, everywhere)[0])
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_damaged_byte_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_mask_step(random_net(), path, trained_on="x", configuration={})
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(ConfigError, match="damaged"):
        load_mask_step(path)


def test_missing_and_invalid_weights_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.safetensors cannot be read"):
        load_mask_step(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not weights")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_mask_step(tmp_path / "text.safetensors")


def test_the_shipped_weights_are_those_of_the_page_and_of_the_shipped_encoder() -> None:
    digest = hashlib.sha256(SHIPPED_WEIGHTS.read_bytes()).hexdigest()
    assert digest in (SHIPPED_WEIGHTS.parent / "README.md").read_text()
    assert load_mask_step().trained_on == load_encoder().encoder_id


@pytest.mark.parametrize("speed", [0.8, 1.0, 1.25])
def test_the_shipped_network_finds_a_planted_copy(speed: float) -> None:
    rng = np.random.default_rng(0)
    tile = np.clip(rng.normal(0.1, 0.05, (1, 40, 60)), -1, 1).astype(np.float32)
    rows = np.arange(8, 32)
    columns = np.rint(10 + speed * (rows - 8)).astype(int)
    tile[0, rows, columns] = 0.8
    for beside in (-1, 1):  # neighbouring seconds look somewhat alike
        tile[0, rows, columns + beside] = 0.45
    mask, step = predict(load_mask_step(), tile, np.ones_like(tile, bool))
    assert mask[0, rows[2:-2], columns[2:-2]].mean() > 0.7
    assert mask[0, :4].max() < 0.2
    assert mask[0, 36:].max() < 0.2
    # Walking the steps from its second cell leads along the copy.
    i, j = int(rows[1]), int(columns[1])
    while i < 28:
        i, j = ((i + 1, j + 1), (i, j + 1), (i + 1, j))[step[0, i, j]]
    assert abs(j - (10 + speed * (i - 8))) <= 1
