"""Training of the frame encoder: a killed run resumes to the same weights, and look-alikes are no negatives."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from reference_db.features.encoder import load_encoder
from reference_db.store.references import FEATURE_SIZE
from tests.support.training_clips import write_clip
from training.training_videos import CACHE_FPS, Films, Pictures, is_held_back, join_films, load_films

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_encoder.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_encoder", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_encoder"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


train_encoder = script()


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for seed in range(3):
        write_clip(folder / f"clip{seed}.mp4", seconds=9, seed=seed)
    return folder


def command(videos: Path, work: Path) -> list[str]:
    small = "--steps 3 --side 32 --last-side 64 --films 2 --frames-per-film 3 --others 2 --held-back 0 --workers 0"
    fast = "--checkpoint-every 1 --fit-pictures 20 --shrinkage --cache"
    place = [str(videos), str(work / "out.safetensors"), "--work", str(work)]
    return [sys.executable, str(SCRIPT), *place, *small.split(), *fast.split(), str(videos.parent / "cache")]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ["PYTHONPATH"]])}


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_with_the_same_weights(videos: Path, tmp_path: Path) -> None:
    uninterrupted, broken = tmp_path / "uninterrupted", tmp_path / "broken"
    subprocess.run(command(videos, uninterrupted), check=True, env=environment(), capture_output=True)

    with subprocess.Popen(command(videos, broken), env=environment(), stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "saved step 1" in line:
                run.kill()
    assert not (broken / "out.safetensors").exists()
    second = subprocess.run(command(videos, broken), check=True, env=environment(), capture_output=True, text=True)

    assert "resumed at step" in second.stderr
    assert (broken / "out.safetensors").read_bytes() == (uninterrupted / "out.safetensors").read_bytes()
    state = torch.load(uninterrupted / "checkpoint.pt", weights_only=True)
    assert state["config"]["side"] == 32
    assert state["step"] == 3

    refused = subprocess.run(
        [*command(videos, broken), "--seed", "5"], env=environment(), capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "other settings: seed" in refused.stderr

    # Weights that were started from can be measured and exported as they are.
    start = uninterrupted / "out.safetensors"
    as_is = ["--export-now", "start", "--start", str(start), "--head", "unchanged", "--trained-share", "1"]
    subprocess.run([*command(videos, tmp_path / "as_is"), *as_is], check=True, env=environment(), capture_output=True)
    for name, tensor in load_file(tmp_path / "as_is" / "out.safetensors").items():
        assert torch.equal(tensor, load_file(start)[name])

    # The result is an encoder, with its hash beside it.
    rows = load_encoder(uninterrupted / "out.safetensors").encode([np.full((40, 60, 3), 90, np.uint8)])
    assert rows.shape == (1, FEATURE_SIZE)
    assert json.loads(_metadata(uninterrupted / "out.safetensors")["config"])["step"] == 3


def _metadata(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return dict(header["__metadata__"])


def config(**changes: object) -> object:
    values: dict[str, object] = {"steps": 10, "seed": 1, "side": 32, "last_side": 32, "decay": 0.3, "films": 3}
    values |= {"frames_per_film": 4, "others": 6, "trunk_rate": 1e-4, "head_rate": 1e-4, "temperature": 0.05}
    values |= {"koleo": 1.0, "ema": 0.9, "held_back": 0.0}
    return train_encoder.Config(**(values | changes))


def test_a_batch_depends_on_its_number_alone_and_has_no_look_alikes_as_negatives(videos: Path, tmp_path: Path) -> None:
    films = load_films(videos, tmp_path)
    assert len(films.seconds) == 3 * 9 * CACHE_FPS
    np.testing.assert_allclose(films.seconds[:3], [0, 0.3, 0.5], atol=1e-3)  # of 10 a second, the first at or after
    batches = train_encoder.Batches(films, config(), 32)
    one, two, allowed = batches[4]
    assert one.shape == two.shape == (18, 32, 32, 3)
    again = train_encoder.Batches(films, config(), 32)[4]
    assert torch.equal(one, again[0])
    assert torch.equal(two, again[1])
    assert not torch.equal(one, batches[5][0])

    chosen = batches._choose(np.random.default_rng([1, 4]))
    seconds, film = films.seconds[chosen], films.film_of[chosen]
    for i in range(len(chosen)):
        for j in range(len(chosen)):
            if film[i] == film[j] and abs(seconds[i] - seconds[j]) <= train_encoder.NEAR_S:
                assert not allowed[i, j]
    assert allowed.any()


def test_films_and_stills_of_one_group_are_no_negatives_of_each_other(videos: Path, tmp_path: Path) -> None:
    films = load_films(videos, tmp_path)
    n_moments = len(films.seconds)
    rng = np.random.default_rng(3)
    greys = rng.standard_normal((4, films.greys.shape[1])).astype(np.float32)
    stills = Films(
        ["a1.png", "a2.png", "b.png", "c.png"],
        ["a", "a", "b", "c"],
        np.arange(5),
        Pictures([rng.integers(0, 256, (4, *films.pictures[0].shape), dtype=np.uint8)]),
        np.zeros(4, np.float32),
        greys / np.linalg.norm(greys, axis=1, keepdims=True),
        np.full(4, 50, np.float32),
    )
    joined = join_films([replace(films, groups=["series", "series", "other"]), stills])
    batches = train_encoder.Batches(joined, config(stills=3, inside=0.5, weak=0.0), 32)
    assert batches.stills.tolist() == [n_moments + k for k in range(4)]
    assert len(batches[0][0]) == 18 + 3  # of 4 stills

    moments = [int(start) + 4 for start in films.starts[:-1]]
    far = moments[0] + 5 * CACHE_FPS  # of the first film
    allowed = batches._negatives(np.array([*moments, far, *batches.stills]))
    refused = {(0, 1), (3, 1), (4, 5)}  # first and second film, first two stills
    for i in range(8):
        for j in range(8):
            assert allowed[i, j] == (i != j and (i, j) not in refused and (j, i) not in refused)


def test_held_back_videos_are_not_trained_on(videos: Path, tmp_path: Path) -> None:
    films = load_films(videos, tmp_path)
    held = [is_held_back(name, 0.5) for name in films.names]
    assert 0 < sum(held) < 3
    learnt = np.concatenate(train_encoder.Batches(films, config(held_back=0.5), 32).choices)
    assert {bool(held[film]) for film in films.film_of[learnt]} == {False}


def loss_by_definition(rows: torch.Tensor, allowed: torch.Tensor, temperature: float, koleo: float) -> float:
    """Row by row."""
    n = len(rows) // 2
    total = 0.0
    for i in range(2 * n):
        partner = (i + n) % (2 * n)
        negatives = [j for j in range(2 * n) if allowed[i % n, j % n]]
        own = float(rows[i] @ rows[partner])
        others = [float(rows[i] @ rows[j]) for j in negatives]
        total -= own / temperature - np.log(sum(np.exp(s / temperature) for s in [own, *others]))
        total -= koleo * np.log(np.sqrt(2 - 2 * max(others)))
    return total / (2 * n)


def test_the_loss_is_that_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(10, 16, generator=generator), dim=-1)
    rows[1] = rows[0]  # two moments look the same
    rows[5:] = F.normalize(rows[:5] + 0.1 * torch.randn(5, 16, generator=generator), dim=-1)
    allowed = ~torch.eye(5, dtype=torch.bool)
    strict, _ = train_encoder.loss_of(rows, allowed, 0.05, 0.0)
    allowed[0, 1] = allowed[1, 0] = False
    spared, accuracy = train_encoder.loss_of(rows, allowed, 0.05, 0.7)
    assert float(spared) == pytest.approx(loss_by_definition(rows, allowed, 0.05, 0.7), rel=1e-3)
    assert float(train_encoder.loss_of(rows, allowed, 0.05, 0.0)[0]) < float(strict) - 0.1
    assert accuracy == 1
