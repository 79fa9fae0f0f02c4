"""The channels as the REST API, the event stream and the outage webhooks show them, read from their statuses."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from pydantic import BaseModel, Field

from monitor.alerting.outbox import History
from monitor.config.settings import ChannelSettings
from monitor.ops.channel_status import ChannelReport, ChannelStatuses
from monitor.ops.timestamps import rfc3339
from reference_db.media.addresses import redact_url


class ChannelOut(BaseModel):
    """One channel as it is now."""

    name: str
    url: str = Field(description="Without what may be a credential.")
    mode: str
    state: str = Field(description="starting, up, impaired, stalled, no_video, denied, failed, or ended for a file.")
    reason: str | None = Field(description="Why it is in that state, in a sentence as in the log; null while it is up.")
    cause: str | None = Field(description="The same in one word, such as missing, denied, repeated, looped or frozen.")
    since: str = Field(description="When it entered that state, or when this server started.")
    lag_s: float | None = Field(description="Time from arrival to result of the newest matched frame.")
    last_second_at: str | None = Field(description="When its newest frame was matched.")
    last_new_at: str | None = Field(description="When its newest frame arrived; one received before is not new.")
    reconnects: int
    gap_seconds: float
    dropped: int
    current: list[str] = Field(description="Ids of its open alerts.")


class ChannelViews:
    """All channels that `serve` monitors; any thread may call."""

    def __init__(
        self,
        channels: Callable[[], Sequence[ChannelSettings]],
        statuses: ChannelStatuses,
        history: History,
    ) -> None:
        self._channels, self._statuses, self._history = channels, statuses, history
        self._last_states: dict[str, tuple[str, str | None]] = {}
        self._lock = threading.Lock()

    def changes(self) -> set[str]:
        """The channels whose state or its reason changed, or that were added or removed, since the last call."""
        with self._lock:
            reports = self.reports()
            before, self._last_states = self._last_states, {n: (one.state, one.reason) for n, one in reports.items()}
            return {name for name, _ in before.items() ^ self._last_states.items()}

    def channels(self) -> list[ChannelOut]:
        """All channels by name; reads the open alerts from disk."""
        reports = self.reports()
        current = defaultdict(list)
        for alert in self._history.open_alerts():
            current[alert.channel].append(alert.id)
        found = [
            ChannelOut(
                name=channel.name,
                url=redact_url(channel.url) if "://" in channel.url else channel.url,
                mode=channel.mode,
                state=report.state,
                reason=report.reason,
                cause=report.cause,
                since=rfc3339(report.since),
                lag_s=report.lag_s,
                last_second_at=None if report.last_frame_at is None else rfc3339(report.last_frame_at),
                last_new_at=None if report.last_new_at is None else rfc3339(report.last_new_at),
                reconnects=sum(report.reconnects.values()),
                gap_seconds=report.gap_s,
                dropped=report.n_dropped,
                current=current[channel.name],
            )
            for channel in self._channels()
            if (report := reports.get(channel.name)) is not None
        ]
        return sorted(found, key=lambda one: one.name)

    def states(self) -> dict[str, str]:
        """The state of each channel."""
        return {name: report.state for name, report in self.reports().items()}

    def counts(self) -> dict[str, int]:
        """How many channels are in each state."""
        return dict(Counter(self.states().values()))

    def reports(self) -> dict[str, ChannelReport]:
        """The status of each channel."""
        names = {channel.name for channel in self._channels()}
        return {one.channel: one for one in self._statuses.reports() if one.channel in names}
