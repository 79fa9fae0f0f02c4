"""N live channels of one video, monitored by `copywatch serve`, against `ffmpeg -skip_frame nokey` on the same streams.

The video is served in a loop over HTTP in real time, each channel at another offset, with a key frame every 1.6 s. It
is registered, so that alerts occur, among as many seconds of other references as requested; with `--other`, only some
channels carry it, and the rest an unregistered video. Both sides read all channels at once and are measured over the
same seconds, with all child processes. Needs the Debian package ffmpeg.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benches.live_channels import LiveChannels, Recording, prepare
from benches.processes import cpu_s, memory_bytes, tree
from monitor.demo.films import Film
from reference_db.features.encoder import Encoder, load_encoder
from reference_db.features.picture_detail import is_informative
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from reference_db.store.references import Reference, ReferenceFeatures, ReferenceId

Figures: TypeAlias = dict[str, Any]

APART_S = 3.7  # offset between two channels: not a multiple of the key frame interval
FILM_S = 120  # length of the rendered film from which the other references are derived
OTHER_S = 300  # length of one other reference
LIKENESS = 0.7  # cosine between a row of such a reference and its rendered picture
SETTLE_S = 2  # a channel that is at most this far behind counts as real time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("video", type=Path, help="the film to loop, ideally 1080p H.264 with a key frame every 1.6 s")
    parser.add_argument("--channels", type=int, default=10)
    parser.add_argument(
        "--other", type=Path, help="video of the channels without a copy; by default all channels carry the film"
    )
    parser.add_argument("--copies", type=int, default=2, help="channels that carry the film if --other is given")
    parser.add_argument("--seconds", type=int, default=120, help="measured after the warm-up")
    parser.add_argument("--warm-up", type=int, default=30, help="seconds before the measurement")
    parser.add_argument("--mode", choices=("economy", "exact", "auto"), default="economy")
    parser.add_argument("--reference-seconds", type=int, default=5000, help="of other references in the library")
    parser.add_argument("--references", type=Path, nargs="*", default=[], help="more videos to register")


def run(args: argparse.Namespace) -> Figures:
    with tempfile.TemporaryDirectory(prefix="copywatch-bench-") as name:
        folder = Path(name)
        say(f"creating a library of {args.reference_seconds} s and the film")
        make_library(folder / "data", [args.video, *args.references], args.reference_seconds)
        length_s = args.warm_up + args.seconds + args.channels * APART_S + 90  # and time to start
        film = Recording.of(prepare(args.video, length_s, folder))
        n_copies = args.channels if args.other is None else args.copies
        other = film if args.other is None else Recording.of(prepare(args.other, length_s, folder))
        live = LiveChannels([film] * n_copies + [other] * (args.channels - n_copies), APART_S)
        try:
            with serving(folder, live, args) as (monitor, address), ffmpegs(live, args.channels) as decoders:
                return measure(args, live, monitor, address, decoders, folder / "alerts.jsonl")
        finally:
            live.stop()


def make_library(data_dir: Path, videos: list[Path], other_s: int) -> None:
    """Registers the videos, and references whose rows have a cosine of LIKENESS with those of rendered pictures."""
    encoder, rng = load_encoder(), np.random.default_rng(0)
    with Catalog.open(data_dir, write=True) as catalog:
        for video in videos:
            register(video, catalog, encoder, thumbnails=False)
        rows, informative = rendered(encoder)
        for n, first in enumerate(range(0, other_s, OTHER_S)):
            length = min(OTHER_S, other_s - first)
            at = (np.arange(length) + rng.integers(FILM_S)) % FILM_S
            noise = rng.normal(size=(length, rows.shape[1]))
            noise /= np.linalg.norm(noise, axis=1, keepdims=True)
            mixed = LIKENESS * rows[at] + np.sqrt(1 - LIKENESS**2) * noise
            mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
            features = ReferenceFeatures(mixed.astype(np.float16), informative[at])
            n_uninformative = int((~informative[at]).sum())
            catalog.add(
                Reference(
                    id=ReferenceId(f"other-{n}"),
                    title=f"Other {n}",
                    owner="",
                    tags={},
                    content_sha256=f"{n:064x}",
                    n_seconds=length,
                    n_uninformative=n_uninformative,
                    encoder_id=encoder.encoder_id,
                    features_sha256="",
                    added_at=datetime.now(UTC),
                ),
                features,
            )


def rendered(encoder: Encoder) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Features of rendered pictures, one per second."""
    film = Film("other", "Other", 5, ("hills", "face", "city", "flowers", "marble", "wheel"), float(FILM_S))
    pictures = [film.picture(float(second)) for second in range(FILM_S)]
    return encoder.encode(pictures), np.array([is_informative(picture) for picture in pictures])


