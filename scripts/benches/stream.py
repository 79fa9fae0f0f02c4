"""A day of one channel: does a second cost the same at the end as at the start?

Features go straight to the channel monitor (search, network, paths, segments, alerts), as fast as possible. Every hour
has the same content: unregistered pictures, with copies of a minute now and then and one of a quarter of an hour, with
noise added. In the last hour a fresh channel runs beside it, alternating minute by minute, so that other load on the
machine affects both: the ratio is that of the last hour to a first hour. A snapshot is taken every other second, as
`serve` does.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.config.settings import Settings
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.sources import Sample
from monitor.matching.mask_step import load_mask_step
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.batcher import run_step
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.models import Models
from reference_db.features.encoder import Encoder
from reference_db.media.frames import Frame
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import FEATURE_SIZE, Reference, ReferenceFeatures, ReferenceId

HOUR_S = 3600
LONG_S = 1000  # length of the one long reference, 900 s of which occur every hour
NOISE = 0.6  # norm of the noise added to each second of a copy
SNAPSHOT_EVERY_S = 2
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH = ChannelEpoch("bench", "2026-01-01T00:00:00Z", BEGAN)
BLANK = Frame(0, 0.0, np.zeros((8, 8, 3), np.uint8))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hours", type=int, default=24, help="of simulated stream")
    parser.add_argument("--references", type=int, default=20, help="of five minutes each, and a long one")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """CPU and memory of each hour."""
    rng = np.random.default_rng(1)
    films = [_film(rng, 300) for _ in range(args.references)] + [_film(rng, LONG_S)]
    models = Models(Encoder(list, "planted"), load_mask_step(None))
    library = ActiveLibrary(_index(films))
    aged, fresh = (ChannelMonitor(library, models, Settings(), Metrics(CollectorRegistry())) for _ in range(2))
    rows = _hour(rng, films)
    hours = [_Hour() for _ in range(args.hours)]
    beside = _Hour()
    for number, hour in enumerate(hours):
        for minute in range(0, HOUR_S, 60):
            hour.minute(aged, rows, number * HOUR_S, minute)
            if hour is hours[-1]:
                beside.minute(fresh, rows, number * HOUR_S, minute)
        hour.rss_mb = _resident_mb()
    return {
        "hours": args.hours,
        "reference_seconds": sum(len(film) for film in films),
        "alert_events": sum(hour.n_alerts for hour in hours),
        "cpu_ms_per_second_by_hour": [round(hour.cpu_ms, 3) for hour in hours],
        "cpu_ms_per_second_of_a_first_hour_beside_the_last": round(beside.cpu_ms, 3),
        "last_hour_over_first": round(hours[-1].cpu_ms / beside.cpu_ms, 3),
        "rss_mb_by_hour": [round(hour.rss_mb, 1) for hour in hours],
        "rss_last_hour_over_first": round(hours[-1].rss_mb / hours[0].rss_mb, 3),
        "snapshot_kb_median": statistics.median(size for hour in hours for size in hour.sizes) / 1000,
        "snapshot_kb_most": max(size for hour in hours for size in hour.sizes) / 1000,
        "snapshot_share_of_cpu": round(sum(h.snapshot_s for h in hours) / sum(h.cpu_s for h in hours), 3),
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    by_hour = figures["cpu_ms_per_second_by_hour"]
    return [
        f"{figures['hours']} h of one channel against {figures['reference_seconds']} reference seconds, "
        f"{figures['alert_events']} alert events",
        f"CPU per stream second: hour {figures['hours']} {by_hour[-1]:.2f} ms, a first hour measured beside it "
        f"{figures['cpu_ms_per_second_of_a_first_hour_beside_the_last']:.2f} ms: "
        f"{figures['last_hour_over_first']:.3f} times",
        f"memory: {figures['rss_mb_by_hour'][0]:.0f} MB after hour 1, "
        f"{figures['rss_mb_by_hour'][-1]:.0f} MB after the last",
        f"snapshot: {figures['snapshot_kb_median']:.0f} kB (median), {figures['snapshot_kb_most']:.0f} kB at most; "
        f"one every {SNAPSHOT_EVERY_S} s is {100 * figures['snapshot_share_of_cpu']:.0f} % of the CPU",
    ]


@dataclass(slots=True)
class _Hour:
    """The cost of one hour of a channel."""

    cpu_s: float = 0.0
    snapshot_s: float = 0.0
    n_alerts: int = 0
    rss_mb: float = 0.0
    sizes: list[int] = field(default_factory=list)

    @property
    def cpu_ms(self) -> float:
        """Per stream second."""
        return 1000 * self.cpu_s / HOUR_S

    def minute(self, monitor: ChannelMonitor, rows: NDArray[np.float32], hour_s: int, minute_s: int) -> None:
        """Matches one minute."""
        began = time.process_time()
        for n in range(minute_s, minute_s + 60):
            second = hour_s + n
            sample = Sample(EPOCH, second, BLANK, BEGAN + timedelta(seconds=second), "", {"second": second})
            self.n_alerts += len(run_step(monitor.models, monitor.match_step(sample, rows[n], True)).alerts)
            if n % SNAPSHOT_EVERY_S == 0:
                before = time.process_time()
                self.sizes.append(len(monitor.snapshot(sample.position)))
                self.snapshot_s += time.process_time() - before
        self.cpu_s += time.process_time() - began


def _film(rng: np.random.Generator, n_seconds: int) -> NDArray[np.float32]:
    """Rows that resemble their neighbours, with a cut now and then."""
    rows = np.empty((n_seconds, FEATURE_SIZE))
    row = rng.standard_normal(FEATURE_SIZE)
    for second in range(n_seconds):
        pace = 1.0 if rng.uniform() < 0.2 else 0.4
        row = np.sqrt(1 - pace**2) * row + pace * rng.standard_normal(FEATURE_SIZE)
        rows[second] = row
    return _unit(rows)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)
    return scaled


def _index(films: list[NDArray[np.float32]]) -> ReferenceIndex:
    pairs = []
    for number, rows in enumerate(films):
        name = ReferenceId(f"film-{number}")
        about = Reference(name, name, "", {}, "0" * 64, len(rows), 0, "planted", f"{number:064}", BEGAN)
        pairs.append((about, ReferenceFeatures(rows.astype(np.float16), np.ones(len(rows), np.bool_))))
    return ReferenceIndex.from_features(pairs)


def _hour(rng: np.random.Generator, films: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The content of every hour: copies of a minute at every sixth minute, and a long one in the second half."""
    rows = _film(rng, HOUR_S).astype(np.float64)
    for n, at in enumerate(range(60, HOUR_S // 2, 360)):
        begin = int(rng.integers(0, 240))
        rows[at : at + 60] = films[n % (len(films) - 1)][begin : begin + 60]
        rows[at : at + 60] += NOISE * _unit(rng.standard_normal((60, FEATURE_SIZE)))
    rows[2400:3300] = films[-1][50:950] + NOISE * _unit(rng.standard_normal((900, FEATURE_SIZE)))
    return _unit(rows)


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6
