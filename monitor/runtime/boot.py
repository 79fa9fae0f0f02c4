"""Start-up that every matching role shares: settings in; models, library, batcher and evidence out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from monitor import __version__
from monitor.alerting.reviews import load_rules
from monitor.config.settings import Settings
from monitor.evidence.keeper import EvidenceKeeper, create_keeper
from monitor.ops.health import Health, Worker
from monitor.ops.metrics import Metrics
from monitor.rights.store import RightsStore
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.batcher import Batcher
from monitor.runtime.channel_monitor import ChannelMonitor
from monitor.runtime.index_refresh import report_index, watch_catalog
from monitor.runtime.models import Models, load_models
from reference_db.search.index import IndexKeeper

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class MatchServices:
    """What all channels of a process are matched with. Closed once, by the role, after the last channel."""

    settings: Settings
    metrics: Metrics
    models: Models
    keeper: IndexKeeper
    library: ActiveLibrary
    rights: RightsStore
    batcher: Batcher
    evidence: EvidenceKeeper | None
    problems: dict[str, str] = field(default_factory=dict)  # why the process is not ready, by part
    refresher: Worker = field(default_factory=Worker)

    def channel_monitor(self) -> ChannelMonitor:
        """The matching state of one more channel."""
        return ChannelMonitor(self.library, self.models, self.settings, self.metrics, self.evidence)

    def health(self, part: str, workers: Mapping[str, Worker] | None = None) -> Health:
        """The health of the process; `part` and `workers` are checked beside those that every role has."""
        ours = {"compute": self.batcher.worker, "refresher": self.refresher}
        return Health(self.problems, ("index", part), {**ours, **(workers or {})}, vital=("compute",))

    async def refresh_index(self) -> None:
        """Replaces the index soon after the library changed. Never returns."""
        await watch_catalog(self.keeper, self.library, self.metrics, self.problems, self.refresher)

    def close(self) -> None:
        self.batcher.close()
        if self.evidence is not None:
            self.evidence.close()


async def boot(settings: Settings, metrics: Metrics) -> MatchServices:
    """Loads the models, then the library. Raises ConfigError, or CatalogError where the library cannot be read."""
    logger.info("loading models")
    models = await asyncio.to_thread(load_models, settings)
    metrics.build_info.labels(__version__, models.name).set(1)
    logger.info("opening the library in %s", settings.data_dir)
    rights = RightsStore(settings.data_dir)
    rules = await asyncio.to_thread(load_rules, rights)
    keeper = IndexKeeper(settings.data_dir, models.encoder.encoder_id)
    library = ActiveLibrary(await asyncio.to_thread(keeper.refresh), rules)
    report_index(library.index, metrics)
    logger.info("opened the library: %d references", len(library.index.references))
    evidence = create_keeper(settings, models.net, metrics, lambda: library.rules)
    return MatchServices(settings, metrics, models, keeper, library, rights, Batcher(models, metrics), evidence)
