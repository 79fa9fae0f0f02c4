"""The weights file of an encoder: read and checked, with the encoder's id, all without torch.

The id covers the weights and every rule by which pictures are sampled and prepared, so rows with the same id compare.
"""

import hashlib
import io
import shlex
import zipfile
from dataclasses import dataclass
from pathlib import Path

from reference_db.errors import CatalogError
from reference_db.features.borders import RULES as BORDERS
from reference_db.media.frames import PICTURE_SHORT_SIDE
from reference_db.store.references import FEATURE_SIZE

PICTURE_SIDE = 160  # as in training; 192 costs 30 % more time and finds no more copies
NETWORK_INPUT = (1, 3, PICTURE_SIDE, PICTURE_SIDE)  # of an ONNX encoder
SAMPLER = "one picture per second, the first at or after the half, 1"  # by frames.OneFps; part of the id
SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / "frame_encoder.safetensors"
EXTERNAL_WEIGHTS = b"\n\x08location\x12"  # in ONNX files with weights in another file, which the id would not cover


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """The content of a file: .safetensors of scripts/train_encoder.py, or any ONNX model."""

    path: Path
    content: bytes
    encoder_id: str

    @property
    def is_onnx(self) -> bool:
        return self.path.suffix != ".safetensors"


def read_weights(path: Path | None = None) -> EncoderWeights:
    """The shipped weights, or those in the file; a .sha256 file beside .safetensors is compared.

    Raises CatalogError when the file is missing, damaged or of another format.
    """
    source = SHIPPED_WEIGHTS if path is None else path
    try:
        content = source.read_bytes()
    except OSError as error:
        raise CatalogError(f"cannot read the encoder {source}: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    if source.suffix == ".safetensors":
        _check_sha256(source, digest, must_check=path is None)
        return EncoderWeights(source, content, f"lite0-{_id_hash(digest)}")
    _check_onnx(source, content)
    return EncoderWeights(source, content, f"onnx-{_id_hash(digest)}")


def _check_sha256(source: Path, digest: str, must_check: bool) -> None:
    if (must_check or source.with_suffix(".sha256").exists()) and digest != recorded_sha256(source):
        raise CatalogError(
            f"{source.name} is damaged: its SHA-256 is {digest[:12]}..., not the one in the .sha256 file"
        )


def recorded_sha256(source: Path) -> str:
    """The SHA-256 in the .sha256 file beside the weights, in the format of sha256sum."""
    beside = source.with_suffix(".sha256")
    try:
        return beside.read_text().split()[0]
    except (OSError, IndexError) as error:
        raise CatalogError(f"{beside.name} is missing or empty beside {source.name}; reinstall it") from error


def _check_onnx(source: Path, content: bytes) -> None:
    if _is_torchscript(content):
        raise CatalogError(f"{source} is a TorchScript file, not ONNX; this converts it: {_conversion(source)}")
    if EXTERNAL_WEIGHTS in content:
        raise CatalogError(f"{source} has its weights in another file; export it again with external_data=False")


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


def _id_hash(weights_sha256: str) -> str:
    rules = (
        f"{weights_sha256} {PICTURE_SIDE} {PICTURE_SHORT_SIDE} {FEATURE_SIZE} bilinear, borders {BORDERS}, {SAMPLER}"
    )
    return hashlib.sha256(rules.encode()).hexdigest()[:12]
