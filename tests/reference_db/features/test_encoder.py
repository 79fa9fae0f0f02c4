"""Features: unit rows that depend on their picture alone, ids that tell encoders apart, and dull pictures known."""

from __future__ import annotations

import hashlib
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
    BLANK,
    EXPORT,
    LOOK_BACK_S,
    N_HEADS,
    PICTURE_SIDE,
    WEIGHTS,
    Encoder,
    FrameEncoder,
    OnSquares,
    SameConv,
    SequenceEncoder,
    is_informative,
    load_encoder,
    prepare,
    squeeze,
)
from reference_db.features.engines import openvino_engine, torch_engine
from reference_db.store.references import FEATURE_SIZE
from tests.support.onnx_encoders import write_grid


def scene(seed: int, height: int = 192, width: int = 256) -> NDArray[np.uint8]:
    """Overlapping coloured shapes on a rough ground: as different from the next seed's as two shots are."""
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


def test_rows_have_unit_length_whatever_the_size(encoder: Encoder) -> None:
    rows = encoder.encode([scene(1), scene(2, 90, 400), scene(3, 300, 120)])
    assert rows.shape == (3, FEATURE_SIZE)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert encoder.encode([]).shape == (0, FEATURE_SIZE)


def test_a_row_does_not_depend_on_its_company(encoder: Encoder) -> None:
    pictures = [scene(seed) for seed in range(7)]
    rows = encoder.encode(pictures)
    order = np.random.default_rng(0).permutation(7)
    assert np.array_equal(encoder.encode([pictures[i] for i in order]), rows[order])
    assert np.array_equal(encoder.encode([pictures[3]])[0], rows[3])
    assert np.array_equal(load_encoder().encode([pictures[6]])[0], rows[6])  # nor on the process's past


def test_copies_are_nearer_than_strangers(encoder: Encoder) -> None:
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


def plain_network() -> FrameEncoder:
    from safetensors.torch import load_file

    plain = FrameEncoder()
    plain.load_state_dict({k: v.float() for k, v in load_file(WEIGHTS).items()})
    return plain.eval()


def test_the_packed_network_is_the_network(encoder: Encoder) -> None:
    plain = plain_network()
    pictures = [scene(seed) for seed in range(3)]
    with torch.inference_mode():
        expected = plain(prepare(torch.from_numpy(np.stack([squeeze(p) for p in pictures])))).numpy()
    np.testing.assert_allclose(encoder.encode(pictures), expected, atol=2e-5)


def test_engines_agree_and_each_is_the_same_with_more_threads() -> None:
    squares = [(squeeze(scene(seed))[None],) for seed in range(5)]
    openvino = openvino_engine(OnSquares(plain_network()), (BLANK,))
    if openvino is None:
        pytest.skip("OpenVINO has no wheels for this machine")
    by_openvino = np.concatenate([row for (row,) in openvino(squares)])
    by_torch = np.concatenate([row for (row,) in torch_engine(OnSquares(plain_network()))(squares)])
    assert ((by_openvino * by_torch).sum(axis=1) > 1 - 1e-3).all()
    np.testing.assert_allclose(by_openvino, by_torch, atol=2e-5)
    in_two_threads = openvino_engine(OnSquares(plain_network()), (BLANK,), threads=2)
    assert in_two_threads is not None
    assert np.array_equal(np.concatenate([row for (row,) in in_two_threads(squares)]), by_openvino)


def test_torch_runs_the_network_where_openvino_is_missing(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)  # as if it were not installed
    assert openvino_engine(OnSquares(plain_network()), (BLANK,)) is None
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


def test_weights_are_those_that_the_id_names(tmp_path: Path, encoder: Encoder) -> None:
    assert encoder.encoder_id == load_encoder().encoder_id
    copy = tmp_path / WEIGHTS.name
    shutil.copy(WEIGHTS, copy)
    assert load_encoder(copy).encoder_id == encoder.encoder_id
    content = bytearray(copy.read_bytes())
    content[-1000] ^= 1
    copy.write_bytes(content)
    assert load_encoder(copy).encoder_id != encoder.encoder_id

    shutil.copy(WEIGHTS.with_suffix(".sha256"), tmp_path)
    with pytest.raises(CatalogError, match="is damaged"):
        load_encoder(copy)


