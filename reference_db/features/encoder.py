"""Pictures in, feature rows out: 512 numbers of unit length that survive what copiers do to a picture.

The frame encoder is EfficientNet-Lite0 with its batch norms folded, GeM pooling and one linear layer. The full picture
is resized to a square, so nothing at its edges is lost. Pictures are encoded one by one, so a row depends on its
picture alone, never on others of its batch; live and reference rows are bit-identical on one engine (`engines.py`) and
agree within 1e-3 between engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from reference_db.errors import CatalogError
from reference_db.features.borders import crop_borders
from reference_db.features.encoder_weights import NETWORK_INPUT, PICTURE_SIDE, EncoderWeights, read_weights
from reference_db.features.engines import Arrays, Engine, compile_network, has_openvino, last_line, onnx_engine
from reference_db.store.references import FEATURE_SIZE

POOLED_SIZE = 1280
EXAMPLE_SQUARE = torch.zeros(1, PICTURE_SIDE, PICTURE_SIDE, 3, dtype=torch.uint8)

# What an ONNX encoder expects: RGB from 0 to 1, less ImageNet's mean, over its spread.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EXPORT = f"torch.onnx.export(model.eval(), (torch.zeros{NETWORK_INPUT},), 'encoder.onnx', external_data=False)"

STAGES = (  # expansion, channels, blocks, stride, kernel
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow pads even sides, which the ImageNet weights expect: less on the left."""

    def __init__(self, n_in: int, n_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(n_in, n_out, kernel, stride, padding, groups=groups)
        spare = kernel - stride if stride > 1 else 0
        self.spare = (spare // 2, spare - spare // 2) * 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.spare) if self.spare[1] else x)


class Block(nn.Module):
    """Widens, filters each channel, narrows; the input is added where the shapes allow."""

    def __init__(self, n_in: int, n_out: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = n_in * expansion
        self.expand = SameConv(n_in, wide) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride, groups=wide)
        self.narrow = SameConv(wide, n_out)
        self.skips = stride == 1 and n_in == n_out

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        out: Tensor = self.narrow(F.relu6(self.depthwise(y)))
        return x + out if self.skips else out


class FrameEncoder(nn.Module):
    """Pictures [n, 3, side, side] from `normalise_pixels` -> unit rows [n, 512]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = SameConv(3, 32, 3, 2)
        blocks: list[Block] = []
        n_in = 32
        for expansion, channels, n_blocks, stride, kernel in STAGES:
            for i in range(n_blocks):
                blocks.append(Block(n_in, channels, expansion, kernel, stride if i == 0 else 1))
                n_in = channels
        self.blocks = nn.ModuleList(blocks)
        self.head = SameConv(n_in, POOLED_SIZE)
        self.power = nn.Parameter(torch.tensor(3.0))
        self.project = nn.Linear(POOLED_SIZE, FEATURE_SIZE)

    def pooled(self, x: Tensor, n_frozen: int = 0) -> Tensor:
        """GeM-pooled activations [n, 1280]; the stem and the first n_frozen blocks get no gradient."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and n_frozen == 0):
            x = F.relu6(self.stem(x))
            for block in self.blocks[:n_frozen]:
                x = block(x)
        for block in self.blocks[n_frozen:]:
            x = block(x)
        x = F.relu6(self.head(x)).flatten(2).clamp(min=1e-6)
        return x.pow(self.power).mean(-1).pow(1 / self.power)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.project(self.pooled(x)), dim=-1)


class SquareInput(nn.Module):
    """The frame encoder for raw pixels: uint8 [n, side, side, 3] -> unit rows [n, 512]."""

    def __init__(self, network: FrameEncoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, squares: Tensor) -> tuple[Tensor]:
        return (self.network(normalise_pixels(squares)),)


def normalise_pixels(squares: Tensor) -> Tensor:
    """The input of the network, float [n, 3, side, side] from about -1 to 1, of pictures uint8 [n, side, side, 3]."""
    return (squares.permute(0, 3, 1, 2).float() - 127.0) / 128.0  # permuted NHWC is channels_last already


class Encoder:
    """Encodes pictures as feature rows; rows may be compared only if their `encoder_id` is the same."""

    def __init__(self, engine: Engine, encoder_id: str) -> None:
        self.encoder_id = encoder_id
        self._engine = engine  # each uint8 [1, side, side, 3] -> [1, 512]

    def encode(self, pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Unit rows [n, 512] of RGB pictures [h, w, 3] of any size; a row depends on its picture alone."""
        rows = self._engine([(to_square(crop_borders(picture))[None],) for picture in pictures])
        return np.concatenate([np.empty((0, FEATURE_SIZE), np.float32), *(row for (row,) in rows)])


def to_square(picture: NDArray[np.uint8], side: int = PICTURE_SIDE) -> NDArray[np.uint8]:
    """The full picture, resized to [side, side, 3]."""
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise ValueError(f"picture must be uint8 [h, w, 3], got {picture.dtype} {picture.shape}")
    return np.array(Image.fromarray(picture).resize((side, side), Image.Resampling.BILINEAR), np.uint8)


def load_encoder(path: Path | None = None, *, threads: int = 1) -> Encoder:
    """The shipped encoder, or the one in the file: .safetensors of scripts/train_encoder.py, or any ONNX model.

    A .sha256 file beside .safetensors is compared. Sets the number of threads that torch uses in this process. Raises
    CatalogError when the file is missing, damaged, of another format or does not return 512 numbers.
    """
    torch.set_num_threads(threads)
    weights = read_weights(path)
    engine = _onnx_engine(weights, threads) if weights.is_onnx else _own_engine(weights, threads)
    return Encoder(engine, weights.encoder_id)


def _own_engine(weights: EncoderWeights, threads: int) -> Engine:
    network = FrameEncoder()
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in load_safetensors(weights.content).items()})
    except (SafetensorError, RuntimeError) as error:
        raise CatalogError(f"{weights.path} does not contain a frame encoder: {str(error).splitlines()[0]}") from error
    return compile_network(SquareInput(network), (EXAMPLE_SQUARE,), threads=threads)


def _onnx_engine(weights: EncoderWeights, threads: int) -> Engine:
    source = weights.path
    if not has_openvino():
        raise CatalogError(f"{source} cannot be run: ONNX encoders need OpenVINO (pip install openvino)")
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    try:
        engine = onnx_engine(weights.content, NETWORK_INPUT, threads)

        def run(squares: Sequence[Arrays]) -> list[Arrays]:
            pixels = [square.transpose(0, 3, 1, 2).astype(np.float32) / 255 for (square,) in squares]
            return [(_unit(rows),) for (rows,) in engine([((x - mean) / std,) for x in pixels])]

        ((row,),) = run([(EXAMPLE_SQUARE.numpy(),)])
    except (RuntimeError, TypeError, ValueError) as error:
        raise CatalogError(f"{source} is not an ONNX encoder ({last_line(error)}); {EXPORT} writes one") from error
    if row.shape != (1, FEATURE_SIZE):
        raise CatalogError(f"{source} returns {row.shape} for one picture; an encoder must return (1, {FEATURE_SIZE})")
    return run


def _unit(rows: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12), np.float32)