@contextmanager
def serving(folder: Path, live: LiveChannels, args: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `copywatch serve` and the address of its metrics."""
    channels = "\n".join(f"  - {{name: ch{n}, url: '{live.url(n)}', mode: {args.mode}}}" for n in range(args.channels))
    config = folder / "copywatch.yaml"
    config.write_text(f"data_dir: data\nalerting: {{output: alerts.jsonl}}\nweb: {{port: 0}}\nchannels:\n{channels}\n")
    log = (folder / "log").open("w+")
    monitor = subprocess.Popen(
        [sys.executable, "-m", "monitor.cli", "serve", "--config", str(config)], stderr=log, text=True
    )
    try:
        yield monitor, wait_for_address(monitor, folder / "log")
    finally:
        monitor.terminate()
        monitor.wait()
        log.close()


def wait_for_address(monitor: subprocess.Popen[str], log: Path) -> str:
    while monitor.poll() is None:
        if found := re.search(r"health at (http://\S+?)[\s\"]", log.read_text()):
            return found.group(1)
        time.sleep(0.2)
    raise SystemExit(f"bench: copywatch serve exited during start-up:\n{log.read_text()}")


@contextmanager
def ffmpegs(live: LiveChannels, n_channels: int) -> Iterator[list[int]]:
    """One ffmpeg per channel that decodes the key frames and discards them."""
    ffmpeg = shutil.which("ffmpeg")
    assert ffmpeg is not None
    decode = [ffmpeg, "-v", "quiet", "-nostdin", "-skip_frame", "nokey", "-i"]
    running = [subprocess.Popen([*decode, live.url(n), "-f", "null", "-"]) for n in range(n_channels)]
    try:
        yield [one.pid for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()


def measure(
    args: argparse.Namespace,
    live: LiveChannels,
    monitor: subprocess.Popen[str],
    address: str,
    decoders: list[int],
    alerts: Path,
) -> Figures:
    log = AlertLog(alerts)
    say(f"warming up for {args.warm_up} s")
    time.sleep(args.warm_up)
    before, ours_s, theirs_s = scrape(address), cpu_s(tree(monitor.pid)), cpu_s(decoders)
    own_s, began = cpu_s([monitor.pid]), time.monotonic()
    say(f"measuring for {args.seconds} s")
    time.sleep(args.seconds)
    took_s = time.monotonic() - began
    pids = tree(monitor.pid)
    ours_s, theirs_s = cpu_s(pids) - ours_s, cpu_s(decoders) - theirs_s
    own_s = cpu_s([monitor.pid]) - own_s
    after = scrape(address)
    channel_minutes = args.channels * took_s / 60
    parent, *children = [memory_bytes(pid) for pid in pids]
    held = [n for n in range(args.channels) if is_held(f"ch{n}", before, after, took_s)]
    return {
        "channels": args.channels,
        "seconds": round(took_s, 1),
        "copies_on_air": args.channels if args.other is None else args.copies,
        "mode": args.mode,
        "reference_seconds": int(after["copywatch_reference_seconds", "", ""]),
        "cpu_s_per_channel_minute": round(ours_s / channel_minutes, 3),
        "of_it_in_children": round((ours_s - own_s) / channel_minutes, 3),
        "ffmpeg_cpu_s_per_channel_minute": round(theirs_s / channel_minutes, 3),
        "cpu_ratio": round(ours_s / theirs_s, 3),
        "channels_held": len(held),
        "channels_one_core_would_hold": int(60 / (ours_s / channel_minutes)),
        "alerts_started": len(log.delays(live)),
        "alert_delay_s": quantiles(log.delays(live)),
        "dropped_seconds": int(sum(v for (name, _, _), v in after.items() if name == "copywatch_frames_dropped_total")),
        "stage_ms_per_second": {stage: stage_ms(stage, before, after) for stage in ("encode", "match")},
        "memory_mb": {
            "per_channel": round((parent + sum(children)) / args.channels / 1e6, 1),
            "child": round(sum(children) / args.channels / 1e6, 1),
            "parent": round(parent / 1e6, 1),
        },
    }


Series: TypeAlias = dict[tuple[str, str, str], float]  # metric, channel or stage, reason -> value


def scrape(address: str) -> Series:
    """Every sample of ours by name, channel or stage, and reason."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    series: Series = {}
    for name, labels, value in re.findall(r"^(copywatch_\w+)(?:\{(.*?)\})? (\S+)", text, re.M):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        series[name, named.get("channel") or named.get("stage", ""), named.get("reason", "")] = float(value)
    return series


def is_held(channel: str, before: Series, after: Series, took_s: float) -> bool:
    """Whether the channel was matched in real time: every second, none dropped, none pending."""

    def increase(name: str, reason: str = "") -> float:
        return after.get((name, channel, reason), 0.0) - before.get((name, channel, reason), 0.0)

    waiting = after.get(("copywatch_frames_waiting", channel, ""), 0.0)
    lost = increase("copywatch_frames_dropped_total", "overload") + increase("copywatch_gap_seconds_total")
    return lost == 0 and waiting <= SETTLE_S and increase("copywatch_frames_processed_total") >= took_s - SETTLE_S


def stage_ms(stage: str, before: Series, after: Series) -> float:
    spent, n = (
        after.get((f"copywatch_stage_duration_seconds_{what}", stage, ""), 0.0)
        - before.get((f"copywatch_stage_duration_seconds_{what}", stage, ""), 0.0)
        for what in ("sum", "count")
    )
    return round(1000 * spent / max(1.0, n), 2)


def quantiles(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p95": None, "max": None}
    p50, p95 = np.quantile(values, [0.5, 0.95])
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3), "max": round(max(values), 3)}


