"""Pictures to train on: videos and stills with their groups, decoded once, joined without copying."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.training_clips import write_clip
from training.training_videos import CACHE_FPS, CACHE_SIDE, Pictures, join_films, load_films, load_stills


def write_stills(folder: Path, groups: list[str]) -> None:
    folder.mkdir()
    lines = ["file\tlicence\tgroup"]
    for k, group in enumerate(groups):
        Image.new("RGB", (30 + k, 20), (10 * k, 50, 200)).save(folder / f"{k}.png")
        lines.append(f"{k}.png\tnone\t{group}")
    (folder / "manifest.tsv").write_text("\n".join(lines) + "\n")


def test_arrays_of_pictures_are_indexed_as_one() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (n, 4, 4, 3), dtype=np.uint8) for n in (3, 1, 5)]
    pictures, whole = Pictures(arrays), np.concatenate(arrays)
    assert len(pictures) == 9
    for k in range(9):
        assert np.array_equal(pictures[k], whole[k])
    chosen = np.array([8, 0, 3, 3, 2])
    assert np.array_equal(pictures[chosen], whole[chosen])
    with pytest.raises(IndexError, match="picture 9 of 9"):
        pictures[9]


def test_a_still_is_a_film_of_one_picture_with_the_group_of_the_manifest(tmp_path: Path) -> None:
    write_stills(tmp_path / "stills", ["a", "b", "a"])
    films = load_stills(tmp_path / "stills", tmp_path / "cache")
    assert films.groups == ["a", "b", "a"]
    assert films.starts.tolist() == [0, 1, 2, 3]
    assert films.pictures[2].shape == (CACHE_SIDE, CACHE_SIDE, 3)
    assert films.pictures[2][5, 5].tolist() == [20, 50, 200]

    (tmp_path / "stills" / "manifest.tsv").unlink()
    with pytest.raises(SystemExit, match="no manifest"):
        load_stills(tmp_path / "stills", tmp_path / "cache")


def test_folders_are_joined_and_decoded_once(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for seed, name in enumerate(("scene_01", "scene_02", "city")):
        write_clip(tmp_path / "videos" / f"{name}.mp4", seconds=2, seed=seed)
    write_stills(tmp_path / "stills", ["a", "b"])
    cache = tmp_path / "cache"
    videos, stills = load_films(tmp_path / "videos", cache), load_stills(tmp_path / "stills", cache)
    joined = join_films([videos, stills])

    n = 2 * CACHE_FPS
    assert joined.names == ["city.mp4", "scene_01.mp4", "scene_02.mp4", "0.png", "1.png"]
    assert joined.groups == ["city", "scene", "scene", "a", "b"]
    assert joined.starts.tolist() == [0, n, 2 * n, 3 * n, 3 * n + 1, 3 * n + 2]
    assert np.array_equal(joined.film_of, np.repeat([0, 1, 2, 3, 4], [n, n, n, 1, 1]))
    assert len(joined.pictures) == len(joined.seconds) == len(joined.greys) == len(joined.spread) == 3 * n + 2
    assert np.array_equal(joined.pictures[3 * n + 1], stills.pictures[1])

    files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    load_films(tmp_path / "videos", cache)
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == files
