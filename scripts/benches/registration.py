"""Registration of a video against bare decoding and encoding of the same file, alternating in one run.

Bare is the decoding child and the encoder in batches, and nothing else. Registration also hashes the file, creates
thumbnails, checks the features and commits them to a library. A speed ratio of 1 means that this costs nothing.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch

from reference_db.features.encoder import Encoder, load_encoder
from reference_db.media.decoding import DecodingChild
from reference_db.registration import BATCH, register
from reference_db.store.catalog import Catalog

Figures: TypeAlias = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("video", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")


def run(args: argparse.Namespace) -> Figures:
    """Total wall and CPU seconds of both sides, and the length of the video."""
    torch.set_num_threads(1)
    encoder = load_encoder()
    n_seconds = _bare(args.video, encoder)  # warm-up
    bare, ours = [0.0, 0.0], [0.0, 0.0]
    for _ in range(args.rounds):
        _add_time(bare, lambda: _bare(args.video, encoder))
        _add_time(ours, lambda: _register(args.video, encoder))
    return {
        "video": args.video.name,
        "video_s": n_seconds,
        "rounds": args.rounds,
        "bare_s": bare[0],
        "ours_s": ours[0],
        "bare_cpu_s": bare[1],
        "ours_cpu_s": ours[1],
        "speed_ratio": bare[0] / ours[0],
        "cpu_speed_ratio": bare[1] / ours[1],
    }


def lines(figures: Figures) -> list[str]:
    """The figures as a table."""
    length = figures["video_s"] * figures["rounds"]
    out = [f"{figures['video']}, {figures['video_s']} s, {figures['rounds']} rounds each"]
    for name in ("bare", "ours"):
        wall, cpu = figures[f"{name}_s"], figures[f"{name}_cpu_s"]
        out.append(
            f"  {name}   {length / wall:6.1f} x real time   {1000 * cpu / length:6.1f} ms of CPU per second of video"
        )
    ratio, cpu_ratio = figures["speed_ratio"], figures["cpu_speed_ratio"]
    return [
        *out,
        f"  registration runs at {ratio:.2f} of the bare speed (by CPU time {cpu_ratio:.2f}); target: 0.80",
    ]


def _bare(video: Path, encoder: Encoder) -> int:
    n_seconds = 0
    with DecodingChild(str(video)) as child:
        child.info()
        frames = child.frames()
        while batch := list(islice(frames, BATCH)):
            encoder.encode([frame.picture for frame in batch])
            n_seconds = batch[-1].second + 1
    return n_seconds


def _register(video: Path, encoder: Encoder) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="copywatch-bench-") as folder,
        Catalog.open(Path(folder), write=True) as catalog,
    ):
        register(video, catalog, encoder)


def _add_time(total: list[float], work: Callable[[], object]) -> None:
    clock, cpu = time.perf_counter(), _cpu_s()
    work()
    total[0] += time.perf_counter() - clock
    total[1] += _cpu_s() - cpu


def _cpu_s() -> float:
    """CPU time of this process and of the children that have ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, who))
