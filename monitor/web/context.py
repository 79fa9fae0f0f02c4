"""The running monitor as the web sees it.

Nothing here waits on the event loop: what reads a disk is a plain function for a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from monitor.alerting.outbox import History
from monitor.config.settings import ChannelSettings, Settings
from monitor.evidence.store import EvidenceStore
from monitor.ingest.latest_frames import LatestFrames
from monitor.ops.health import Health
from monitor.ops.metrics import Metrics
from monitor.rights.store import RightsStore
from monitor.runtime.channel_monitor import ActiveLibrary
from reference_db.store.catalog import Catalog, Contents


@dataclass(eq=False)
class AppContext:
    """All that `serve` gives the web."""

    settings: Settings
    config: Path | None  # the file that channels are added to and taken from
    metrics: Metrics
    health: Health
    library: ActiveLibrary
    model: str
    encoder_id: str
    channels: Callable[[], Sequence[tuple[ChannelSettings, bool]]]  # those that are watched, and whether each has ended
    glimpses: LatestFrames
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        self.evidence = EvidenceStore(self.settings.data_dir)
        self.history, self.rights = History(self.settings.data_dir), RightsStore(self.settings.data_dir)
        self._contents: Contents | None = None
        self._reading = threading.Lock()

    def catalog(self) -> Catalog:
        """The library on disk, to read; close it."""
        return Catalog.open(self.settings.data_dir)

    def contents(self) -> Contents:
        """What the library holds; read anew when it has changed."""
        with self._reading, self.catalog() as catalog:
            tally = catalog.tally()
            if self._contents is None or not tally or self._contents.tally != tally:
                self._contents = catalog.contents()
            return self._contents
