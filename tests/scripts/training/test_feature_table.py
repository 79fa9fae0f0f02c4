"""The feature table: clips know what their rows show, and an interrupted build resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reference_db.features.encoder import load_encoder
from tests.support.onnx_encoders import write_grid
from tests.support.training_clips import write_clip
from training.feature_table import (
    CLEAN,
    EDITED,
    NO_PICTURE,
    EncodedClip,
    EncodingPlan,
    FeatureTable,
    build_table,
    edit_inside,
    raw_pictures,
    table_of,
)

PLAN = EncodingPlan(min_clips=2, coverage=0.1)


def test_a_clip_knows_the_rows_of_its_moments() -> None:
    clip = EncodedClip("v", EDITED, 100, np.arange(2.25, 8, 0.5))  # rows 100..111 show 2.25 .. 7.75
    assert clip.rows_at(np.array([2.25, 2.4, 2.6, 7.75])).tolist() == [100, 100, 101, 111]
    assert clip.rows_at(np.array([1.9, 8.1, np.nan])).tolist() == [NO_PICTURE] * 3
    moments = clip.moments_of(np.array([100, 111, NO_PICTURE]))
    assert moments[:2].tolist() == [2.25, 7.75]
    assert np.isnan(moments[2])


def test_the_last_row_is_zero() -> None:
    table = table_of("e", [("v", CLEAN, np.arange(3.0), np.ones((3, 4), np.float32))])
    assert table.rows[NO_PICTURE].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="zero row"):
        FeatureTable("e", np.ones((3, 4), np.float32), table.clips)


def test_long_videos_are_drawn_more_often_but_not_in_proportion() -> None:
    parts = [
        (name, CLEAN, np.arange(n / 1.0), np.ones((n, 4), np.float32)) for name, n in (("long", 402), ("short", 102))
    ]
    table, rng = table_of("e", parts), np.random.default_rng(0)
    share = np.mean([table.draw_video(rng) == "long" for _ in range(4000)])
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
def test_a_table_has_clean_and_edited_clips_and_is_built_once(tmp_path: Path) -> None:
    for seed in range(2):
        write_clip(tmp_path / f"clip{seed}.mp4", seconds=10, seed=seed)
    videos, encoder = sorted(tmp_path.glob("*.mp4")), write_grid(tmp_path / "tiny.onnx")
    progress: list[tuple[int, int]] = []
    table = build_table(
        videos, tmp_path / "cache", encoder, PLAN, progress=lambda done, total: progress.append((done, total))
    )
    assert progress == [(0, 2), (1, 2), (2, 2)]
    assert table.videos == ("clip0", "clip1")
    assert table.encoder_id == load_encoder(encoder).encoder_id

    (clean,) = table.clips_of("clip0", CLEAN)
    assert clean.times_s.tolist() == np.arange(0, 10, 0.5).tolist()
    pictures = list(raw_pictures(videos[0], 4))
    expected = load_encoder(encoder).encode([pictures[12]])[0]  # second 3
    np.testing.assert_allclose(table.rows[clean.rows_at(np.array([3.0]))[0]], expected, atol=2e-3)  # stored as fp16

    edited = table.clips_of("clip0", EDITED)
    assert len(edited) == 2
    assert {clip.start_s % 0.5 for clip in edited} <= {0.0, 0.25}

    # Only the file that is missing is built again, with the same rows.
    folder = next((tmp_path / "cache").iterdir())
    (folder / "clip1.npz").unlink()
    modified = (folder / "clip0.npz").stat().st_mtime_ns
    again = build_table(videos, tmp_path / "cache", encoder, PLAN)
    assert (folder / "clip0.npz").stat().st_mtime_ns == modified
    assert np.array_equal(again.rows, table.rows)


def test_a_clip_inside_another_has_one_layout_and_a_moving_picture_behind() -> None:
    rng = np.random.default_rng(0)
    red = [np.full((60, 80, 3), (255, 0, 0), np.uint8)] * 4
    noise = [rng.integers(0, 256, (60, 80, 3), dtype=np.uint8) for _ in range(3)]
    still = [np.zeros((60, 80, 3), np.uint8)] * 3
    moved = []
    for seed in range(30):
        before_black = list(edit_inside(red, still, np.random.default_rng(seed)))
        before_noise = list(edit_inside(red, noise, np.random.default_rng(seed)))
        changed = np.abs(before_noise[0].astype(int) - before_noise[1]).max(-1)  # by noise behind, or by grain
        layout = np.abs(before_black[0].astype(int) - before_noise[0]).max(-1)
        moved.append(bool((changed > 60).sum() > 200 and np.array_equal(before_noise[0], before_noise[3])))
        assert (layout > 60).mean() < 0.95  # the picture itself does not depend on what is behind
    assert sum(moved) > 10  # the others: grain, or a colour behind


@pytest.mark.slow
def test_clips_inside_another_video_are_encoded_when_the_plan_has_them(tmp_path: Path) -> None:
    for seed in range(2):
        write_clip(tmp_path / f"clip{seed}.mp4", seconds=4, seed=seed)
    videos, encoder = sorted(tmp_path.glob("*.mp4")), write_grid(tmp_path / "tiny.onnx")
    plain = build_table(videos, tmp_path / "cache", encoder, PLAN)
    inside = build_table(videos, tmp_path / "cache", encoder, replace(PLAN, inside=1.0))
    for table in (plain, inside):
        assert len(table.clips_of("clip0", EDITED)) == 2
    (clean,) = inside.clips_of("clip0", CLEAN)
    assert np.array_equal(inside.rows[clean.first_row], plain.rows[clean.first_row])
    assert not np.array_equal(inside.rows, plain.rows)


@pytest.mark.slow
def test_another_plan_is_another_table(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", seconds=6, seed=0)
    encoder = write_grid(tmp_path / "tiny.onnx")
    build_table([tmp_path / "a.mp4"], tmp_path / "cache", encoder, PLAN)
    build_table([tmp_path / "a.mp4"], tmp_path / "cache", encoder, EncodingPlan(min_clips=1, coverage=0.1))
    assert len(list((tmp_path / "cache").iterdir())) == 2