class AlertLog:
    """Follows the alert file; each alert with the time at which it was read here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._alerts: list[tuple[float, dict[str, Any]]] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def delays(self, live: LiveChannels) -> list[float]:
        """For each started alert: from the moment its deciding second was complete to the moment it was read here.

        A second is complete when the first bytes beyond its middle are sent.
        """
        return [
            at - live.sent_at(int(alert["channel"].removeprefix("ch")), alert["detected_at"] + 0.5)
            for at, alert in self._alerts
            if alert["type"] == "alert.started"
        ]

    def _follow(self) -> None:
        while not self._path.exists():
            time.sleep(0.05)
        with self._path.open() as lines:
            while True:
                if line := lines.readline():
                    self._alerts.append((time.time(), json.loads(line)))
                else:
                    time.sleep(0.01)


def lines(figures: Figures) -> Iterator[str]:
    delay, memory = figures["alert_delay_s"], figures["memory_mb"]
    yield (
        f"{figures['channels']} channels, a copy on {figures['copies_on_air']}, {figures['mode']}, "
        f"for {figures['seconds']:.0f} s, "
        f"{figures['reference_seconds']} s of references"
    )
    yield (
        f"CPU per channel-minute      {figures['cpu_s_per_channel_minute']:.2f} s "
        f"({figures['of_it_in_children']:.2f} s in decoders); "
        f"ffmpeg -skip_frame nokey {figures['ffmpeg_cpu_s_per_channel_minute']:.2f} s; "
        f"ratio {figures['cpu_ratio']:.2f}"
    )
    stages = figures["stage_ms_per_second"]
    yield f"encode one picture          {stages['encode']:.1f} ms; match one second {stages['match']:.1f} ms"
    yield (
        f"matched in real time        {figures['channels_held']} of {figures['channels']} "
        f"({figures['dropped_seconds']} s dropped); one core can match {figures['channels_one_core_would_hold']}"
    )
    yield (
        f"arrival to alert            p50 {delay['p50']} s, p95 {delay['p95']} s, max {delay['max']} s "
        f"({figures['alerts_started']} alerts)"
    )
    yield (
        f"memory per channel          {memory['per_channel']} MB ({memory['child']} MB per decoder, "
        f"{memory['parent']} MB for the monitor process)"
    )


def say(line: str) -> None:
    print(line, file=sys.stderr)
