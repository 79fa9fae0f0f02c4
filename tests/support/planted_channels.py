"""Channels of planted features: pieces of films, noise, lost and uninformative seconds, broken clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import Alert
from monitor.config.settings import Settings
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.sources import Sample
from monitor.matching.mask_step import load_mask_step
from monitor.matching.tiles import HALO, SimilarityTile, TileMaps
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.batcher import run_step
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.match_step import Outcome
from monitor.runtime.models import Models
from reference_db.features.encoder import Encoder
from reference_db.media.frames import Frame
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import FEATURE_SIZE, Reference, ReferenceFeatures, ReferenceId

BEGAN = datetime(2026, 11, 16, 8, tzinfo=UTC)
BLANK = Frame(0, 0.0, np.zeros((8, 8, 3), np.uint8))
Rows = list[tuple[NDArray[np.float32], bool]]


def unit(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)
    return scaled


@cache
def film_rows(name: str) -> NDArray[np.float32]:
    """Four films: two lively ones, a slow one whose seconds look alike, one longer than a band is wide."""
    n_seconds, seed, pace = {
        "swift": (90, 1, 0.9),
        "other": (60, 2, 0.8),
        "slow": (80, 3, 0.25),
        "long": (700, 4, 0.7),
    }[name]
    rng = np.random.default_rng(seed)
    rows = np.empty((n_seconds, FEATURE_SIZE))
    row = rng.standard_normal(FEATURE_SIZE)
    for second in range(n_seconds):
        row = np.sqrt(1 - pace**2) * row + pace * rng.standard_normal(FEATURE_SIZE)
        rows[second] = row
    return unit(rows)


FILMS = ("swift", "other", "slow", "long")
# Seconds of "swift" that versions of one spot show, each encoded on its own.
SPOTS = {
    "spot30": [range(20, 50)],
    "spot20": [range(20, 30), range(36, 46)],
    "spot10": [range(20, 24), range(38, 41), range(47, 50)],
}
CAMERA = ("camera", "camera-later")  # two stretches of one fixed camera: the same background, other movement


@cache
def spot_rows(name: str) -> NDArray[np.float32]:
    rows = np.concatenate([film_rows("swift")[list(seconds)] for seconds in SPOTS[name]]).astype(np.float64)
    return unit(rows + 0.2 * unit(np.random.default_rng(len(rows)).standard_normal(rows.shape)))


@cache
def camera_rows(name: str) -> NDArray[np.float32]:
    background = unit(np.random.default_rng(30).standard_normal(FEATURE_SIZE)).astype(np.float64)
    rng = np.random.default_rng(31 + CAMERA.index(name))
    movement = np.empty((60, FEATURE_SIZE))
    moving = rng.standard_normal(FEATURE_SIZE)
    for second in range(60):
        moving = 0.7 * moving + np.sqrt(1 - 0.7**2) * rng.standard_normal(FEATURE_SIZE)
        movement[second] = moving
    return unit(background + 0.7 * unit(movement))


def planted_rows(name: str) -> NDArray[np.float32]:
    """The rows of any planted film."""
    if name in SPOTS:
        return spot_rows(name)
    return camera_rows(name) if name in CAMERA else film_rows(name)


@cache
def library(names: tuple[str, ...] = FILMS) -> ActiveLibrary:
    pairs = []
    for name in names:
        rows = planted_rows(name)
        reference = Reference(
            ReferenceId(name), name.title(), "", {}, "0" * 64, len(rows), 0, "planted", f"{name:0>64}", BEGAN
        )
        pairs.append((reference, ReferenceFeatures(rows.astype(np.float16), np.ones(len(rows), np.bool_))))
    return ActiveLibrary(ReferenceIndex.from_features(pairs))


class QuickModels(Models):
    """An untrained network in numpy: faster, with the receptive field of ours and all three steps.

    The mask is the larger of a cell's similarity and the mean along its diagonal; a step goes to the most similar cell.
    """

    def __init__(self) -> None:
        super().__init__(Encoder(list, "planted"), load_mask_step(None))

    def read(self, tiles: list[SimilarityTile]) -> list[TileMaps]:
        return [quick_tile(tile.cells) for tile in tiles]


def quick_tile(cells: NDArray[np.float32]) -> TileMaps:
    """The maps of a tile: its newest rows, without the halo."""
    mask, step = quick_maps(cells)
    inner = slice(HALO, cells.shape[1] - HALO)
    return TileMaps(mask[-HALO - 1 :, inner], step[-HALO:, inner])


def quick_maps(cells: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Mask [M, N] and step [M-1, N-1] of a matrix, zero beyond it; each depends on cells at most HALO away."""
    height, width = cells.shape
    wide = np.zeros((height + 2 * HALO, width + 2 * HALO), np.float32)
    wide[HALO:-HALO, HALO:-HALO] = cells
    along = sum(wide[n : n + height, n : n + width] for n in range(2 * HALO + 1)) / np.float32(2 * HALO + 1)
    mask = np.clip(np.maximum(along, cells), 0, 1).astype(np.float32)
    ways = np.stack([cells[1:, 1:] + np.float32(0.1), cells[:-1, 1:], cells[1:, :-1]])
    return mask, ways.argmax(axis=0).astype(np.uint8)


