"""The ledger of a channel's seconds: each one received is waiting, until it is processed or dropped for a reason.

received = processed + dropped + waiting, per channel and at every scrape: a second moves from one count to another
under the lock that a scrape takes, and nothing but this file moves it.
"""

from __future__ import annotations

from monitor.ops.metrics import Metrics


class FrameCounts:
    """One channel's book; any thread may write into it."""

    def __init__(self, channel: str, metrics: Metrics) -> None:
        self._channel = channel
        self._metrics = metrics

    def received(self) -> None:
        """One more came and waits."""
        metrics = self._metrics
        with metrics.moving:
            metrics.frames_received.labels(self._channel).inc()
            metrics.frames_waiting.labels(self._channel).inc()

    def processed(self) -> None:
        """One that waited was matched."""
        metrics = self._metrics
        with metrics.moving:
            metrics.frames_waiting.labels(self._channel).dec()
            metrics.frames_processed.labels(self._channel).inc()

    def dropped(self, reason: str) -> None:
        """One that waited will never be matched."""
        metrics = self._metrics
        with metrics.moving:
            metrics.frames_waiting.labels(self._channel).dec()
            metrics.frames_dropped.labels(self._channel, reason).inc()
