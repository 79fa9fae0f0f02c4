"""Features: unit rows that depend on their picture alone, ids that distinguish encoders, pictures without detail."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from monitor.demo.media import PROGRAMME, REFERENCES
from reference_db.errors import CatalogError
from reference_db.features.encoder import (
    EXAMPLE_SQUARE,
    EXPORT,
    Encoder,
    FrameEncoder,
    SameConv,
    SquareInput,
    load_encoder,
    normalise_pixels,
    to_square,
)
from reference_db.features.encoder_weights import PICTURE_SIDE, SHIPPED_WEIGHTS
from reference_db.features.engines import openvino_engine, torch_engine
from reference_db.features.picture_detail import is_informative
from reference_db.store.references import FEATURE_SIZE
from tests.support.onnx_encoders import write_grid


def scene(seed: int, height: int = 192, width: int = 256) -> NDArray[np.uint8]:
    """Overlapping coloured shapes on a rough background: scenes of two seeds differ as two shots do."""
    rng = np.random.default_rng(seed)
    ground = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
    picture = np.array(ground, np.int16)
    y, x = np.mgrid[:height, :width]
    for _ in range(12):
        cy, cx, ry, rx = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(8, 50), rng.uniform(8, 60)
        picture[((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2 < 1] = rng.integers(0, 256, 3)
    return np.clip(picture + rng.normal(0, 4, picture.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder()


def test_rows_of_pictures_of_any_size_have_unit_length(encoder: Encoder) -> None:
    rows = encoder.encode([scene(1), scene(2, 90, 400), scene(3, 300, 120)])
    assert rows.shape == (3, FEATURE_SIZE)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert encoder.encode([]).shape == (0, FEATURE_SIZE)


def test_a_row_does_not_depend_on_its_batch(encoder: Encoder) -> None:
    pictures = [scene(seed) for seed in range(7)]
    rows = encoder.encode(pictures)
    order = np.random.default_rng(0).permutation(7)
    assert np.array_equal(encoder.encode([pictures[i] for i in order]), rows[order])
    assert np.array_equal(encoder.encode([pictures[3]])[0], rows[3])
    assert np.array_equal(load_encoder().encode([pictures[6]])[0], rows[6])  # nor on earlier calls


def test_copies_are_nearer_than_other_pictures(encoder: Encoder) -> None:
    pictures = [film.picture(at_s) for film in (*REFERENCES, PROGRAMME) for at_s in np.arange(3.5, 40, 7)]
    copies = []
    for picture in pictures:  # cropped by a fifth, darker, a box in the corner
        height, width = picture.shape[:2]
        copy = picture[height // 10 : -height // 10, width // 10 : -width // 10] // 2
        copy[: height // 8, : width // 6] = 230
        copies.append(copy)
    similarity = encoder.encode(copies) @ encoder.encode(pictures).T
    assert (similarity.argmax(1) == np.arange(len(pictures))).all()
    assert np.diag(similarity).min() > 0.3


def shipped_network() -> FrameEncoder:
    from safetensors.torch import load_file

    network = FrameEncoder()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(SHIPPED_WEIGHTS).items()})
    return network.eval()


def test_the_engine_computes_the_network(encoder: Encoder) -> None:
    network = shipped_network()
    pictures = [scene(seed) for seed in range(3)]
    with torch.inference_mode():
        expected = network(normalise_pixels(torch.from_numpy(np.stack([to_square(p) for p in pictures])))).numpy()
    np.testing.assert_allclose(encoder.encode(pictures), expected, atol=2e-5)


def test_engines_agree_and_each_is_the_same_with_more_threads() -> None:
    squares = [(to_square(scene(seed))[None],) for seed in range(5)]
    openvino = openvino_engine(SquareInput(shipped_network()), (EXAMPLE_SQUARE,))
    if openvino is None:
        pytest.skip("OpenVINO has no wheels for this machine")
    by_openvino = np.concatenate([row for (row,) in openvino(squares)])
    by_torch = np.concatenate([row for (row,) in torch_engine(SquareInput(shipped_network()))(squares)])
    assert ((by_openvino * by_torch).sum(axis=1) > 1 - 1e-3).all()
    np.testing.assert_allclose(by_openvino, by_torch, atol=2e-5)
    in_two_threads = openvino_engine(SquareInput(shipped_network()), (EXAMPLE_SQUARE,), threads=2)
    assert in_two_threads is not None
    assert np.array_equal(np.concatenate([row for (row,) in in_two_threads(squares)]), by_openvino)


def test_torch_runs_the_network_where_openvino_is_missing(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)  # as if it were not installed
    assert openvino_engine(SquareInput(shipped_network()), (EXAMPLE_SQUARE,)) is None
    without = load_encoder()
    assert without.encoder_id == encoder.encoder_id
    np.testing.assert_allclose(without.encode([scene(1)]), encoder.encode([scene(1)]), atol=2e-5)


@pytest.mark.parametrize("kernel", [3, 5])
def test_a_stride_of_two_pads_less_on_the_left(kernel: int) -> None:
    conv = SameConv(1, 1, kernel, 2)
    nn.init.ones_(conv.weight)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    ramp = torch.arange(8.0).view(1, 1, 1, 8).expand(1, 1, 8, 8)
    left = (kernel - 2) // 2  # TensorFlow's rule for an even side
    first = sum(range(kernel - left)) * (kernel - left)
    assert conv(ramp).shape[-2:] == (4, 4)
    assert conv(ramp)[0, 0, 0, 0].item() == first


def test_the_id_depends_on_the_weights(tmp_path: Path, encoder: Encoder) -> None:
    assert encoder.encoder_id == load_encoder().encoder_id
    copy = tmp_path / SHIPPED_WEIGHTS.name
    shutil.copy(SHIPPED_WEIGHTS, copy)
    assert load_encoder(copy).encoder_id == encoder.encoder_id
    content = bytearray(copy.read_bytes())
    content[-1000] ^= 1
    copy.write_bytes(content)
    assert load_encoder(copy).encoder_id != encoder.encoder_id

    shutil.copy(SHIPPED_WEIGHTS.with_suffix(".sha256"), tmp_path)
    with pytest.raises(CatalogError, match="is damaged"):
        load_encoder(copy)


def test_the_shipped_hash_is_that_of_the_file() -> None:
    digest, name = SHIPPED_WEIGHTS.with_suffix(".sha256").read_text().split()
    assert name == SHIPPED_WEIGHTS.name
    assert digest == hashlib.sha256(SHIPPED_WEIGHTS.read_bytes()).hexdigest()
    assert digest in (SHIPPED_WEIGHTS.parent / "README.md").read_text()


class Shrunk(nn.Module):
    """A picture made small: the simplest encoder there is."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, PICTURE_SIDE // 16).flatten(1)[:, : self.size]


