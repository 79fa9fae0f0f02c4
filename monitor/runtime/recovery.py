"""Recovery: what an earlier life of the monitor kept, given back to each channel before it begins.

A channel whose snapshot fits goes on from it: its open alerts stay open, and what aired meanwhile is a gap. Where
there is none, or it is refused, the channel begins anew, and whatever was told and never ended is ended by name of
the reason. Nothing that was told is left hanging.
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
    """Snapshots and open alerts by channel."""

    snapshots: dict[str, bytes] = field(default_factory=dict)
    open_alerts: dict[str, list[Alert]] = field(default_factory=dict)

    @classmethod
    def load(cls, outbox: Outbox) -> Recovery:
        """What the outbox has; nothing where it cannot be read, since monitoring matters more."""
        try:
            snapshots, told = outbox.snapshots(), outbox.open_alerts()
        except OutboxFailed as error:
            logger.error("%s; every channel begins anew", error)
            return cls()
        by_channel = defaultdict(list)
        for alert in told:
            by_channel[alert.channel].append(alert)
        return cls(snapshots, dict(by_channel))

    def give_back(self, source: Source, watch: ChannelMonitor, metrics: Metrics) -> OutboxEntry:
        """Has a channel go on from its snapshot; what there is to tell of it at once."""
        channel = source.channel
        content, kept, alerts = self.snapshots.pop(channel, None), None, []
        if content is not None:
            try:
                resumed = watch.restore(content)
                source.resume(resumed.position)
                if resumed.alerts:
                    alerts, kept = list(resumed.alerts), watch.snapshot(resumed.position)  # one knows of the other
                metrics.restores.labels(channel, "continued").inc()
                logger.info("channel %s goes on from its snapshot; %d alerts open", channel, len(watch.open_alerts))
            except SnapshotRefused as refused:
                metrics.restores.labels(channel, "refused").inc()
                logger.warning("channel %s begins anew: %s", channel, refused)
                if refused.notes is not None:
                    source.resume(refused.notes["position"])
        known = watch.open_alerts | {alert.id for alert in alerts}
        alerts += self._ended(channel, known, "state lost")
        return OutboxEntry(channel, alerts, kept)

    def left_over(self, channels: Collection[str], *, in_a_fleet: bool = False) -> list[OutboxEntry]:
        """The end of what is open on channels that are no longer watched, and of their snapshots.

        In a fleet, channels without a snapshot are watched by others.
        """
        known = self.snapshots.keys() if in_a_fleet else self.snapshots.keys() | self.open_alerts.keys()
        gone = known - set(channels)
        return [
            OutboxEntry(channel, self._ended(channel, (), "channel removed"), drop_snapshot=True)
            for channel in sorted(gone)
        ]

    def _ended(self, channel: str, known: Collection[str], reason: str) -> list[Alert]:
        return [alert.ended(reason) for alert in self.open_alerts.pop(channel, []) if alert.id not in known]
