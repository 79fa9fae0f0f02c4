"""The board of channels: how each one is, since when, and when its last second came.

The metrics know how a channel is; the board looks at them once a second and keeps when that changed. So times are
right to a second.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel, Field

from monitor.alerting.outbox import History
from monitor.config.settings import ChannelSettings
from monitor.ops.metrics import Metrics
from monitor.ops.timestamps import rfc3339
from reference_db.media.addresses import redact_url


class ChannelOut(BaseModel):
    """One channel as it is now."""

    name: str
    url: str = Field(description="Without what may be a credential.")
    mode: str
    state: str = Field(description="starting, up, impaired, stalled, no_video, denied, failed, or ended for a file.")
    since: str = Field(description="When it came into that state, or this server's start.")
    lag_s: float | None = Field(description="How long the newest matched second waited.")
    last_second_at: str | None = Field(description="When its newest second was matched.")
    reconnects: int
    gap_seconds: float
    dropped: int
    current: list[str] = Field(description="Ids of its alerts that are open.")


@dataclass(slots=True)
class _ChannelRow:
    state: str
    since: str
    n_processed: float
    last_second_at: str | None = None


class ChannelBoard:
    """Kept up by `look`; everything on it may be read from any thread."""

    def __init__(
        self, watched: Callable[[], Sequence[tuple[ChannelSettings, bool]]], metrics: Metrics, history: History
    ) -> None:
        self._watched, self._metrics, self._history = watched, metrics, history
        self._lines: dict[str, _ChannelRow] = {}
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def changes(self) -> set[str]:
        """The names of channels that changed their state, came or went since this was last asked."""
        self.look()
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def look(self) -> None:
        """Looks at the metrics."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        now = rfc3339(datetime.now(UTC))
        states, processed = self._told_states(), self._per_channel(self._metrics.frames_processed)
        watched = self._watched()
        for channel, has_ended in watched:
            n, name = processed.get(channel.name, 0.0), channel.name
            state = "ended" if has_ended else states.get(name, "up" if n else "starting")
            line = self._lines.get(name)
            if line is None or line.state != state:
                last = line.last_second_at if line else None
                self._lines[name] = line = _ChannelRow(state, now, line.n_processed if line else 0.0, last)
                self._changed.add(name)
            if n != line.n_processed:
                line.n_processed, line.last_second_at = n, now
        gone = self._lines.keys() - {channel.name for channel, _ in watched}
        for name in gone:
            del self._lines[name]
        self._changed |= gone

    def channels(self) -> list[ChannelOut]:
        """All of them, sorted by name; reads the open alerts from disk."""
        self.look()
        metrics = self._metrics
        lags, gaps = self._per_channel(metrics.lag), self._per_channel(metrics.gap_seconds)
        reconnects, dropped = self._per_channel(metrics.reconnects), self._per_channel(metrics.frames_dropped)
        current = defaultdict(list)
        for alert in self._history.open_alerts():
            current[alert.channel].append(alert.id)
        found = []
        for channel, _ in self._watched():
            line = self._lines.get(channel.name)
            if line is None:
                continue  # it came just now
            found.append(
                ChannelOut(
                    name=channel.name,
                    url=redact_url(channel.url) if "://" in channel.url else channel.url,
                    mode=channel.mode,
                    state=line.state,
                    since=line.since,
                    lag_s=lags.get(channel.name),
                    last_second_at=line.last_second_at,
                    reconnects=int(reconnects.get(channel.name, 0)),
                    gap_seconds=gaps.get(channel.name, 0.0),
                    dropped=int(dropped.get(channel.name, 0)),
                    current=current[channel.name],
                )
            )
        return sorted(found, key=lambda one: one.name)

    def states(self) -> dict[str, str]:
        """The state of each channel."""
        self.look()
        with self._lock:
            return {name: line.state for name, line in self._lines.items()}

    def counts(self) -> dict[str, int]:
        """How many channels are in each state."""
        return dict(Counter(self.states().values()))

    def _told_states(self) -> dict[str, str]:
        samples = [one for metric in self._metrics.channel_state.collect() for one in metric.samples]
        return {one.labels["channel"]: one.labels["state"] for one in samples if one.value == 1}

    @staticmethod
    def _per_channel(family: MetricWrapperBase) -> dict[str, float]:
        """The value of each channel, over all other labels."""
        sums: dict[str, float] = defaultdict(float)
        for metric in family.collect():
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    sums[sample.labels["channel"]] += sample.value
        return dict(sums)