@cache
def quick_models() -> Models:
    return QuickModels()


@cache
def trained_models() -> Models:
    """The shipped network; features are planted, so the encoder only has a name."""
    torch.set_num_threads(1)
    return Models(Encoder(list, "planted"), load_mask_step(None))


def new_monitor(names: tuple[str, ...] = FILMS, by: Models | None = None) -> ChannelMonitor:
    return ChannelMonitor(library(names), by or quick_models(), Settings(), Metrics(CollectorRegistry()))


@dataclass(frozen=True)
class Part:
    """Some seconds of a film from second `from_s` on (None: of nothing registered), with noise added."""

    seconds: int
    film: str | None = None
    from_s: int = 0
    speed: float = 1.0
    noise: float = 0.5
    beside: str | None = None  # another film at the same time, as in a split screen
    beside_from_s: int = 0
    black: bool = False  # uninformative
    lost: bool = False
    new_epoch: bool = False


@dataclass(frozen=True)
class PlantedStream:
    """The samples of a channel and their feature rows."""

    samples: list[Sample]
    rows: Rows

    def __len__(self) -> int:
        return len(self.samples)


def plant(parts: Sequence[Part], seed: int = 0) -> PlantedStream:
    """The parts one after the other, a sample for each second that is not lost."""
    rng = np.random.default_rng([99, seed])
    epoch, second, samples, rows = ChannelEpoch("ch5", "2026-11-16T08:00:00Z", BEGAN), 0, [], []
    for number, part in enumerate(parts):
        if part.new_epoch:
            began = BEGAN + timedelta(hours=number)
            epoch, second = ChannelEpoch("ch5", began.isoformat(), began, 1000), 1000
        for n in range(part.seconds):
            row = part.noise * unit(rng.standard_normal(FEATURE_SIZE)).astype(np.float64)
            for film, from_s in ((part.film, part.from_s), (part.beside, part.beside_from_s)):
                if film is not None:
                    film_row = planted_rows(film)
                    row = row + film_row[int(from_s + n * part.speed) % len(film_row)]
            if not part.lost:
                arrived = epoch.began_at or BEGAN
                samples.append(
                    Sample(epoch, second, BLANK, arrived + timedelta(seconds=second), "reconnect", {"second": second})
                )
                rows.append((unit(row), not part.black))
            second += 1
    return PlantedStream(samples, rows)


def parts() -> st.SearchStrategy[list[Part]]:
    """Two to six parts; some copies are long enough for an alert, some too short."""
    films = st.sampled_from(FILMS)
    copy = st.builds(
        Part,
        seconds=st.integers(3, 40),
        film=films,
        from_s=st.integers(0, 59),
        speed=st.sampled_from([0.8, 1.0, 1.0, 1.25]),
        noise=st.sampled_from([0.2, 0.7]),
        beside=st.one_of(st.none(), st.none(), films),
        beside_from_s=st.integers(0, 30),
    )
    other = st.builds(Part, seconds=st.integers(1, 12), noise=st.just(1.0))
    black = st.builds(Part, seconds=st.integers(1, 4), black=st.just(True), noise=st.just(1.0))
    lost = st.builds(Part, seconds=st.integers(1, 20), lost=st.just(True))
    broken = st.builds(Part, seconds=st.integers(1, 6), noise=st.just(1.0), new_epoch=st.just(True))
    return st.lists(st.one_of(copy, copy, copy, other, black, lost, broken), min_size=2, max_size=6)


def outcomes_of(monitor: ChannelMonitor, samples: list[Sample], rows: Rows) -> list[Outcome]:
    """The outcome of each sample, in order, each matched in a batch of its own."""
    return [
        run_step(monitor.models, monitor.match_step(sample, row, informative))
        for sample, (row, informative) in zip(samples, rows, strict=True)
    ]


def alerts_of(monitor: ChannelMonitor, stream: PlantedStream, begin: int = 0, end: int | None = None) -> list[Alert]:
    """The alerts of these samples."""
    outcomes = outcomes_of(monitor, stream.samples[begin:end], stream.rows[begin:end])
    return [alert for outcome in outcomes for alert in outcome.alerts]
