"""The feature table: every training video encoded once, clean and under many edits, so that training reads memory only.

Input: videos and an encoder. Output: one table of rows and, for each `EncodedClip` (one version of a section of a
video), the moments that its rows show. Clips are stored video by video in a folder named for the encoder and the plan,
so an interrupted build resumes where it stopped and rows of two encoders are never mixed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

from reference_db.features.encoder import Encoder, load_encoder
from reference_db.media.frames import PICTURE_SHORT_SIDE
from reference_db.store.disk import atomic_file
from reference_db.store.references import FEATURE_SIZE
from training.edits import draw_edit, draw_inside

Picture = NDArray[np.uint8]  # [h, w, 3] RGB

CLEAN, EDITED = 0, 1
NO_PICTURE = -1  # row index of the last row of the table, which is zero
BATCH = 32  # pictures per call of the encoder


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """What is encoded of each video: with the defaults, 2 clean and 2.5 edited pictures per second of video."""

    raw_fps: int = 4  # a clip may begin at any of these moments
    fps: int = 2  # of a clip, as the paper samples raw video
    window_s: float = 60.0  # longest edited clip
    coverage: float = 1.25  # edited seconds per second of a long video
    min_clips: int = 5  # edited clips of a short video
    inside: float = 0.0  # share of edited clips inside another moving picture: insets, split and filmed screens
    seed: int = 0

    def n_clips(self, duration_s: float) -> int:
        return max(self.min_clips, round(self.coverage * duration_s / self.window_s))


@dataclass(frozen=True, slots=True, eq=False)
class EncodedClip:
    """One version of a section of a video: row `first_row + k` of the table shows the moment `times_s[k]`."""

    video: str
    kind: int  # CLEAN or EDITED
    first_row: int
    times_s: NDArray[np.float64]  # increasing, evenly spaced

    @property
    def start_s(self) -> float:
        return float(self.times_s[0])

    @property
    def end_s(self) -> float:
        return float(self.times_s[-1])

    def rows_at(self, moments_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """The rows whose pictures are nearest to the moments; NO_PICTURE outside the clip."""
        step_s = (self.end_s - self.start_s) / max(1, len(self.times_s) - 1) or 1.0
        k = np.rint((moments_s - self.start_s) / step_s)
        rows: NDArray[np.int64] = np.where((k >= 0) & (k < len(self.times_s)), k + self.first_row, NO_PICTURE).astype(
            np.int64
        )
        return rows

    def moments_of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The moments that these rows of the clip show; NaN for NO_PICTURE."""
        inside = np.clip(rows - self.first_row, 0, len(self.times_s) - 1)
        return np.where(rows == NO_PICTURE, np.nan, self.times_s[inside])


class FeatureTable:
    """The rows of all clips, and the clips of each video."""

    def __init__(self, encoder_id: str, rows: NDArray[np.float32], clips: Sequence[EncodedClip]) -> None:
        if rows.ndim != 2 or rows[-1].any():
            raise ValueError(f"rows must be [n + 1, size] and end with a zero row, got shape {rows.shape}")
        self.encoder_id = encoder_id
        self.rows = rows  # [n + 1, 512]; the last row is zero: NO_PICTURE
        self.clips = tuple(clips)
        self.videos = tuple(sorted({clip.video for clip in clips}))
        self._by_video: dict[tuple[str, int], tuple[EncodedClip, ...]] = {}
        for clip in clips:
            key = clip.video, clip.kind
            self._by_video[key] = (*self._by_video.get(key, ()), clip)
        # Drawn by the root of the length: a video four times as long is not four times as varied.
        weight = np.cumsum([np.sqrt(self.clips_of(video, CLEAN)[0].end_s) for video in self.videos])
        self._cumulated = weight / weight[-1]

    def clips_of(self, video: str, kind: int) -> tuple[EncodedClip, ...]:
        """The clips of one kind of a video; exactly one is CLEAN and spans the full video."""
        return self._by_video.get((video, kind), ())

    def draw_video(self, rng: np.random.Generator) -> str:
        return self.videos[int(np.searchsorted(self._cumulated, rng.random(), side="right"))]

    def restrict(self, videos: Sequence[str]) -> FeatureTable:
        """The same rows with the clips of these videos only."""
        chosen = set(videos)
        return FeatureTable(self.encoder_id, self.rows, [clip for clip in self.clips if clip.video in chosen])


