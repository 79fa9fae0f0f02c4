"""A recording searched by the pipeline that `serve` runs: a file in, its final segments out.

Nothing is kept: a recording can always be checked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, Alert
from monitor.alerting.outbox import OutboxEntry
from monitor.config.settings import Settings
from monitor.ingest.sources import FileSource, Sample
from monitor.ops.metrics import Metrics
from monitor.rights.store import RightsStore
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.batcher import Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.match_step import MatchStep, Outcome
from monitor.runtime.models import Models, load_models
from monitor.runtime.runner import run_stream
from reference_db.media.decoding import probe
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog


def check_file(
    path: Path,
    channel: str,
    *,
    settings: Settings,
    on_alert: Callable[[Alert], None] = lambda alert: None,
    progress: Callable[[float, float | None], None] | None = None,
) -> list[dict[str, object]]:
    """One JSON-able object per final segment, in the file's own seconds, by the pipeline that `serve` runs.

    `progress` is told the second reached and the file's length where it says one. Raises MediaError, CatalogError.
    """
    return asyncio.run(_check_file(path, channel, settings, on_alert, progress))


async def _check_file(
    path: Path,
    channel: str,
    settings: Settings,
    on_alert: Callable[[Alert], None],
    progress: Callable[[float, float | None], None] | None,
) -> list[dict[str, object]]:
    duration_s = probe(path).duration_s
    models, metrics = load_models(settings), Metrics(CollectorRegistry())
    with Catalog.open(settings.data_dir) as catalog:
        index = ReferenceIndex.build(catalog, models.encoder.encoder_id)
    library = ActiveLibrary(index, RightsStore(settings.data_dir).rules())
    segments: list[Alert] = []

    def keep(alert: Alert) -> None:
        on_alert(alert)
        if alert.type == ENDED:
            segments.append(alert)

    compute = Batcher(models, metrics)
    source = FileSource(path, metrics.channels.of(channel))
    watch = _Reporting(library, models, settings, metrics, lambda s: progress(s, duration_s) if progress else None)
    try:
        await run_stream(source, watch, CallbackDelivery(keep), compute, metrics)
    finally:
        compute.close()
    return [alert.as_dict() for alert in sorted(segments, key=lambda alert: (alert.channel_start, alert.id))]


class CallbackDelivery:
    """Hands alerts to a function as they come."""

    stores_snapshots = False

    def __init__(self, tell: Callable[[Alert], None]) -> None:
        self._tell = tell

    async def put(self, entry: OutboxEntry) -> None:
        for alert in entry.alerts:
            self._tell(alert)


class _Reporting(ChannelMonitor):
    """A watch that says how far it has come."""

    def __init__(
        self,
        library: ActiveLibrary,
        models: Models,
        settings: Settings,
        metrics: Metrics,
        reached: Callable[[float], None],
    ) -> None:
        super().__init__(library, models, settings, metrics)
        self._reached = reached

    def match_step(self, sample: Sample, row: NDArray[np.float32], informative: bool) -> MatchStep[Outcome]:
        outcome = yield from super().match_step(sample, row, informative)
        self._reached(outcome.second + 1)
        return outcome
