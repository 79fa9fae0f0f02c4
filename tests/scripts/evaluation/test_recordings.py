"""Recordings: encoded once, cached by content and encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation.recordings import Recording, RecordingCache, apply_sequence_encoder
from reference_db.errors import MediaError
from tests.support import media
from tests.support.planted_features import GridEncoder, film
from training.sequence_encoder import SequenceEncoder

torch.set_num_threads(1)


def test_a_file_is_encoded_once_and_named_by_its_stem(tmp_path: Path) -> None:
    path = media.write_film(tmp_path / "film.mp4", 3, 6)
    encoder = GridEncoder()
    first = RecordingCache(encoder, tmp_path / "cache").get(path)
    assert (first.name, first.rows.shape, encoder.n_pictures) == ("film", (6, 512), 6)
    moved = path.rename(tmp_path / "moved.mp4")
    again = RecordingCache(encoder, tmp_path / "cache").get(moved)
    assert (again.name, encoder.n_pictures) == ("moved", 6)
    np.testing.assert_array_equal(again.rows, first.rows)
    np.testing.assert_array_equal(again.informative, first.informative)


def test_economy_repeats_key_frames_and_is_cached_separately(tmp_path: Path) -> None:
    path = media.write_film(tmp_path / "film.mp4", 3, 6)
    cache = RecordingCache(GridEncoder(), tmp_path / "cache")
    exact, economy = cache.get(path), cache.get(path, "economy")
    assert exact.held is None
    assert economy.held is not None
    assert economy.held.any()
    for second in np.flatnonzero(economy.held).tolist():
        np.testing.assert_array_equal(economy.rows[second], economy.rows[second - 1])
    again = cache.get(path, "economy")
    assert again.held is not None
    np.testing.assert_array_equal(again.held, economy.held)
    assert cache.get(path).held is None


def test_another_encoder_or_another_content_is_encoded_again(tmp_path: Path) -> None:
    path = media.write_film(tmp_path / "film.mp4", 3, 4)
    RecordingCache(GridEncoder("grid/1"), tmp_path / "cache").get(path)
    other = GridEncoder("grid/2")
    RecordingCache(other, tmp_path / "cache").get(path)
    assert other.n_pictures == 4
    media.write_film(path, 4, 5)
    assert len(RecordingCache(other, tmp_path / "cache").get(path).rows) == 5
    assert other.n_pictures == 9


def test_a_missing_second_is_a_row_of_zeros(tmp_path: Path) -> None:
    times = [n / 5 for n in range(40) if not 3.0 <= n / 5 < 5.0]
    path = media.write_clip(tmp_path / "gap.mp4", ((t, media.picture(3, t)) for t in times), fps=5)
    recording = RecordingCache(GridEncoder(), tmp_path).get(path)
    assert recording.seen.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert not recording.informative[3:5].any()
    assert recording.with_all_informative().informative.tolist() == recording.seen.tolist()


def test_black_is_seen_and_not_informative(tmp_path: Path) -> None:
    black = np.zeros((180, 320, 3), np.uint8)
    pictures = ((n / 5, black if n >= 10 else media.picture(3, n / 5)) for n in range(20))
    recording = RecordingCache(GridEncoder(), tmp_path).get(media.write_clip(tmp_path / "fade.mp4", pictures, fps=5))
    assert recording.informative.tolist() == [True, True, False, False]


def test_a_file_that_is_no_video_is_an_error_and_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_text("no video")
    with pytest.raises(MediaError):
        RecordingCache(GridEncoder(), tmp_path / "cache").get(tmp_path / "film.mp4")
    assert list((tmp_path / "cache").rglob("*.npz")) == []


def test_a_sequence_encoder_leaves_holes_as_they_are() -> None:
    torch.manual_seed(1)
    original = film("film", 30, 1)
    rows = original.rows.copy()
    rows[10:12] = 0
    encoded = apply_sequence_encoder(Recording("film", rows, np.any(rows != 0, axis=1)), SequenceEncoder().eval())
    assert not encoded.rows[10:12].any()
    np.testing.assert_allclose(np.linalg.norm(np.delete(encoded.rows, [10, 11], axis=0), axis=1), 1, atol=1e-5)
    assert np.abs(encoded.rows[0] - original.rows[0]).max() > 1e-3
