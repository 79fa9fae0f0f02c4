"""A small library and the recording of a channel that broadcast pieces of it, for tests of the whole pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.config.settings import Settings
from monitor.demo.films import Film
from monitor.ingest.sources import FileSource, Sample
from monitor.ops.channel_status import ChannelStatus
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.models import Models, load_models
from reference_db.registration import register
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog
from tests.support import media

FPS = 5
HARBOUR = Film("harbour", "Harbour", 11, ("hills", "face", "city", "card"), 40.0)
GARDEN = Film("garden", "Garden", 22, ("flowers", "cells", "julia", "lines"), 40.0)
OTHER = Film("other", "Other", 33, ("marble", "wheel", "patchwork", "cells"), 3600.0)

Rows = list[tuple[NDArray[np.float32], bool]]


@dataclass(frozen=True)
class RecordedChannel:
    """A library with two films, the recording of a channel that broadcast pieces of them, and its feature rows."""

    settings: Settings
    models: Models
    recording: Path
    samples: list[Sample]
    rows: Rows

    def new_monitor(self) -> ChannelMonitor:
        with Catalog.open(self.settings.data_dir) as catalog:
            index = ReferenceIndex.build(catalog, self.models.encoder.encoder_id)
        return ChannelMonitor(ActiveLibrary(index), self.models, self.settings, Metrics(CollectorRegistry()))


# End second, film, and the film's second at which the piece starts:
#   0 other 14.3 harbour 32.3 other 50.3 garden 66.3 other 90
AIRED = (
    (14.3, OTHER, 100.0),
    (32.3, HARBOUR, 10.6),
    (50.3, OTHER, 300.0),
    (66.3, GARDEN, 20.2),
    (90.0, OTHER, 500.0),
)


def broadcast() -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """The pictures of the broadcast, with their times."""
    for number in range(int(AIRED[-1][0] * FPS)):
        time_s, began_s = number / FPS, 0.0
        for end_s, film, from_s in AIRED:
            if time_s < end_s:
                yield time_s, film.picture(from_s + time_s - began_s)
                break
            began_s = end_s


def record_channel(folder: Path) -> RecordedChannel:
    """Creates the library and the recording in this folder."""
    settings = Settings(data_dir=folder / "data")
    models = load_models(settings)
    with Catalog.open(settings.data_dir, write=True) as catalog:
        for film in (HARBOUR, GARDEN):
            pictures = ((n / FPS, film.picture(n / FPS)) for n in range(int(film.duration_s * FPS)))
            path = media.write_clip(folder / f"{film.name}.mp4", pictures, fps=FPS)
            register(path, catalog, models.encoder, title=film.title)
    recording = media.write_clip(folder / "recording.ts", broadcast(), fps=FPS)
    samples = asyncio.run(_read(FileSource(recording, ChannelStatus("ch1"))))
    return RecordedChannel(settings, models, recording, samples, models.encode([sample.frame for sample in samples]))


async def _read(source: FileSource) -> list[Sample]:
    return [sample async for sample in source.samples()]
