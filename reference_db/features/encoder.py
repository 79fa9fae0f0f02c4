"""Pictures in, feature rows out: 512 numbers of unit length that survive what copiers do to a picture.

The frame encoder is EfficientNet-Lite0 with its batch norms folded, GeM pooling and one linear layer. The full picture
is resized to a square, so nothing at its edges is lost. Pictures are encoded one by one, so a row depends on its
picture alone, never on others of its batch; live and reference rows are bit-identical on one engine (`engines.py`) and
agree within 1e-3 between engines.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import zipfile
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
from reference_db.features.borders import RULES as BORDERS
from reference_db.features.borders import crop_borders
from reference_db.features.engines import Arrays, Engine, compile_network, has_openvino, last_line, onnx_engine
from reference_db.media.frames import PICTURE_SHORT_SIDE
from reference_db.store.references import FEATURE_SIZE

PICTURE_SIDE = 160  # as in training; 192 costs 30 % more time and finds no more copies
POOLED_SIZE = 1280
SAMPLER = "one picture per second, the first at or after the half, 1"  # by frames.OneFps; part of the id
EXAMPLE_SQUARE = torch.zeros(1, PICTURE_SIDE, PICTURE_SIDE, 3, dtype=torch.uint8)
SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / "frame_encoder.safetensors"

# What an ONNX encoder expects: RGB from 0 to 1, less ImageNet's mean, over its spread.
NETWORK_INPUT = (1, 3, PICTURE_SIDE, PICTURE_SIDE)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EXPORT = f"torch.onnx.export(model.eval(), (torch.zeros{NETWORK_INPUT},), 'encoder.onnx', external_data=False)"
EXTERNAL_WEIGHTS = b"\n\x08location\x12"  # in ONNX files with weights in another file, which the id would not cover

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
    source = SHIPPED_WEIGHTS if path is None else path
    try:
        content = source.read_bytes()
    except OSError as error:
        raise CatalogError(f"cannot read the encoder {source}: {error.strerror}") from error
    if source.suffix == ".safetensors":
        return _load_own(source, content, must_check=path is None, threads=threads)
    return _load_onnx(source, content, threads=threads)


def _load_own(source: Path, content: bytes, must_check: bool, threads: int) -> Encoder:
    digest = hashlib.sha256(content).hexdigest()
    if (must_check or source.with_suffix(".sha256").exists()) and digest != recorded_sha256(source):
        raise CatalogError(
            f"{source.name} is damaged: its SHA-256 is {digest[:12]}..., not the one in the .sha256 file"
        )
    network = FrameEncoder()
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in load_safetensors(content).items()})
    except (SafetensorError, RuntimeError) as error:
        raise CatalogError(f"{source} does not contain a frame encoder: {str(error).splitlines()[0]}") from error
    return Encoder(
        compile_network(SquareInput(network), (EXAMPLE_SQUARE,), threads=threads), f"lite0-{_id_hash(digest)}"
    )


def _load_onnx(source: Path, content: bytes, threads: int) -> Encoder:
    if _is_torchscript(content):
        raise CatalogError(f"{source} is a TorchScript file, not ONNX; this converts it: {_conversion(source)}")
    if EXTERNAL_WEIGHTS in content:
        raise CatalogError(f"{source} has its weights in another file; export it again with external_data=False")
    if not has_openvino():
        raise CatalogError(f"{source} cannot be run: ONNX encoders need OpenVINO (pip install openvino)")
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    try:
        engine = onnx_engine(content, NETWORK_INPUT, threads)

        def run(squares: Sequence[Arrays]) -> list[Arrays]:
            pixels = [square.transpose(0, 3, 1, 2).astype(np.float32) / 255 for (square,) in squares]
            return [(_unit(rows),) for (rows,) in engine([((x - mean) / std,) for x in pixels])]

        ((row,),) = run([(EXAMPLE_SQUARE.numpy(),)])
    except (RuntimeError, TypeError, ValueError) as error:
        raise CatalogError(f"{source} is not an ONNX encoder ({last_line(error)}); {EXPORT} writes one") from error
    if row.shape != (1, FEATURE_SIZE):
        raise CatalogError(f"{source} returns {row.shape} for one picture; an encoder must return (1, {FEATURE_SIZE})")
    return Encoder(run, f"onnx-{_id_hash(hashlib.sha256(content).hexdigest())}")


def _is_torchscript(content: bytes) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return any("/code/" in name for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _conversion(source: Path) -> str:
    onnx = source.with_suffix(".onnx")
    export = (
        f"torch.onnx.export(torch.jit.load({str(source)!r}), torch.zeros{NETWORK_INPUT}, {str(onnx)!r}, dynamo=False)"
    )
    return "pip install onnx && " + shlex.join(["python", "-c", f"import torch; {export}"])


def _unit(rows: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12), np.float32)


def recorded_sha256(source: Path) -> str:
    """The SHA-256 in the .sha256 file beside the weights, in the format of sha256sum."""
    beside = source.with_suffix(".sha256")
    try:
        return beside.read_text().split()[0]
    except (OSError, IndexError) as error:
        raise CatalogError(f"{beside.name} is missing or empty beside {source.name}; reinstall it") from error


def _id_hash(weights_sha256: str) -> str:
    rules = (
        f"{weights_sha256} {PICTURE_SIDE} {PICTURE_SHORT_SIDE} {FEATURE_SIZE} bilinear, borders {BORDERS}, {SAMPLER}"
    )
    return hashlib.sha256(rules.encode()).hexdigest()[:12]


# A picture carries information where it changes in both directions at once; bars and fades do not, at any contrast.
DETAIL_SIDE = 64  # the picture is resized to 64 x 64 cells, which averages out noise
DETAIL_LEVELS = 3  # levels by which neighbouring cells differ
DETAIL_SHARE = 0.02  # of cells with detail, at least; films have 0.3, empty slates and black with a logo less than this


def is_informative(picture: NDArray[np.uint8]) -> bool:
    """Whether the picture has enough detail to be recognised: it is not black, flat, a plain fade or colour bars."""
    small = Image.fromarray(picture).resize((DETAIL_SIDE, DETAIL_SIDE), Image.Resampling.BOX)
    cells = np.asarray(small, np.int16)
    across = np.abs(cells[:-1, 1:] - cells[:-1, :-1]) > DETAIL_LEVELS
    down = np.abs(cells[1:, :-1] - cells[:-1, :-1]) > DETAIL_LEVELS
    detailed = (across[..., 0] | across[..., 1] | across[..., 2]) & (down[..., 0] | down[..., 1] | down[..., 2])
    return bool(detailed.mean() >= DETAIL_SHARE)
