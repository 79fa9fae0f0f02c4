"""The Mask-Step CNN: similarity tiles in, mask maps and step maps out; its weights and how they are stored.

A tile is [live, ref], padded to a fixed shape; `inside` marks the matrix in it. Activations outside are set to zero
after every layer, as the zero padding of an unpadded matrix would be, so a padded tile gives the maps of the unpadded
matrix. The mask at a cell depends on the 9x9 cells around it, the step on the 8x8 cells that begin three before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from monitor.errors import ConfigError
from monitor.matching.tiles import HALO, INNER_COLUMNS, TILE_ROWS, SimilarityTile, TileMaps
from reference_db.features.engines import Arrays, Engine, compile_network
from reference_db.store.disk import write_file

SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / "mask_step.safetensors"

NARROW_COLUMNS = 64  # inner columns of a tile with a short reference


class MaskStepNet(nn.Module):
    """The paper's network: three 3x3 layers, then a mask head of two classes and a step head of three."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.conv3 = nn.Conv2d(16, 32, 3, padding=1)
        self.mask = nn.Conv2d(32, 2, 3, padding=1)
        self.step = nn.Conv2d(32, 3, 2)
        self.trained_on = ""  # encoder_id of the features it was trained on
        self.configuration: dict[str, object] = {}  # how it was trained

    def forward(self, s: Tensor, inside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mask logits [B, 2, M, N] and step logits [B, 3, M-1, N-1] of similarities [B, 1, M, N]."""
        if inside is None:
            inside = torch.ones_like(s)
        x = s * inside
        for layer in (self.conv1, self.conv2, self.conv3):
            x = torch.relu(layer(x)) * inside
        return self.mask(x), self.step(x)


class _NewestRows(nn.Module):
    """The network for the newest HALO + 1 rows of a tile, without the halo: a third less work than the full tile.

    The tile has rows above and columns beside these, so only the bottom is padded.
    """

    def __init__(self, net: MaskStepNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, s: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        x = s * inside
        for n, layer in enumerate((self.net.conv1, self.net.conv2, self.net.conv3), start=1):
            x = F.conv2d(F.pad(x, (0, 0, 0, 1)), layer.weight, layer.bias)
            x = torch.relu(x) * inside[:, :, n:, n:-n]
        mask = F.conv2d(F.pad(x, (0, 0, 0, 1)), self.net.mask.weight, self.net.mask.bias)
        step = F.conv2d(x[:, :, 1:, 1:], self.net.step.weight, self.net.step.bias)
        inner = inside[:, 0, HALO:, HALO:-HALO]
        return torch.sigmoid(mask[:, 1] - mask[:, 0]) * inner, step.argmax(dim=1).to(torch.uint8)


class TileReader:
    """The network, compiled for tiles. The maps of a tile depend on that tile alone.

    The tile of a short reference, such as an advert, is empty except for its left part; only that part is read.
    """

    def __init__(self, net: MaskStepNet, *, threads: int = 1) -> None:
        def engine(columns: int) -> Engine:
            example = torch.zeros(1, 1, TILE_ROWS, columns + 2 * HALO)  # one tile: in a batch, a tile is no cheaper
            return compile_network(_NewestRows(net), (example, example), threads=threads)

        self._engines = {columns: engine(columns) for columns in (NARROW_COLUMNS, INNER_COLUMNS)}

    def read(self, tiles: Sequence[SimilarityTile]) -> list[TileMaps]:
        """Mask and step map of each tile; both are 0 in columns beyond the matrix that were not read."""
        widths = [_n_columns(tile) for tile in tiles]
        results = {}
        for columns, engine in self._engines.items():
            chosen = [tile for tile, width in zip(tiles, widths, strict=True) if width == columns]
            inputs = [_engine_input(tile, columns) for tile in chosen]
            results[columns] = iter(engine(inputs))
        return [TileMaps(*(_pad_columns(maps[0]) for maps in next(results[columns]))) for columns in widths]


def _n_columns(tile: SimilarityTile) -> int:
    """The number of inner columns of the tile that must be read."""
    return INNER_COLUMNS if tile.inside[:, HALO + NARROW_COLUMNS :].any() else NARROW_COLUMNS


def _engine_input(tile: SimilarityTile, columns: int) -> Arrays:
    width = columns + 2 * HALO
    return tile.cells[None, None, :, :width], tile.inside[None, None, :, :width].astype(np.float32)


def _pad_columns(rows: NDArray[Any]) -> NDArray[Any]:
    """The map with zeros for the columns that were not read."""
    if rows.shape[1] == INNER_COLUMNS:
        return rows
    padded = np.zeros((len(rows), INNER_COLUMNS), rows.dtype)
    padded[:, : rows.shape[1]] = rows
    return padded


def save_mask_step(net: MaskStepNet, path: Path, *, trained_on: str, configuration: Mapping[str, object]) -> None:
    """Writes the weights; they carry the encoder's id, their configuration and a digest of all."""
    tensors = {name: weight.detach().contiguous().cpu() for name, weight in net.state_dict().items()}
    metadata = {"trained_on": trained_on, "configuration": json.dumps(dict(configuration), sort_keys=True)}
    metadata["sha256"] = _digest(tensors, metadata)
    write_file(path, safetensors_bytes(tensors, metadata))


def load_mask_step(path: Path | None = None) -> MaskStepNet:
    """The network in evaluation mode, from the shipped weights unless others are named.

    Raises ConfigError when the file is missing, is not a Mask-Step network or differs from its own SHA-256.
    """
    path = path or SHIPPED_WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as Mask-Step weights: {error}") from error
    expected = metadata.pop("sha256", None)
    if expected != _digest(tensors, metadata):
        raise ConfigError(f"{path} is damaged: its weights do not have the SHA-256 in its metadata ({expected})")
    net = MaskStepNet()
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"{path} contains another network than the Mask-Step CNN") from error
    net.trained_on = metadata["trained_on"]
    net.configuration = json.loads(metadata["configuration"])
    return net.eval()


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over names, shapes and bytes of the weights and over the metadata."""
    sha = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        weights = tensors[name].numpy()
        sha.update(f"{name} {weights.dtype} {weights.shape}".encode())
        sha.update(np.ascontiguousarray(weights).tobytes())
    return sha.hexdigest()
