"""The Mask-Step CNN: similarity tiles in, mask map and step map out; all of the network in one file.

A tile is [live, ref] and padded to a fixed shape; `inside` marks the true matrix in it. Activations are zeroed
outside it after every layer, which is what the zero padding of an unpadded matrix does, so a padded tile gives what
the bare matrix would. The mask at a cell depends on the 9x9 cells around it, the step on the 8x8 cells that begin
three before it. `TileReader` is what production uses; `predict` reads matrices of any shape.
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

NARROW_COLUMNS = 64  # of a tile that shows a short reference
INNER_BATCH = 8  # every call of `predict` has this many tiles: one shape, so company changes no bit


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


def predict(
    net: MaskStepNet, tiles: NDArray[np.float32], inside: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The mask maps T [B, M, N] and step maps D [B, M-1, N-1] of tiles [B, M, N].

    T is 0 outside the true matrix; D is 0 right-down, 1 right or 2 down, and means nothing where a cell of its 2x2
    lies outside. A tile's maps do not depend on the tiles beside it, to the bit.
    """
    if tiles.ndim != 3 or tiles.shape != inside.shape:
        raise ValueError(f"tiles and inside must both be [B, M, N], got {tiles.shape} and {inside.shape}")
    n_tiles, height, width = tiles.shape
    mask = np.empty((n_tiles, height, width), np.float32)
    step = np.empty((n_tiles, height - 1, width - 1), np.uint8)
    with torch.inference_mode():
        for first in range(0, n_tiles, INNER_BATCH):
            n = min(INNER_BATCH, n_tiles - first)
            s = torch.zeros((INNER_BATCH, 1, height, width))
            within = torch.zeros((INNER_BATCH, 1, height, width))
            s[:n, 0] = torch.from_numpy(np.ascontiguousarray(tiles[first : first + n]))
            within[:n, 0] = torch.from_numpy(inside[first : first + n].astype(np.float32))
            mask_logits, step_logits = net(s, within)
            odds = mask_logits[:, 1] - mask_logits[:, 0]
            for k in range(n):
                # Softmax of two classes. Tile by tile, since the last few numbers of an array are computed by other
                # instructions than the rest, with other last bits: which they are must not depend on the company.
                mask[first + k] = (torch.sigmoid(odds[k].clone()) * within[k, 0]).numpy()
            step[first : first + n] = step_logits.argmax(dim=1)[:n].to(torch.uint8).numpy()
    return mask, step


class _NewestRows(nn.Module):
    """The network on tiles, for the newest HALO + 1 rows without the halo: a third less work than the whole tile.

    There are rows above and columns beside what is asked for, so only the bottom is padded.
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
        here = inside[:, 0, HALO:, HALO:-HALO]
        return torch.sigmoid(mask[:, 1] - mask[:, 0]) * here, step.argmax(dim=1).to(torch.uint8)


class TileReader:
    """The network compiled for tiles, on the fastest engine. What it reads in a tile depends on that tile alone.

    A tile that shows a short reference, an advert say, is empty but for its left; there only that is read.
    """

    def __init__(self, net: MaskStepNet, *, threads: int = 1) -> None:
        def engine(columns: int) -> Engine:
            blank = torch.zeros(1, 1, TILE_ROWS, columns + 2 * HALO)  # one a call: more are no cheaper a tile
            return compile_network(_NewestRows(net), (blank, blank), threads=threads)

        self._engines = {columns: engine(columns) for columns in (NARROW_COLUMNS, INNER_COLUMNS)}

    def read(self, tiles: Sequence[SimilarityTile]) -> list[TileMaps]:
        """Mask and step map of each tile; both are 0 in columns beyond the matrix that were not read."""
        widths = [_columns_of(tile) for tile in tiles]
        read = {}
        for columns, engine in self._engines.items():
            calls = [_cells(tile, columns) for tile, width in zip(tiles, widths, strict=True) if width == columns]
            read[columns] = iter(engine(calls))
        return [TileMaps(*(_widened(maps[0]) for maps in next(read[columns]))) for columns in widths]


def _columns_of(tile: SimilarityTile) -> int:
    """How many inner columns of the tile must be read."""
    return INNER_COLUMNS if tile.inside[:, NARROW_COLUMNS + 2 * HALO :].any() else NARROW_COLUMNS


def _cells(tile: SimilarityTile, columns: int) -> Arrays:
    wide = columns + 2 * HALO
    return tile.cells[None, None, :, :wide], tile.inside[None, None, :, :wide].astype(np.float32)


def _widened(rows: NDArray[Any]) -> NDArray[Any]:
    """Maps of some columns with zeros for the rest."""
    if rows.shape[1] == INNER_COLUMNS:
        return rows
    wide = np.zeros((len(rows), INNER_COLUMNS), rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


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
        raise ConfigError(f"{path} is damaged: its weights do not have the SHA-256 it carries ({expected})")
    net = MaskStepNet()
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"{path} holds another network than the Mask-Step CNN") from error
    net.trained_on = metadata["trained_on"]
    net.configuration = json.loads(metadata["configuration"])
    return net.eval()


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over names, shapes and bytes of the weights and over what is said about them."""
    sha = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        weights = tensors[name].numpy()
        sha.update(f"{name} {weights.dtype} {weights.shape}".encode())
        sha.update(np.ascontiguousarray(weights).tobytes())
    return sha.hexdigest()
