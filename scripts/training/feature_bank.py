"""The feature bank: every training video encoded once, clean and under many edits, so that training draws from memory.

In go videos and an encoder; out comes one table of rows and, for each `Take` (one version of one stretch of a video),
the moments its rows show. Takes are stored video by video in a directory named for the encoder and the plan, so that
an interrupted build goes on where it stopped and another encoder's rows are never mixed in.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

from reference_db.features.encoder import Encoder, load_encoder
from reference_db.media.frames import PICTURE_SHORT_SIDE
from reference_db.store.disk import atomic_file
from reference_db.store.references import FEATURE_SIZE
from training.edits import draw_edit

Picture = NDArray[np.uint8]  # [h, w, 3] RGB

CLEAN, EDITED = 0, 1
NOTHING = -1  # a row index that stands for no picture: all zeros
BATCH = 32  # pictures encoded at once


@dataclass(frozen=True, slots=True)
class BankPlan:
    """What is encoded of each video; its cost is pictures: about 2 * clean + 2 * coverage a second of video."""

    raw_fps: int = 4  # moments that takes may begin at
    fps: int = 2  # pictures a second in a take, as the paper samples raw video
    window_s: float = 60.0  # an edited take is no longer
    coverage: float = 1.25  # edited seconds for each second of a long video
    least_takes: int = 5  # edited takes even of a short one
    seed: int = 0

    def n_takes(self, duration_s: float) -> int:
        return max(self.least_takes, round(self.coverage * duration_s / self.window_s))


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """One version of one stretch of a video: row `first_row + k` of the bank shows the moment `times_s[k]`."""

    video: str
    kind: int  # CLEAN or EDITED
    first_row: int
    times_s: NDArray[np.float64]  # rising, evenly spaced

    @property
    def start_s(self) -> float:
        return float(self.times_s[0])

    @property
    def end_s(self) -> float:
        return float(self.times_s[-1])

    def rows_at(self, moments_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """The bank rows whose pictures are nearest to the moments; NOTHING where the take does not reach."""
        step_s = (self.end_s - self.start_s) / max(1, len(self.times_s) - 1) or 1.0
        k = np.rint((moments_s - self.start_s) / step_s)
        rows: NDArray[np.int64] = np.where((k >= 0) & (k < len(self.times_s)), k + self.first_row, NOTHING).astype(
            np.int64
        )
        return rows

    def shown_s(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The moments that rows of this take show; NaN for NOTHING."""
        inside = np.clip(rows - self.first_row, 0, len(self.times_s) - 1)
        return np.where(rows == NOTHING, np.nan, self.times_s[inside])


class FeatureBank:
    """Rows of all takes, and the takes of each video."""

    def __init__(self, encoder_id: str, rows: NDArray[np.float32], takes: Sequence[Take]) -> None:
        if rows.ndim != 2 or rows[-1].any():
            raise ValueError(f"rows must be [n + 1, size] and end with a zero row, got shape {rows.shape}")
        self.encoder_id = encoder_id
        self.rows = rows  # [n + 1, 512]; the last row is zero, so that NOTHING indexes it
        self.takes = tuple(takes)
        self.videos = tuple(sorted({take.video for take in takes}))
        self._of: dict[tuple[str, int], tuple[Take, ...]] = {}
        for take in takes:
            key = take.video, take.kind
            self._of[key] = (*self._of.get(key, ()), take)
        # The longer the likelier, by the root: a film four times as long is not four times as varied.
        weight = np.cumsum([np.sqrt(self.of(video, CLEAN)[0].end_s) for video in self.videos])
        self._up_to = weight / weight[-1]

    def of(self, video: str, kind: int) -> tuple[Take, ...]:
        """The takes of one kind of a video; exactly one is CLEAN, the whole of it."""
        return self._of.get((video, kind), ())

    def draw_video(self, rng: np.random.Generator) -> str:
        return self.videos[int(np.searchsorted(self._up_to, rng.random(), side="right"))]

    def only(self, videos: Sequence[str]) -> FeatureBank:
        """The same rows with the takes of some videos."""
        kept = set(videos)
        return FeatureBank(self.encoder_id, self.rows, [take for take in self.takes if take.video in kept])


def bank_of(encoder_id: str, parts: Sequence[tuple[str, int, NDArray[np.float64], NDArray[np.float32]]]) -> FeatureBank:
    """The bank of (video, kind, times, rows) parts, in their order."""
    takes, first = [], 0
    for video, kind, times_s, rows in parts:
        takes.append(Take(video, kind, first, times_s))
        first += len(rows)
    table = np.zeros((first + 1, parts[0][3].shape[1]), np.float32)
    for take, (_, _, _, rows) in zip(takes, parts, strict=True):
        table[take.first_row : take.first_row + len(rows)] = rows
    return FeatureBank(encoder_id, table, takes)