def test_the_shipped_hash_is_that_of_the_file() -> None:
    digest, name = WEIGHTS.with_suffix(".sha256").read_text().split()
    assert name == WEIGHTS.name
    assert digest == hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    assert digest in (WEIGHTS.parent / "README.md").read_text()


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
    corner = squeeze(scene(1))[: PICTURE_SIDE // 16, : PICTURE_SIDE // 16] / 255
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
    subprocess.run([sys.executable, *arguments], check=True)
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
    with pytest.raises(CatalogError, match="no frame encoder"):
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


# --- dull pictures ----------------------------------------------------------------------------------------------------


def bars(heights: tuple[int, ...]) -> NDArray[np.uint8]:
    """Colour bars in bands, each band with the bars in another order."""
    colours = np.array([(r, g, b) for g in (191, 0) for r in (191, 0) for b in (191, 0)], np.uint8)
    bands = [np.repeat(np.roll(colours, i, axis=0), 40, axis=0)[None].repeat(h, 0) for i, h in enumerate(heights)]
    return np.concatenate(bands)


def grainy(picture: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    noise = np.random.default_rng(0).normal(0, sigma, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


DULL = {
    "black": np.zeros((192, 320, 3), np.uint8),
    "black with grain": grainy(np.full((192, 320, 3), 16, np.uint8), 2.0),
    "flat": np.full((192, 320, 3), (20, 120, 200), np.uint8),
    "fade": np.linspace(0, 255, 320).astype(np.uint8)[None, :, None].repeat(192, 0).repeat(3, 2),
    "bars": bars((192,)),
    "bars in bands": bars((128, 16, 48)),
    "bars with grain": grainy(bars((128, 16, 48)), 2.0),
}


@pytest.mark.parametrize("name", DULL)
def test_dull_pictures_carry_no_information(name: str) -> None:
    assert not is_informative(DULL[name])


def test_scenes_carry_information_even_when_dark() -> None:
    assert all(is_informative(scene(seed)) for seed in range(5))
    assert is_informative(scene(1) // 4)


# --- sequences --------------------------------------------------------------------------------------------------------


def unit_rows(n: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(n, FEATURE_SIZE, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.fixture(scope="module")
def sequence() -> SequenceEncoder:
    torch.manual_seed(3)
    return SequenceEncoder().eval()


def slow(sequence: SequenceEncoder, rows: Tensor) -> Tensor:
    """Row by row and head by head, as one would explain it."""
    out = torch.zeros_like(rows)
    width = FEATURE_SIZE // N_HEADS
    for i in range(len(rows)):
        if not rows[i].any():
            continue
        window = [rows[j] for j in range(max(0, i - LOOK_BACK_S), i + 1) if rows[j].any()]
        query = sequence.attend(rows[i])[:FEATURE_SIZE]
        seen = torch.stack([sequence.attend(row) for row in window])
        heads = []
        for h in range(N_HEADS):
            part = slice(h * width, (h + 1) * width)
            key, value = seen[:, FEATURE_SIZE : 2 * FEATURE_SIZE][:, part], seen[:, 2 * FEATURE_SIZE :][:, part]
            heads.append((key @ query[part] / width**0.5).softmax(0) @ value)
        x = sequence.norm_attended(rows[i] + sequence.gather(torch.cat(heads)))
        x = sequence.norm_out(x + sequence.narrow(sequence.widen(x).relu()))
        out[i] = x / x.norm()
    return out


@torch.no_grad()
def test_sequence_rows_are_what_the_slow_way_gives(sequence: SequenceEncoder) -> None:
    rows = unit_rows(40)
    rows[[0, 7, 8, 30]] = 0  # holes
    whole = sequence(rows)
    torch.testing.assert_close(whole, slow(sequence, rows), atol=1e-5, rtol=0)
    assert not whole[[0, 7, 8, 30]].any()


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(1,) * 40, (7, 16, 1, 16), (40,)])
def test_a_stream_in_pieces_gives_the_same_rows(sequence: SequenceEncoder, cuts: tuple[int, ...]) -> None:
    rows = unit_rows(40, seed=1)
    rows[12] = 0
    pieces, at = [], 0
    for n in cuts:
        pieces.append(sequence.encode(rows[at : at + n], rows[max(0, at - LOOK_BACK_S) : at]))
        at += n
    torch.testing.assert_close(torch.cat(pieces), sequence(rows), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_batch_of_sequences_is_each_of_them(sequence: SequenceEncoder) -> None:
    batch = torch.stack([unit_rows(20, seed) for seed in range(3)])
    torch.testing.assert_close(sequence(batch)[1], sequence(batch[1]), atol=1e-5, rtol=0)


def test_a_sequence_learns_across_holes(sequence: SequenceEncoder) -> None:
    rows = unit_rows(5)
    rows[2] = 0
    sequence(rows)[:, :7].sum().backward()
    gradients = [p.grad for p in sequence.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)


def test_the_side_is_what_the_weights_were_made_for() -> None:
    assert squeeze(scene(1)).shape == (PICTURE_SIDE, PICTURE_SIDE, 3)
    with pytest.raises(ValueError, match="uint8"):
        squeeze(scene(1)[..., 0])