def export(model: nn.Module, path: Path, *, external_data: bool = False) -> Path:
    """Exports the model as the error message recommends."""
    line = EXPORT.replace("'encoder.onnx'", repr(str(path))).replace("=False", f"={external_data}")
    exec(line, {"torch": torch, "model": model})
    return path


def check_shrunk(other: Encoder) -> None:
    rows = other.encode([scene(1), scene(2)])
    assert rows.shape == (2, 512)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    corner = to_square(scene(1))[: PICTURE_SIDE // 16, : PICTURE_SIDE // 16] / 255
    red = (corner[..., 0].mean() - 0.485) / 0.229  # as ImageNet's encoders expect
    green = (corner[..., 1].mean() - 0.456) / 0.224
    assert rows[0, 0] / rows[0, 256] == pytest.approx(red / green, rel=1e-3)


def test_an_onnx_model_of_512_numbers_is_an_encoder_with_its_own_id(tmp_path: Path, encoder: Encoder) -> None:
    path = export(Shrunk(512), tmp_path / "shrunk.onnx")
    other = load_encoder(path)
    check_shrunk(other)
    assert other.encoder_id.startswith("onnx-")
    assert load_encoder(path, threads=2).encoder_id == other.encoder_id
    content = onnx.load(path)
    content.doc_string = "another file"
    onnx.save(content, tmp_path / "another.onnx")
    assert load_encoder(tmp_path / "another.onnx").encoder_id != other.encoder_id


def test_a_torchscript_file_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "an encoder.pt"
    shutil.copy(Path(__file__).parent / "torchscript.pt", path)
    with pytest.raises(CatalogError, match="is a TorchScript file, not ONNX") as refused:
        load_encoder(path)
    _, python = str(refused.value).split(" && ")
    program, *arguments = shlex.split(python)
    assert program == "python"
    # The only export of TorchScript is deprecated; without our PYTHONPATH, that is a warning as for the user.
    subprocess.run([sys.executable, *arguments], check=True, env=os.environ | {"PYTHONPATH": ""})
    check_shrunk(load_encoder(path.with_suffix(".onnx")))


def test_weights_beside_the_onnx_file_are_refused_as_the_id_would_not_cover_them(tmp_path: Path) -> None:
    path = export(nn.Sequential(Shrunk(512), nn.Linear(512, 512)), tmp_path / "two.onnx", external_data=True)
    with pytest.raises(CatalogError, match="weights in another file; export it again with external_data=False"):
        load_encoder(path)
    assert len(load_encoder(export(nn.Sequential(Shrunk(512), nn.Linear(512, 512)), path)).encode([scene(1)])) == 1


def test_an_onnx_encoder_needs_openvino(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_grid(tmp_path / "grid.onnx")
    monkeypatch.setitem(sys.modules, "openvino", None)  # as if it were not installed
    with pytest.raises(CatalogError, match="ONNX encoders need OpenVINO"):
        load_encoder(path)


def test_other_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"returns \(1, 128\) for one picture"):
        load_encoder(export(Shrunk(128), tmp_path / "small.onnx"))
    (tmp_path / "text.onnx").write_text("no weights here")
    with pytest.raises(CatalogError, match="is not an ONNX encoder") as refused:
        load_encoder(tmp_path / "text.onnx")
    assert EXPORT in str(refused.value)
    torch.save(Shrunk(512).state_dict(), tmp_path / "state.pt")
    with pytest.raises(CatalogError, match="is not an ONNX encoder"):
        load_encoder(tmp_path / "state.pt")
    (tmp_path / "text.safetensors").write_text("no weights here")
    with pytest.raises(CatalogError, match="does not contain a frame encoder"):
        load_encoder(tmp_path / "text.safetensors")
    with pytest.raises(CatalogError, match="cannot read the encoder"):
        load_encoder(tmp_path / "missing.onnx")


def test_onnx_models_of_other_inputs_and_outputs_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model = onnx.load(write_grid(tmp_path / "two.onnx"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("grid", onnx.TensorProto.FLOAT, [1, 507]))
    onnx.save(model, tmp_path / "two.onnx")
    with pytest.raises(CatalogError, match="1 inputs and 2 outputs"):
        load_encoder(tmp_path / "two.onnx")
    torch.onnx.export(nn.Linear(7, 512).eval(), (torch.zeros(1, 7),), tmp_path / "seven.onnx", external_data=False)
    with pytest.raises(CatalogError, match="is not an ONNX encoder") as refused:
        load_encoder(tmp_path / "seven.onnx")
    assert "\n" not in str(refused.value)


# --- pictures without detail ------------------------------------------------------------------------------------------


def bars(heights: tuple[int, ...]) -> NDArray[np.uint8]:
    """Colour bars in bands, each band with the bars in another order."""
    colours = np.array([(r, g, b) for g in (191, 0) for r in (191, 0) for b in (191, 0)], np.uint8)
    bands = [np.repeat(np.roll(colours, i, axis=0), 40, axis=0)[None].repeat(h, 0) for i, h in enumerate(heights)]
    return np.concatenate(bands)


def grainy(picture: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    noise = np.random.default_rng(0).normal(0, sigma, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


WITHOUT_DETAIL = {
    "black": np.zeros((192, 320, 3), np.uint8),
    "black with grain": grainy(np.full((192, 320, 3), 16, np.uint8), 2.0),
    "flat": np.full((192, 320, 3), (20, 120, 200), np.uint8),
    "fade": np.linspace(0, 255, 320).astype(np.uint8)[None, :, None].repeat(192, 0).repeat(3, 2),
    "bars": bars((192,)),
    "bars in bands": bars((128, 16, 48)),
    "bars with grain": grainy(bars((128, 16, 48)), 2.0),
}


@pytest.mark.parametrize("name", WITHOUT_DETAIL)
def test_pictures_without_detail_are_not_informative(name: str) -> None:
    assert not is_informative(WITHOUT_DETAIL[name])


def test_scenes_are_informative_even_when_dark() -> None:
    assert all(is_informative(scene(seed)) for seed in range(5))
    assert is_informative(scene(1) // 4)


def test_pictures_are_resized_to_the_side_of_the_training() -> None:
    assert to_square(scene(1)).shape == (PICTURE_SIDE, PICTURE_SIDE, 3)
    with pytest.raises(ValueError, match="uint8"):
        to_square(scene(1)[..., 0])
