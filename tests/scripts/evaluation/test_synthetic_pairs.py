"""Synthetic pairs: the truth is where the copy was inserted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evaluation.recordings import RecordingCache
from evaluation.synthetic_pairs import SyntheticPair, make_pairs
from tests.support import media
from tests.support.planted_features import GridEncoder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[SyntheticPair]:
    folder = tmp_path_factory.mktemp("films")
    cache = RecordingCache(GridEncoder(), folder / "cache")
    paths = [media.write_film(folder / f"film{n}.mp4", n, 40, fps=4, width=160, height=96) for n in range(3)]
    films = [cache.get(path) for path in paths]
    return make_pairs(paths, films, cache.encoder, per_video=6, unrelated_share=0.5, strength=0.0, seed=4)


def test_every_video_has_copies_and_unrelated_pairs(pairs: list[SyntheticPair]) -> None:
    assert len(pairs) == 3 * (6 + 3)
    assert sum(bool(pair.truth) for pair in pairs) == 18
    assert len({pair.live.name for pair in pairs}) == len(pairs)
    assert {edit for pair in pairs for true in pair.truth for edit in true.edits} >= {"speed", "freeze", "cut"}


def test_the_copy_is_where_the_truth_says(pairs: list[SyntheticPair]) -> None:
    similar = []
    for pair in pairs:
        for true in pair.truth:
            assert (true.channel, true.reference) == (pair.live.name, pair.ref.name)
            assert 0 < true.channel_start < true.channel_end < len(pair.live.rows)
            assert 0 <= true.reference_start < true.reference_end <= len(pair.ref.rows)
            first = pair.live.rows[int(true.channel_start)]
            last = pair.live.rows[int(true.channel_end) - 1]
            similar += [
                float((pair.ref.rows[int(true.reference_start) :][:3] @ first).max()),
                float((pair.ref.rows[: int(np.ceil(true.reference_end))][-3:] @ last).max()),
            ]
    assert np.median(similar) > 0.9  # weak edits change pictures hardly at all


def test_the_seed_determines_the_pairs(pairs: list[SyntheticPair], tmp_path: Path) -> None:
    cache = RecordingCache(GridEncoder(), tmp_path / "cache")
    paths = [media.write_film(tmp_path / f"film{n}.mp4", n, 20, fps=4, width=160, height=96) for n in range(2)]
    films = [cache.get(path) for path in paths]
    once, twice, other = (make_pairs(paths, films, cache.encoder, per_video=2, seed=seed) for seed in (1, 1, 2))
    assert [pair.truth for pair in once] == [pair.truth for pair in twice]
    assert all(np.array_equal(a.live.rows, b.live.rows) for a, b in zip(once, twice, strict=True))
    assert [pair.truth for pair in once] != [pair.truth for pair in other]


def test_a_video_too_short_for_a_copy_makes_none(tmp_path: Path) -> None:
    cache = RecordingCache(GridEncoder(), tmp_path / "cache")
    lengths = {"short": 3, "long": 20}
    paths = [media.write_film(tmp_path / f"{name}.mp4", 1, n, fps=4) for name, n in lengths.items()]
    assert make_pairs(paths, [cache.get(path) for path in paths], cache.encoder) == []
