"""Training end to end: it learns on planted features, and a run in pieces ends with the weights of one piece."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from monitor.matching.mask_step import load_mask_step
from tests.support.onnx_encoders import write_grid
from tests.support.training_clips import write_clip
from training.feature_table import CLEAN, EDITED, FeatureTable, table_of

torch.set_num_threads(1)


def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "train_vsal.py"
    spec = importlib.util.spec_from_file_location("train_vsal", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_vsal"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


train_vsal = script()


def planted_table(n_videos: int = 10, duration_s: float = 40.0) -> FeatureTable:
    """Videos as random walks over the unit sphere; an edit is noise on every row."""
    rng = np.random.default_rng(0)

    def unit(x: NDArray[np.float64]) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
        return rows

    parts = []
    for video in range(n_videos):
        times = np.arange(0, duration_s, 0.5)
        walk = np.cumsum(rng.normal(size=(len(times), 512)), axis=0)
        walk[2:] -= walk[:-2]  # neighbours have half of their content in common
        parts.append((f"video{video}", CLEAN, times, unit(walk)))
        for _ in range(3):
            parts.append((f"video{video}", EDITED, times, unit(walk + rng.normal(size=walk.shape))))
    return table_of("planted", parts)


SHORT = replace(train_vsal.COPYWATCH, epochs=2, pairs_per_epoch=320, batch_size=16, sizes=((16, 16),))


def weights(path: Path) -> NDArray[np.float32]:
    return np.concatenate([w.detach().numpy().ravel() for w in load_mask_step(path).parameters()])


@pytest.mark.slow
def test_it_learns_to_find_planted_copies(tmp_path: Path) -> None:
    recipe = replace(SHORT, epochs=3, pairs_per_epoch=1920)
    figures = train_vsal.train(planted_table(), tmp_path, recipe)
    assert figures["mask_ap"] > 0.8
    assert figures["step_accuracy"] > 0.9
    assert figures["mask_on_path"] > 0.5
    assert figures["mask_off_path"] < 0.05
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("with_sequence_encoder", [False, True])
def test_a_run_in_pieces_ends_with_the_same_weights(tmp_path: Path, with_sequence_encoder: bool) -> None:
    table, uninterrupted, pieces = planted_table(4), tmp_path / "uninterrupted", tmp_path / "pieces"
    recipe = replace(SHORT, pairs_per_epoch=24, batch_size=8)  # 2 epochs of 3 steps
    for out in (uninterrupted, pieces):
        out.mkdir()
    train_vsal.train(table, uninterrupted, recipe, with_sequence_encoder=with_sequence_encoder, n_measured=64)
    for _ in range(3):
        train_vsal.train(
            table, pieces, recipe, with_sequence_encoder=with_sequence_encoder, stop_after=2, n_measured=64
        )
    assert np.array_equal(weights(uninterrupted / "mask_step.safetensors"), weights(pieces / "mask_step.safetensors"))
    names = sorted(path.name for path in uninterrupted.iterdir())
    expected = ["checkpoint.pt", "log.jsonl", "mask_step.safetensors"]
    assert names == (
        sorted([*expected, "sequence_encoder.safetensors", "sequence_encoder.sha256"])
        if with_sequence_encoder
        else expected
    )


def test_a_sequence_encoder_starts_with_the_similarities_of_the_frames() -> None:
    table = planted_table(2)
    frames_only, sequenced = train_vsal.Vsal(table.rows, False), train_vsal.Vsal(table.rows, True)
    pairs = [train_vsal.broadcast_pair(np.random.default_rng(n), table, 16, 16, sequenced.context) for n in range(4)]
    batch = train_vsal.batch_of(pairs)
    without = [replace(pair, live=pair.live[sequenced.context :], ref=pair.ref[sequenced.context :]) for pair in pairs]
    with torch.no_grad():
        ours, theirs = sequenced.similarity(batch), frames_only.similarity(train_vsal.batch_of(without))
    torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0)


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    table = planted_table(4)
    train_vsal.train(table, tmp_path, SHORT, stop_after=1)
    with pytest.raises(SystemExit, match="another configuration"):
        train_vsal.train(table, tmp_path, replace(SHORT, learning_rate=1e-3), stop_after=1)


def test_the_papers_recipe_is_the_default_and_as_published() -> None:
    paper = train_vsal.PAPER
    assert (paper.optimiser, paper.learning_rate, paper.weight_decay) == ("sgd", 5e-4, 1e-5)
    assert (paper.epochs, paper.pairs_per_epoch, paper.step_weight, paper.sizes) == (8, 50_000, 1.0, ((16, 16),))
    rates = [train_vsal.learning_rate(paper, step, 80) for step in (0, 39, 40, 79)]
    assert rates == pytest.approx([5e-4, 5e-4, 5e-5, 5e-5])
    vsal = train_vsal.Vsal(planted_table(1).rows, False)
    assert train_vsal.make_optimiser(vsal, paper).param_groups[0]["momentum"] == 0.9


def test_average_precision_of_a_ranking_by_hand() -> None:
    truth = np.array([True, False, True, False])
    assert train_vsal.average_precision(np.array([0.9, 0.8, 0.7, 0.1], np.float32), truth) == pytest.approx(
        (1 + 2 / 3) / 2
    )


@pytest.mark.slow
def test_from_videos_to_weights_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    for seed in range(3):
        write_clip(videos / f"clip{seed}.mp4", seconds=12, seed=seed)
    encoder = write_grid(tmp_path / "tiny.onnx")
    command = [str(videos), str(tmp_path / "out"), "--encoder", str(encoder), "--cache", str(tmp_path / "cache")]
    train_vsal.main([*command, "--epochs", "1", "--pairs-per-epoch", "64", "--batch-size", "32", "--coverage", "0.1"])
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"mask_ap", "mask_iou", "mask_on_path", "mask_off_path", "step_accuracy"}
    net = load_mask_step(tmp_path / "out" / "mask_step.safetensors")
    recipe = net.configuration["recipe"]
    assert isinstance(recipe, dict)
    assert (recipe["name"], recipe["pairs_per_epoch"]) == ("paper", 64)
    assert net.trained_on == net.configuration["encoder_id"] != ""


def test_a_folder_without_videos_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no \.mp4 files"):
        train_vsal.main([str(tmp_path), str(tmp_path / "out")])


def test_videos_of_all_folders_are_used_and_a_name_must_not_occur_twice(tmp_path: Path) -> None:
    for name in ("first/b.mp4", "first/d.mp4", "second/a.mp4", "third/b.mp4"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = train_vsal.find_videos([tmp_path / "first", tmp_path / "second"])
    assert [path.stem for path in found] == ["a", "b", "d"]
    with pytest.raises(SystemExit, match="two videos have the same name"):
        train_vsal.find_videos([tmp_path / "first", tmp_path / "third"])