def build_bank(
    videos: Sequence[Path],
    cache: Path,
    encoder: Path | None = None,
    plan: BankPlan | None = None,
    *,
    n_processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureBank:
    """The bank of the videos, encoding only those that the cache has not; progress gets (videos done, of all)."""
    plan = plan or BankPlan()
    encoder_id = load_encoder(encoder).encoder_id
    home = cache / f"{encoder_id}-{_short_hash(plan)}".replace("/", "_")
    home.mkdir(parents=True, exist_ok=True)
    stored = {path: home / f"{path.stem}.npz" for path in videos}
    missing = [path for path, at in stored.items() if not at.exists()]
    missing.sort(key=lambda path: -path.stat().st_size)  # the longest first
    done = len(stored) - len(missing)
    if progress:
        progress(done, len(stored))
    context = multiprocessing.get_context("spawn")  # torch and FFmpeg do not survive a fork
    with ProcessPoolExecutor(n_processes, context, _start_worker, (encoder, plan)) as pool:
        for _ in pool.map(_store, missing, [stored[path] for path in missing]) if missing else ():
            done += 1
            if progress:
                progress(done, len(stored))
    parts = []
    for at in stored.values():
        parts += _read(at)
    return bank_of(encoder_id, parts)


def raw_pictures(path: Path, fps: int) -> Iterator[Picture]:
    """For each moment k/fps of a video the first picture at or after it, scaled as frames are."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        begin: float | None = None
        k = 0
        for frame in container.decode(stream):
            if frame.time is None:
                continue
            begin = frame.time if begin is None else begin
            if frame.time - begin < k / fps - 1e-6:
                continue
            short = min(frame.width, frame.height)
            width, height = (round(side * PICTURE_SHORT_SIDE / short) for side in (frame.width, frame.height))
            small = frame.reformat(width, height, "rgb24", interpolation=Interpolation.AREA)
            picture = small.to_ndarray().astype(np.uint8, copy=False)
            while frame.time - begin >= k / fps - 1e-6:
                yield picture
                k += 1


_worker: tuple[Encoder, BankPlan] | None = None  # of a pool's process: loading the encoder once is enough


def _start_worker(encoder: Path | None, plan: BankPlan) -> None:
    global _worker
    os.nice(10)  # a bank is built beside other work
    _worker = load_encoder(encoder), plan


def _store(path: Path, at: Path) -> None:
    """Encodes all takes of one video and writes them, all or none."""
    assert _worker is not None
    encoder, plan = _worker
    rng = np.random.default_rng([plan.seed, int(_short_hash(path.stem), 16)])
    takes = _takes(path, encoder, plan, rng)
    arrays: dict[str, NDArray[np.generic]] = {}
    for k, (kind, times_s, rows) in enumerate(takes):
        arrays |= {f"kind{k}": np.array(kind), f"times{k}": times_s, f"rows{k}": rows.astype(np.float16)}
    with atomic_file(at) as file:
        np.savez(file, allow_pickle=False, **arrays)


def _takes(
    path: Path, encoder: Encoder, plan: BankPlan, rng: np.random.Generator
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float32]]]:
    """The clean take of a whole video and its edited takes, each under one edit from end to end."""
    pictures = list(raw_pictures(path, plan.raw_fps))
    stride = plan.raw_fps // plan.fps
    yield CLEAN, _grid(len(pictures), 0, stride, plan), _encode(encoder, pictures[::stride])
    n_window = min(len(pictures), round(plan.window_s * plan.raw_fps))
    for _ in range(plan.n_takes(len(pictures) / plan.raw_fps)):
        first = int(rng.integers(0, len(pictures) - n_window + 1))
        phase = int(rng.integers(0, stride))
        backdrop = pictures[rng.integers(0, len(pictures))]
        edit = draw_edit(rng, rng.uniform(0.15, 1.0), backdrop)
        chosen = range(min(first + phase, len(pictures) - 1), first + n_window, stride)
        rows = _encode(encoder, (edit(pictures[k], rng) for k in chosen))
        yield EDITED, _grid(chosen.stop, chosen.start, stride, plan), rows


def _grid(stop: int, start: int, stride: int, plan: BankPlan) -> NDArray[np.float64]:
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


def _read(at: Path) -> list[tuple[str, int, NDArray[np.float64], NDArray[np.float32]]]:
    with np.load(at, allow_pickle=False) as file:
        n_takes = sum(name.startswith("kind") for name in file.files)
        return [
            (at.stem, int(file[f"kind{k}"]), file[f"times{k}"], file[f"rows{k}"].astype(np.float32))
            for k in range(n_takes)
            if len(file[f"rows{k}"]) > 0
        ]


def _short_hash(value: BankPlan | str) -> str:
    text = value if isinstance(value, str) else json.dumps(asdict(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
