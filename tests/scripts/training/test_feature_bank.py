"""The feature bank: takes tell what their rows show, and a build goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reference_db.features.encoder import load_encoder
from tests.support.onnx_encoders import write_grid
from tests.support.training_clips import write_clip
from training.feature_bank import (
    CLEAN,
    EDITED,
    NOTHING,
    BankPlan,
    FeatureBank,
    Take,
    bank_of,
    build_bank,
    raw_pictures,
)

PLAN = BankPlan(least_takes=2, coverage=0.1)


def test_a_take_knows_the_rows_of_its_moments() -> None:
    take = Take("v", EDITED, 100, np.arange(2.25, 8, 0.5))  # rows 100..111 show 2.25 .. 7.75
    assert take.rows_at(np.array([2.25, 2.4, 2.6, 7.75])).tolist() == [100, 100, 101, 111]
    assert take.rows_at(np.array([1.9, 8.1, np.nan])).tolist() == [NOTHING] * 3
    moments = take.shown_s(np.array([100, 111, NOTHING]))
    assert moments[:2].tolist() == [2.25, 7.75]
    assert np.isnan(moments[2])


def test_rows_end_with_nothing() -> None:
    bank = bank_of("e", [("v", CLEAN, np.arange(3.0), np.ones((3, 4), np.float32))])
    assert bank.rows[NOTHING].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="zero row"):
        FeatureBank("e", np.ones((3, 4), np.float32), bank.takes)


def test_long_videos_are_drawn_more_often_but_not_in_proportion() -> None:
    parts = [
        (name, CLEAN, np.arange(n / 1.0), np.ones((n, 4), np.float32)) for name, n in (("long", 402), ("short", 102))
    ]
    bank, rng = bank_of("e", parts), np.random.default_rng(0)
    share = np.mean([bank.draw_video(rng) == "long" for _ in range(4000)])
    assert share == pytest.approx(2 / 3, abs=0.03)  # the roots of 401 and 101 are as 2 to 1


def test_raw_pictures_come_at_even_moments(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", seconds=3, seed=1, fps=10)
    pictures = list(raw_pictures(tmp_path / "a.mp4", 4))
    assert len(pictures) == 12
    assert {p.shape for p in pictures} == {(192, 288, 3)}
    every = list(raw_pictures(tmp_path / "a.mp4", 10))
    for k, picture in enumerate(pictures):  # the first picture at or after k / 4 s
        assert np.array_equal(picture, every[int(np.ceil(k * 10 / 4 - 1e-6))])


@pytest.mark.slow
def test_a_bank_holds_clean_and_edited_takes_and_is_made_once(tmp_path: Path) -> None:
    for seed in range(2):
        write_clip(tmp_path / f"clip{seed}.mp4", seconds=10, seed=seed)
    videos, encoder = sorted(tmp_path.glob("*.mp4")), write_grid(tmp_path / "tiny.onnx")
    told: list[tuple[int, int]] = []
    bank = build_bank(
        videos, tmp_path / "cache", encoder, PLAN, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert bank.videos == ("clip0", "clip1")
    assert bank.encoder_id == load_encoder(encoder).encoder_id

    (clean,) = bank.of("clip0", CLEAN)
    assert clean.times_s.tolist() == np.arange(0, 10, 0.5).tolist()
    pictures = list(raw_pictures(videos[0], 4))
    expected = load_encoder(encoder).encode([pictures[12]])[0]  # second 3
    np.testing.assert_allclose(bank.rows[clean.rows_at(np.array([3.0]))[0]], expected, atol=2e-3)  # kept as fp16

    edited = bank.of("clip0", EDITED)
    assert len(edited) == 2
    assert {take.start_s % 0.5 for take in edited} <= {0.0, 0.25}

    # One file is lost, one is touched by nobody: only the lost one is made again, with the same rows.
    home = next((tmp_path / "cache").iterdir())
    (home / "clip1.npz").unlink()
    kept = (home / "clip0.npz").stat().st_mtime_ns
    again = build_bank(videos, tmp_path / "cache", encoder, PLAN)
    assert (home / "clip0.npz").stat().st_mtime_ns == kept
    assert np.array_equal(again.rows, bank.rows)


@pytest.mark.slow
def test_another_plan_is_another_bank(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", seconds=6, seed=0)
    encoder = write_grid(tmp_path / "tiny.onnx")
    build_bank([tmp_path / "a.mp4"], tmp_path / "cache", encoder, PLAN)
    build_bank([tmp_path / "a.mp4"], tmp_path / "cache", encoder, BankPlan(least_takes=1, coverage=0.1))
    assert len(list((tmp_path / "cache").iterdir())) == 2