def table_of(
    encoder_id: str, parts: Sequence[tuple[str, int, NDArray[np.float64], NDArray[np.float32]]]
) -> FeatureTable:
    """The table of (video, kind, times, rows) parts, in their order."""
    clips, first = [], 0
    for video, kind, times_s, rows in parts:
        clips.append(EncodedClip(video, kind, first, times_s))
        first += len(rows)
    table = np.zeros((first + 1, parts[0][3].shape[1]), np.float32)
    for clip, (_, _, _, rows) in zip(clips, parts, strict=True):
        table[clip.first_row : clip.first_row + len(rows)] = rows
    return FeatureTable(encoder_id, table, clips)


def build_table(
    videos: Sequence[Path],
    cache: Path,
    encoder: Path | None = None,
    plan: EncodingPlan | None = None,
    *,
    n_processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureTable:
    """The table of the videos; encodes those that are not in the cache. progress gets (videos done, all videos)."""
    plan = plan or EncodingPlan()
    encoder_id = load_encoder(encoder).encoder_id
    folder = cache / f"{encoder_id}-{_short_hash(plan)}".replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    files = {path: folder / f"{path.stem}.npz" for path in videos}
    missing = [path for path, file in files.items() if not file.exists()]
    missing.sort(key=lambda path: -path.stat().st_size)  # the longest first
    done = len(files) - len(missing)
    if progress:
        progress(done, len(files))
    context = multiprocessing.get_context("spawn")  # torch and FFmpeg fail after a fork
    with ProcessPoolExecutor(n_processes, context, _start_worker, (encoder, plan)) as pool:
        behind = [_video_behind(path, videos) for path in missing]
        for _ in pool.map(_encode_video, missing, behind, [files[path] for path in missing]) if missing else ():
            done += 1
            if progress:
                progress(done, len(files))
    parts = []
    for file in files.values():
        parts += _read_clips(file)
    return table_of(encoder_id, parts)


def raw_pictures(path: Path, fps: int) -> Iterator[Picture]:
    """For each moment k/fps of a video the first picture at or after it, scaled as `Frame` pictures are."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        start: float | None = None
        k = 0
        for frame in container.decode(stream):
            if frame.time is None:
                continue
            start = frame.time if start is None else start
            if frame.time - start < k / fps - 1e-6:
                continue
            short = min(frame.width, frame.height)
            width, height = (round(side * PICTURE_SHORT_SIDE / short) for side in (frame.width, frame.height))
            small = frame.reformat(width, height, "rgb24", interpolation=Interpolation.AREA)
            picture = small.to_ndarray().astype(np.uint8, copy=False)
            while frame.time - start >= k / fps - 1e-6:
                yield picture
                k += 1


_worker_state: tuple[Encoder, EncodingPlan] | None = None  # in a process of the pool: the encoder is loaded once


def _start_worker(encoder: Path | None, plan: EncodingPlan) -> None:
    global _worker_state
    os.nice(10)  # the table is built beside other work
    _worker_state = load_encoder(encoder), plan


def _video_behind(path: Path, videos: Sequence[Path]) -> Path:
    """The video that is shown behind and beside clips of this one: another, chosen by the name."""
    others = [other for other in videos if other != path]
    return others[int(_short_hash(path.stem), 16) % len(others)] if others else path


def _encode_video(path: Path, behind: Path, out: Path) -> None:
    """Encodes all clips of one video and writes them to one file."""
    assert _worker_state is not None
    encoder, plan = _worker_state
    rng = np.random.default_rng([plan.seed, int(_short_hash(path.stem), 16)])
    clips = _encode_clips(path, behind, encoder, plan, rng)
    arrays: dict[str, NDArray[np.generic]] = {}
    for k, (kind, times_s, rows) in enumerate(clips):
        arrays |= {f"kind{k}": np.array(kind), f"times{k}": times_s, f"rows{k}": rows.astype(np.float16)}
    with atomic_file(out) as file:
        np.savez(file, allow_pickle=False, **arrays)


def _encode_clips(
    path: Path, behind: Path, encoder: Encoder, plan: EncodingPlan, rng: np.random.Generator
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float32]]]:
    """The clean clip of the full video and its edited clips, each under one edit."""
    pictures = list(raw_pictures(path, plan.raw_fps))
    stride = plan.raw_fps // plan.fps
    yield CLEAN, _moments(len(pictures), 0, stride, plan), _encode(encoder, pictures[::stride])
    n_window = min(len(pictures), round(plan.window_s * plan.raw_fps))
    moving = list(islice(raw_pictures(behind, plan.raw_fps), n_window)) if plan.inside else []
    for _ in range(plan.n_clips(len(pictures) / plan.raw_fps)):
        first = int(rng.integers(0, len(pictures) - n_window + 1))
        phase = int(rng.integers(0, stride))
        backdrop = pictures[rng.integers(0, len(pictures))]
        chosen = range(min(first + phase, len(pictures) - 1), first + n_window, stride)
        shown = [pictures[k] for k in chosen]
        if rng.random() < plan.inside:
            edited = edit_inside(shown, moving[::stride], rng)
        else:
            edit = draw_edit(rng, rng.uniform(0.15, 1.0), backdrop)
            edited = (edit(picture, rng) for picture in shown)
        yield EDITED, _moments(chosen.stop, chosen.start, stride, plan), _encode(encoder, edited)


def edit_inside(pictures: Sequence[Picture], behind: Sequence[Picture], rng: np.random.Generator) -> Iterator[Picture]:
    """The pictures in one layout inside another clip, which runs behind them and repeats if it is shorter."""
    strength, seed = rng.uniform(0.15, 1.0), rng.integers(2**32)
    for k, picture in enumerate(pictures):
        # Drawn from one seed, all edits are the same but for the picture behind.
        edit = draw_inside(np.random.default_rng(seed), strength, behind[k % len(behind)])
        yield edit(picture, rng)


def _moments(stop: int, start: int, stride: int, plan: EncodingPlan) -> NDArray[np.float64]:
    return np.arange(start, stop, stride, dtype=np.float64) / plan.raw_fps


def _encode(encoder: Encoder, pictures: Sequence[Picture] | Iterator[Picture]) -> NDArray[np.float32]:
    rows: list[NDArray[np.float32]] = []
    batch: list[Picture] = []
    for picture in pictures:
        batch.append(picture)
        if len(batch) == BATCH:
            rows.append(encoder.encode(batch))
            batch = []
    if batch:
        rows.append(encoder.encode(batch))
    return np.concatenate(rows) if rows else np.empty((0, FEATURE_SIZE), np.float32)


def _read_clips(path: Path) -> list[tuple[str, int, NDArray[np.float64], NDArray[np.float32]]]:
    with np.load(path, allow_pickle=False) as file:
        n_clips = sum(name.startswith("kind") for name in file.files)
        return [
            (path.stem, int(file[f"kind{k}"]), file[f"times{k}"], file[f"rows{k}"].astype(np.float32))
            for k in range(n_clips)
            if len(file[f"rows{k}"]) > 0
        ]


def _short_hash(value: EncodingPlan | str) -> str:
    text = value if isinstance(value, str) else json.dumps(asdict(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
