"""Training videos and stills as small square pictures, decoded once and mapped from disk.

A video gives four pictures per second; a still counts as a video of one picture. Several folders are joined without
copying their pictures.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
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
MANIFEST = "manifest.tsv"  # of a folder of stills: columns `file` and `group` among others
FLAT = 8.0  # spread in grey levels below which a picture is not used

Decoder = Callable[[Path], Iterator[tuple[float, NDArray[np.uint8]]]]  # a file -> (second, square picture), in order


class Pictures:
    """Arrays of pictures [n, side, side, 3], indexed as one by a number or an array of numbers."""

    def __init__(self, arrays: Sequence[NDArray[np.uint8]]) -> None:
        self.arrays = tuple(arrays)
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int | np.integer | NDArray[np.integer]) -> NDArray[np.uint8]:
        if isinstance(index, np.ndarray):
            return np.stack([self[i] for i in index])
        if not 0 <= index < len(self):
            raise IndexError(f"picture {index} of {len(self)}")
        part = int(np.searchsorted(self._ends, index, side="right"))
        return np.asarray(self.arrays[part][index - self._ends[part]])


@dataclass(frozen=True, slots=True, eq=False)
class Films:
    """All pictures of all videos, one after the other, at about CACHE_FPS."""

    names: list[str]
    groups: list[str]  # [films]; different films of one group may show the same thing
    starts: NDArray[np.int64]  # [films + 1]
    pictures: Pictures  # mapped from disk
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


def still(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """(0, square picture) of an image file."""
    with Image.open(path) as image:
        square = image.convert("RGB").resize((CACHE_SIDE, CACHE_SIDE), Image.Resampling.BILINEAR)
    yield 0.0, np.asarray(square, dtype=np.uint8)


def load_films(folder: Path, cache: Path) -> Films:
    """The pictures of all videos of the folder, decoded once and then mapped from the cache."""
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in VIDEO_SUFFIXES)
    if not paths:
        raise SystemExit(f"no videos in {folder}")
    return _load(paths, [_video_group(path) for path in paths], decode, cache)


def load_stills(folder: Path, cache: Path) -> Films:
    """The stills that the folder's MANIFEST lists, each as a film of one picture, mapped from the cache."""
    try:
        with open(folder / MANIFEST, newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
    except FileNotFoundError:
        raise SystemExit(f"no {MANIFEST} in {folder}") from None
    return _load([folder / row["file"] for row in rows], [row["group"] for row in rows], still, cache)


def join_films(parts: Sequence[Films]) -> Films:
    """The films of all parts, one part after the other; pictures are not copied."""
    offsets = np.cumsum([0, *(len(part.pictures) for part in parts)])
    starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
    return Films(
        [name for part in parts for name in part.names],
        [group for part in parts for group in part.groups],
        np.concatenate([*starts, offsets[-1:]]),
        Pictures([array for part in parts for array in part.pictures.arrays]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.greys for part in parts]),
        np.concatenate([part.spread for part in parts]),
    )


def _video_group(path: Path) -> str:
    """The name without a number at its end: films of one series may show the same scene."""
    return re.sub(r"_\d+$", "", path.stem)


def _load(paths: list[Path], groups: list[str], decoder: Decoder, cache: Path) -> Films:
    listing = json.dumps([[p.name, p.stat().st_size] for p in paths] + [CACHE_SIDE, CACHE_FPS])
    key = hashlib.sha256(listing.encode()).hexdigest()[:16]
    table, pixels = cache / f"{key}.npz", cache / f"{key}.pixels"
    if not table.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _decode_all(paths, decoder, table, pixels)
    with np.load(table) as columns:
        seconds = columns["seconds"]
        pictures = np.memmap(pixels, np.uint8, "r", shape=(len(seconds), CACHE_SIDE, CACHE_SIDE, 3))
        return Films(
            list(columns["names"]),
            groups,
            columns["starts"],
            Pictures([pictures]),
            seconds,
            columns["greys"],
            columns["spread"],
        )


def _decode_all(paths: list[Path], decoder: Decoder, table: Path, pixels: Path) -> None:
    seconds: list[float] = []
    greys: list[NDArray[np.float32]] = []
    spread: list[float] = []
    names, starts = [], [0]
    with open(pixels, "wb") as out:
        for path in paths:
            for second, picture in decoder(path):
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
