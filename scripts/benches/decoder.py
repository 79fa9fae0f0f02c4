"""The decoding child in its sandbox against the same child without it, alternating in one run.

A start is the time from the request to the first picture of a file. A whole decoding shows what the filter of system
calls costs while it runs. Both are CPU seconds of the child, since others use this machine too, and wall seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

from reference_db.media.frames import RECORD

Figures: TypeAlias = dict[str, Any]
CONFINED = "from reference_db.media import decoder; decoder.main()"
BARE = (
    "from reference_db.media import decoder, decoding_session; "
    "decoding_session.confine_decoder = lambda needs: []; decoder.main()"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("video", type=Path)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each side")


def run(args: argparse.Namespace) -> Figures:
    """Medians of both sides."""
    rows: dict[str, list[tuple[float, float, float]]] = {"confined": [], "bare": []}
    for _ in range(args.rounds):
        for name, program in (("bare", BARE), ("confined", CONFINED)):
            rows[name].append(_decode(program, args.video))
    medians = {name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in rows.items()}
    figures: Figures = {
        name: {"first_picture_s": round(first, 4), "wall_s": round(wall, 4), "cpu_s": round(cpu, 4)}
        for name, (first, wall, cpu) in medians.items()
    }
    return figures | {"cpu_ratio": round(medians["confined"][2] / medians["bare"][2], 3), "rounds": args.rounds}


def lines(figures: Figures) -> list[str]:
    confined, bare = figures["confined"], figures["bare"]
    return [
        f"first picture               {1000 * confined['first_picture_s']:.0f} ms in the sandbox, "
        f"{1000 * bare['first_picture_s']:.0f} ms without (median of {figures['rounds']})",
        f"CPU of the whole file       {1000 * confined['cpu_s']:.0f} ms in the sandbox, "
        f"{1000 * bare['cpu_s']:.0f} ms without; ratio {figures['cpu_ratio']}",
    ]


def _decode(program: str, video: Path) -> tuple[float, float, float]:
    """Seconds to the first picture, to the end, and of CPU."""
    request = {"url": str(video), "live": False, "mode": "exact", "allow": [], "private": False, "no_video_s": 30.0}
    cpu_s, started = _cpu_s(), time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write(json.dumps({**request, "parent": os.getpid()}).encode())
        child.stdin.close()
        first_s = 0.0
        while head := child.stdout.read(RECORD.size):
            kind, length = RECORD.unpack(head)
            child.stdout.read(length)
            if kind == b"P" and not first_s:
                first_s = time.perf_counter() - started
    return first_s, time.perf_counter() - started, _cpu_s() - cpu_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
