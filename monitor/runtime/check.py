"""Checks a recording with the pipeline that `serve` runs: a file in, its final segments out.

Nothing is stored, since a recording can always be checked again, except evidence in a folder that the user names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, Alert
from monitor.alerting.outbox import OutboxEntry
from monitor.config.settings import Settings
from monitor.evidence.keeper import EvidenceKeeper
from monitor.evidence.store import EvidenceStore
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
    evidence: Path | None = None,
) -> list[dict[str, object]]:
    """One JSON-able object per final segment, in the file's own seconds, by the pipeline that `serve` runs.

    `progress` gets the second reached and the file's length, if the file says one. With `evidence`, an existing folder,
    each segment gets a folder in it with the files of an exported alert; its field `evidence` is None if they could not
    be written. Raises MediaError, CatalogError.
    """
    return asyncio.run(_check_file(path, channel, settings, on_alert, progress, evidence))


async def _check_file(
    path: Path,
    channel: str,
    settings: Settings,
    on_alert: Callable[[Alert], None],
    progress: Callable[[float, float | None], None] | None,
    evidence: Path | None,
) -> list[dict[str, object]]:
    duration_s = probe(path).duration_s
    models, metrics = load_models(settings), Metrics(CollectorRegistry())
    with Catalog.open(settings.data_dir) as catalog:
        index = ReferenceIndex.build(catalog, models.encoder.encoder_id)
    library = ActiveLibrary(index, RightsStore(settings.data_dir).rules())
    keeper = None
    if evidence is not None:
        keeper = EvidenceKeeper(settings, models.net, metrics, lambda: library.rules, evidence)
    events: dict[str, list[Alert]] = {}

    def collect(alert: Alert) -> None:
        on_alert(alert)
        events.setdefault(alert.id, []).append(alert)

    batcher = Batcher(models, metrics)
    source = FileSource(path, metrics.channels.of(channel))
    monitor = _ProgressMonitor(
        library, models, settings, metrics, keeper, lambda second: progress(second, duration_s) if progress else None
    )
    try:
        await run_stream(source, monitor, CallbackDelivery(collect), batcher, metrics)
        if keeper is not None:
            await asyncio.to_thread(keeper.flush)
    finally:
        batcher.close()
        if keeper is not None:
            keeper.close()
    if keeper is not None:
        events = dict(_complete_case(keeper.store, of_alert) for of_alert in events.values())
    segments = [of_alert[-1] for of_alert in events.values() if of_alert[-1].type == ENDED]
    return [alert.as_dict() for alert in sorted(segments, key=lambda alert: (alert.channel_start, alert.id))]


def _complete_case(store: EvidenceStore, events: list[Alert]) -> tuple[str, list[Alert]]:
    """The events of one alert by its id, after its folder is complete; without an address if there is no evidence."""
    last = events[-1]
    if last.type != ENDED:
        store.remove(last.id)
    elif not store.has(last.id):
        events = [replace(event, evidence=None) for event in events]
    else:
        store.complete_case(last.id, events)
    return last.id, events


class CallbackDelivery:
    """Calls a function with each alert; stores nothing."""

    stores_snapshots = False

    def __init__(self, on_alert: Callable[[Alert], None]) -> None:
        self._on_alert = on_alert

    async def put(self, entry: OutboxEntry) -> None:
        for alert in entry.alerts:
            self._on_alert(alert)


class _ProgressMonitor(ChannelMonitor):
    """A channel monitor that reports the second it has reached."""

    def __init__(
        self,
        library: ActiveLibrary,
        models: Models,
        settings: Settings,
        metrics: Metrics,
        evidence: EvidenceKeeper | None,
        on_second: Callable[[float], None],
    ) -> None:
        super().__init__(library, models, settings, metrics, evidence)
        self._on_second = on_second

    def match_step(self, sample: Sample, row: NDArray[np.float32], informative: bool) -> MatchStep[Outcome]:
        outcome = yield from super().match_step(sample, row, informative)
        self._on_second(outcome.second + 1)
        return outcome
