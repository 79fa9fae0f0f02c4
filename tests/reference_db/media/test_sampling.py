"""Sampling whole files: one upright picture of the right second, in every mode, against known pictures."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from reference_db.media.decoding import decode_file, probe
from reference_db.media.frames import Frame
from tests.support.media import number_of, picture, turn_mp4, write_clip, write_film, write_numbered


def numbered(frames: list[Frame]) -> list[tuple[int, int]]:
    return [(frame.second, number_of(frame.picture)) for frame in frames]


@pytest.mark.parametrize(
    ("name", "codec", "b_frames"),
    [
        ("a.mp4", "libx264", 2),  # decoded in another order than shown
        ("a.mkv", "libx264", 3),
        ("a.ts", "libx264", 2),
        ("a.flv", "libx264", 0),
        ("a.avi", "mpeg4", 0),
        ("a.webm", "libvpx", 0),
        ("a.mov", "mjpeg", 0),
    ],
)
def test_a_file_is_sampled_at_the_middle_of_each_second(tmp_path: Path, name: str, codec: str, b_frames: int) -> None:
    path = write_numbered(tmp_path / name, [n / 10 for n in range(43)], codec=codec, b_frames=b_frames)
    frames = list(decode_file(path))
    assert numbered(frames) == [(0, 5), (1, 15), (2, 25), (3, 35), (4, 42)]
    assert [frame.pts_s for frame in frames] == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.2])
    assert not any(frame.held for frame in frames)


def test_time_starts_at_the_first_picture(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "late.ts", [7.3 + n / 10 for n in range(25)])
    assert numbered(list(decode_file(path))) == [(0, 5), (1, 15), (2, 24)]


def test_changing_frame_rates_and_holes(tmp_path: Path) -> None:
    #        0.0 .1 .2 .3 | 1.9 | 2.45 2.49 | hole 3 4 | 5.5 5.6 | 6.0
    stamps = [0.0, 0.1, 0.2, 0.3, 1.9, 2.45, 2.49, 5.5, 5.6, 6.0]
    path = write_numbered(tmp_path / "vfr.mkv", stamps)
    assert numbered(list(decode_file(path))) == [(0, 3), (1, 4), (2, 6), (5, 7), (6, 9)]


@pytest.mark.parametrize(
    ("width", "height", "shape"),
    [(320, 180, (192, 341, 3)), (180, 320, (341, 192, 3)), (333, 187, (192, 343, 3)), (98, 50, (192, 376, 3))],
)
def test_the_short_side_is_192_whatever_the_size(
    tmp_path: Path, width: int, height: int, shape: tuple[int, int, int]
) -> None:
    path = write_film(tmp_path / "sized.mkv", 1, 1, width=width, height=height)
    frame = next(decode_file(path))
    assert frame.picture.shape == shape
    assert not frame.picture.flags.writeable


def test_oblong_pixels_become_square(tmp_path: Path) -> None:
    clip = [(n / 5, picture(1, n / 5, 180, 180)) for n in range(5)]
    path = write_clip(tmp_path / "oblong.mp4", clip, pixel_aspect=Fraction(16, 9))
    assert next(decode_file(path)).picture.shape == (192, 341, 3)


@pytest.mark.parametrize("quarter_turns", [0, 1, 2, 3])
def test_rotated_pictures_become_upright(tmp_path: Path, quarter_turns: int) -> None:
    pixels = np.zeros((96, 160, 3), np.uint8)
    pixels[:48, :80] = 255  # white at the top left
    path = write_clip(tmp_path / "turned.mp4", [(n / 5, pixels) for n in range(5)])
    turn_mp4(path, quarter_turns)
    upright = next(decode_file(path)).picture
    height, width = upright.shape[:2]
    quarters = [upright[height // 4 * y, width // 4 * x].mean() > 128 for y, x in [(1, 1), (1, 3), (3, 3), (3, 1)]]
    assert quarters == [corner == quarter_turns for corner in range(4)]  # clockwise from top left


def test_the_picture_is_the_original_one(tmp_path: Path) -> None:
    path = write_film(tmp_path / "film.mp4", seed=3, seconds=3, fps=10)
    for frame in decode_file(path):
        original = picture(3, frame.pts_s, frame.picture.shape[1], frame.picture.shape[0])
        assert np.abs(frame.picture.astype(int) - original).mean() < 8


def test_economy_holds_key_pictures_on_the_grid(tmp_path: Path) -> None:
    # keys at 0.0, 1.5, 3.0, 4.5, ...
    path = write_numbered(tmp_path / "gop.ts", [n / 10 for n in range(58)], gop=15)
    frames = list(decode_file(path, mode="economy"))
    assert numbered(frames) == [(0, 0), (1, 15), (2, 15), (3, 30), (4, 45), (5, 45)]
    assert [frame.held for frame in frames] == [False, False, True, False, False, True]
    assert [frame.age_s for frame in frames] == [0.5, 0.0, 1.0, 0.5, 0.0, 1.0]


def test_auto_is_exact_if_key_pictures_are_rare(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "rare.mp4", [n / 10 for n in range(160)], gop=30)
    assert numbered(list(decode_file(path, mode="auto"))) == numbered(list(decode_file(path)))


def test_auto_switches_to_key_pictures_and_back(tmp_path: Path) -> None:
    # a key every second up to 15 s, then one every 4 s
    often = write_numbered(tmp_path / "often.ts", [n / 10 for n in range(150)], gop=10, b_frames=0)
    rare = write_numbered(tmp_path / "rare.ts", [15 + n / 10 for n in range(120)], gop=40, b_frames=0)
    path = tmp_path / "both.ts"
    path.write_bytes(often.read_bytes() + rare.read_bytes())
    frames = list(decode_file(path, mode="auto"))
    assert [frame.second for frame in frames] == list(range(27))
    numbers = [number_of(frame.picture) for frame in frames]
    assert numbers[:10] == list(range(5, 105, 10))  # exact until the keys are trusted
    assert numbers[10:15] == list(range(100, 150, 10))  # keys only
    assert numbers[15:19] == [0] * 4  # held, until the next key shows that they have become rare
    assert numbers[19:] == list(range(45, 125, 10))  # exact again
    assert [frame.second for frame in frames if frame.held] == [16, 17, 18]
    assert [frame.age_s for frame in frames] == [0.0] * 10 + [0.5] * 6 + [1.5, 2.5, 3.5] + [0.0] * 8


def test_a_file_whose_clock_restarts_continues(tmp_path: Path) -> None:
    first = write_numbered(tmp_path / "first.ts", [n / 10 for n in range(200)])
    second = write_numbered(tmp_path / "second.ts", [n / 10 for n in range(30)])
    both = tmp_path / "both.ts"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    seconds = [frame.second for frame in decode_file(both)]
    assert seconds == sorted(set(seconds))
    assert seconds[-1] == 22


def test_probe_reads_the_video_s_metadata(tmp_path: Path) -> None:
    path = write_film(tmp_path / "film.mp4", seed=1, seconds=4, fps=5)
    info = probe(path)
    assert (info.width, info.height, info.codec, info.fps, info.duration_s) == (320, 180, "h264", 5.0, 4.0)
