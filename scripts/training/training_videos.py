"""Training videos as small square pictures, four per second, decoded once and mapped from disk."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reference_db.store.disk import atomic_file

CACHE_SIDE = 208  # larger than the input of the network, so that crops have detail
CACHE_FPS = 4
GREY_SIDE = 16  # of the small grey picture by which two moments are compared
VIDEO_SUFFIXES = {".mp4", ".mkv", ".mov", ".webm", ".ts", ".avi", ".m4v"}
ALIKE = 0.985  # correlation of small grey pictures above which two moments look the same
FLAT = 8.0  # spread in grey levels below which a picture is not used


@dataclass(frozen=True, slots=True, eq=False)
class Films:
    """All pictures of all videos, one after the other, at about CACHE_FPS."""

    names: list[str]
    starts: NDArray[np.int64]  # [films + 1]
    pictures: NDArray[np.uint8]  # [n, side, side, 3], mapped from disk
    seconds: NDArray[np.float32]  # [n] time in the video
    greys: NDArray[np.float32]  # [n, 256] zero mean, unit length
    spread: NDArray[np.float32]  # [n] of luminance, in grey levels

    @property
    def film_of(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.names)), np.diff(self.starts))


def decode(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """(second, square picture) at about CACHE_FPS, by presentation time."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        first: float | None = None
        due = 0.0
        for frame in container.decode(stream):
            if frame.pts is None or frame.time_base is None:
                continue
            second = float(frame.pts * frame.time_base)
            first = second if first is None else first
            if second - first >= due:
                image = Image.fromarray(frame.to_ndarray(format="rgb24"))
                square = image.resize((CACHE_SIDE, CACHE_SIDE), Image.Resampling.BILINEAR)
                yield second - first, np.asarray(square, dtype=np.uint8)
                due = (math.floor((second - first) * CACHE_FPS + 1e-6) + 1) / CACHE_FPS


def load_films(folder: Path, cache: Path) -> Films:
    """The pictures of all videos of the folder, decoded once and then mapped from the cache."""
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in VIDEO_SUFFIXES)
    if not paths:
        raise SystemExit(f"no videos in {folder}")
    listing = json.dumps([[p.name, p.stat().st_size] for p in paths] + [CACHE_SIDE, CACHE_FPS])
    key = hashlib.sha256(listing.encode()).hexdigest()[:16]
    table, pixels = cache / f"{key}.npz", cache / f"{key}.pixels"
    if not table.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _decode_all(paths, table, pixels)
    with np.load(table) as columns:
        seconds = columns["seconds"]
        pictures = np.memmap(pixels, np.uint8, "r", shape=(len(seconds), CACHE_SIDE, CACHE_SIDE, 3))
        return Films(list(columns["names"]), columns["starts"], pictures, seconds, columns["greys"], columns["spread"])


def _decode_all(paths: list[Path], table: Path, pixels: Path) -> None:
    seconds: list[float] = []
    greys: list[NDArray[np.float32]] = []
    spread: list[float] = []
    names, starts = [], [0]
    with open(pixels, "wb") as out:
        for path in paths:
            for second, picture in decode(path):
                out.write(picture.tobytes())
                image = Image.fromarray(picture).convert("L")
                small = np.asarray(image.resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX), np.float32).ravel()
                seconds.append(second)
                spread.append(float(small.std()))
                small = small - small.mean()
                greys.append(small / max(float(np.linalg.norm(small)), 1e-6))
            names.append(path.name)
            starts.append(len(seconds))
    with atomic_file(table) as file:
        np.savez(
            file,
            names=np.array(names),
            starts=np.array(starts, np.int64),
            seconds=np.array(seconds, np.float32),
            greys=np.array(greys, np.float32),
            spread=np.array(spread, np.float32),
        )


def is_held_back(name: str, share: float) -> bool:
    """Whether a video is held back for measuring; decided by its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < share * 2**32


def resize_pictures(pictures: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The pictures resized to [n, side, side, 3]."""
    size = (side, side)
    return np.stack([np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BILINEAR)) for p in pictures])
