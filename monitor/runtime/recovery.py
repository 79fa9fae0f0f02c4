"""Recovery: restores each channel from the snapshot of the previous run before it starts.

A channel whose snapshot is valid resumes: its open alerts stay open, and the seconds missed meanwhile are a gap. If
there is no snapshot, or it is refused, the channel starts fresh, and alerts that the previous run left open end with
a reason. No alert stays open for ever.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from monitor.alerting.alerts import Alert
from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.errors import OutboxFailed, SnapshotRefused
from monitor.ingest.sources import Source
from monitor.ops.metrics import Metrics
from monitor.runtime.channel_monitor import ChannelMonitor

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Recovery:
    """Snapshots and open alerts of the previous run, by channel."""

    snapshots: dict[str, bytes] = field(default_factory=dict)
    open_alerts: dict[str, list[Alert]] = field(default_factory=dict)

    @classmethod
    def load(cls, outbox: Outbox) -> Recovery:
        """Reads the outbox; empty if it cannot be read, since monitoring matters more."""
        try:
            snapshots, open_alerts = outbox.snapshots(), outbox.open_alerts()
        except OutboxFailed as error:
            logger.error("%s; every channel starts fresh", error)
            return cls()
        by_channel = defaultdict(list)
        for alert in open_alerts:
            by_channel[alert.channel].append(alert)
        return cls(snapshots, dict(by_channel))

    def restore(self, source: Source, monitor: ChannelMonitor, metrics: Metrics) -> OutboxEntry:
        """Resumes a channel from its snapshot, if it can; the entry has the alerts to emit at once."""
        channel = source.channel
        content, snapshot, alerts = self.snapshots.pop(channel, None), None, []
        if content is not None:
            try:
                restored = monitor.restore(content)
                source.resume(restored.position)
                if restored.alerts:  # stored with a snapshot that knows of them
                    alerts, snapshot = list(restored.alerts), monitor.snapshot(restored.position)
                metrics.restores.labels(channel, "continued").inc()
                logger.info("channel %s resumed from its snapshot; %d alerts open", channel, len(monitor.open_alerts))
            except SnapshotRefused as refused:
                metrics.restores.labels(channel, "refused").inc()
                logger.warning("channel %s starts fresh: %s", channel, refused)
                if refused.notes is not None:
                    source.resume(refused.notes["position"])
        known = monitor.open_alerts | {alert.id for alert in alerts}
        alerts += self._end(channel, known, "state lost")
        return OutboxEntry(channel, alerts, snapshot)

    def end_removed(self, channels: Collection[str], *, with_kafka: bool = False) -> list[OutboxEntry]:
        """Entries that end the open alerts of channels other than these and drop their snapshots.

        With Kafka, channels without a snapshot here belong to other processes.
        """
        known = self.snapshots.keys() if with_kafka else self.snapshots.keys() | self.open_alerts.keys()
        removed = known - set(channels)
        return [
            OutboxEntry(channel, self._end(channel, (), "channel removed"), drop_snapshot=True)
            for channel in sorted(removed)
        ]

    def _end(self, channel: str, known: Collection[str], reason: str) -> list[Alert]:
        return [alert.ended(reason) for alert in self.open_alerts.pop(channel, []) if alert.id not in known]
