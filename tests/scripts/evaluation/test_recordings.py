"""Recordings: encoded once, known by content and encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evaluation.recordings import Recording, RecordingShelf, sequenced
from reference_db.errors import MediaError
from tests.support import media
from tests.support.planted_features import film
from training.sequence_encoder import SequenceEncoder

torch.set_num_threads(1)


class GridEncoder:
    """Sixteen by ten cells of colour: an encoder that needs no training, and counts its pictures."""

    def __init__(self, encoder_id: str = "grid/1") -> None:
        self.encoder_id = encoder_id
        self.n_pictures = 0

    def encode(self, pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        self.n_pictures += len(pictures)
        rows = np.zeros((len(pictures), 512), np.float32)
        for row, picture in zip(rows, pictures, strict=True):
            height, width = picture.shape[:2]
            cells = picture[: height // 10 * 10, : width // 16 * 16].reshape(10, height // 10, 16, width // 16, 3)
            levels = cells.mean(axis=(1, 3)).ravel()
            row[:480] = (levels - levels.mean()) / max(1e-6, float(np.linalg.norm(levels - levels.mean())))
        return rows


def test_a_file_is_encoded_once_and_named_by_its_stem(tmp_path: Path) -> None:
    path = media.write_film(tmp_path / "film.mp4", 3, 6)
    encoder = GridEncoder()
    first = RecordingShelf(encoder, tmp_path / "cache").get(path)
    assert (first.name, first.rows.shape, encoder.n_pictures) == ("film", (6, 512), 6)
    moved = path.rename(tmp_path / "moved.mp4")
    again = RecordingShelf(encoder, tmp_path / "cache").get(moved)
    assert (again.name, encoder.n_pictures) == ("moved", 6)
    np.testing.assert_array_equal(again.rows, first.rows)
    np.testing.assert_array_equal(again.informative, first.informative)


def test_economy_shows_key_pictures_again_and_is_kept_apart(tmp_path: Path) -> None:
    path = media.write_film(tmp_path / "film.mp4", 3, 6)
    shelf = RecordingShelf(GridEncoder(), tmp_path / "cache")
    exact, economy = shelf.get(path), shelf.get(path, "economy")
    assert exact.held is None
    assert economy.held is not None
    assert economy.held.any()
    for second in np.flatnonzero(economy.held).tolist():
        np.testing.assert_array_equal(economy.rows[second], economy.rows[second - 1])
    again = shelf.get(path, "economy")
    assert again.held is not None
    np.testing.assert_array_equal(again.held, economy.held)
    assert shelf.get(path).held is None


def test_another_encoder_or_another_content_is_encoded_anew(tmp_path: Path) -> None:
    path = media.write_film(tmp_path / "film.mp4", 3, 4)
    RecordingShelf(GridEncoder("grid/1"), tmp_path / "cache").get(path)
    other = GridEncoder("grid/2")
    RecordingShelf(other, tmp_path / "cache").get(path)
    assert other.n_pictures == 4
    media.write_film(path, 4, 5)
    assert len(RecordingShelf(other, tmp_path / "cache").get(path).rows) == 5
    assert other.n_pictures == 9


def test_a_second_that_was_not_seen_is_a_row_of_zeros(tmp_path: Path) -> None:
    times = [n / 5 for n in range(40) if not 3.0 <= n / 5 < 5.0]
    path = media.write_clip(tmp_path / "gap.mp4", ((t, media.picture(3, t)) for t in times), fps=5)
    recording = RecordingShelf(GridEncoder(), tmp_path).get(path)
    assert recording.seen.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert not recording.informative[3:5].any()
    assert recording.with_all_informative().informative.tolist() == recording.seen.tolist()


def test_black_is_seen_and_not_informative(tmp_path: Path) -> None:
    black = np.zeros((180, 320, 3), np.uint8)
    shown = ((n / 5, black if n >= 10 else media.picture(3, n / 5)) for n in range(20))
    recording = RecordingShelf(GridEncoder(), tmp_path).get(media.write_clip(tmp_path / "fade.mp4", shown, fps=5))
    assert recording.informative.tolist() == [True, True, False, False]


def test_a_file_that_is_no_video_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_text("no video")
    with pytest.raises(MediaError):
        RecordingShelf(GridEncoder(), tmp_path / "cache").get(tmp_path / "film.mp4")
    assert list((tmp_path / "cache").rglob("*.npz")) == []


def test_a_sequenced_recording_keeps_its_holes() -> None:
    torch.manual_seed(1)
    whole = film("film", 30, 1)
    rows = whole.rows.copy()
    rows[10:12] = 0
    seen = sequenced(Recording("film", rows, np.any(rows != 0, axis=1)), SequenceEncoder().eval())
    assert not seen.rows[10:12].any()
    np.testing.assert_allclose(np.linalg.norm(np.delete(seen.rows, [10, 11], axis=0), axis=1), 1, atol=1e-5)
    assert np.abs(seen.rows[0] - whole.rows[0]).max() > 1e-3
