"""The benchmark of the frame encoder: queries, gallery, and the scores of heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evaluation.encoder_benchmark import Benchmark, make_benchmark, score_head
from reference_db.store.references import FEATURE_SIZE
from tests.support.training_clips import write_clip
from training.encoder_heads import Head, imagenet_encoder
from training.training_videos import load_films

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    folder = tmp_path_factory.mktemp("videos")
    for name, seeds in (("queries", (1, 2)), ("others", (3, 4))):
        (folder / name).mkdir()
        for seed in seeds:
            write_clip(folder / name / f"clip{seed}.mp4", seconds=6, seed=seed)
    queries, others = (load_films(folder / name, folder / "cache") for name in ("queries", "others"))
    return make_benchmark(imagenet_encoder(), queries, others, every_s=3)


def test_queries_are_out_of_phase_and_others_are_in_the_gallery(benchmark: Benchmark) -> None:
    assert benchmark.queries.shape[:2] == (len(benchmark.edits), len(benchmark.query_s))
    assert {round(float(second) % 1, 1) for second in benchmark.query_s} == {0.5}
    assert set(benchmark.gallery_film.tolist()) == {-1, 0, 1}
    assert len(benchmark.gallery) == len(benchmark.gallery_film) == len(benchmark.gallery_s)


def test_a_head_is_scored_for_each_edit_and_for_all(benchmark: Benchmark) -> None:
    torch.manual_seed(0)
    head = Head("random", torch.randn(FEATURE_SIZE, 1280), torch.zeros(FEATURE_SIZE))
    table = score_head(benchmark, head)
    assert list(table) == ["all", *benchmark.edits]
    assert table["none"]["film"] > 0.9  # unedited pictures are found
    assert all(0 <= row["time"] <= row["film"] <= 1 for row in table.values())
    blind = Head("blind", torch.zeros(FEATURE_SIZE, 1280), torch.ones(FEATURE_SIZE))
    assert score_head(benchmark, blind)["all"]["recall"] == 0


def test_the_folder_of_videos_must_have_some(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no videos in"):
        load_films(tmp_path, tmp_path / "cache")
