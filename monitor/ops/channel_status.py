"""Channel status: what this process knows about each channel, written once by the code that knows it.

The live source writes state, reconnects and received frames. The runner writes processed and dropped frames, gaps and
lag. The roster writes the end. Metrics, REST API, dashboard, webhooks and CLI only read it. In every report
received = processed + dropped + waiting, because `n_waiting` is computed from the other three.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

STATES = ("starting", "up", "impaired", "stalled", "no_video", "denied", "failed")  # that a live source reports


@dataclass(frozen=True, slots=True)
class ChannelReport:
    """The status of one channel at one moment."""

    channel: str
    source_state: str | None  # one of STATES; None where no live source reports it: a file, or records of Kafka
    reason: str | None  # why it is in this state, in a sentence as in the log; None while it is up
    cause: str | None  # the same in one word, such as missing or frozen
    has_ended: bool  # its task is done, as after the end of a file
    since: datetime  # of `state`
    n_received: int
    n_processed: int
    dropped: Mapping[str, int]  # by reason
    reconnects: Mapping[str, int]  # by reason
    gap_s: float  # seconds that were never received
    lag_s: float | None  # from arrival to outcome of the newest processed frame; None where nothing measures it
    last_frame_at: datetime | None  # when the newest frame was processed
    last_new_at: datetime | None  # when the newest frame of a live source arrived; one received before is not new
    created_s: float  # Unix time at which counting started

    @property
    def state(self) -> str:
        """One of STATES, or `ended`. Without a live source a channel is up once a frame was processed."""
        return _state(self.has_ended, self.source_state, self.n_processed)

    @property
    def is_up(self) -> bool:
        """Whether its live source delivers pictures."""
        return self.source_state in ("up", "impaired")

    @property
    def n_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def n_waiting(self) -> int:
        return self.n_received - self.n_processed - self.n_dropped


class ChannelStatus:
    """The status of one channel; any thread may write and read."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._lock = threading.Lock()
        self._source_state: str | None = None
        self._reason: str | None = None
        self._cause: str | None = None
        self._has_ended = False
        self._since = datetime.now(UTC)
        self._created_s = time.time()
        self._n_received = self._n_processed = 0
        self._gap_s = 0.0
        self._dropped: Counter[str] = Counter()
        self._reconnects: Counter[str] = Counter()
        self._lag_s: float | None = None
        self._last_frame_at: datetime | None = None
        self._last_new_at: datetime | None = None

    def report(self) -> ChannelReport:
        """All of it, as of one moment."""
        with self._lock:
            return ChannelReport(
                self.channel,
                self._source_state,
                self._reason,
                self._cause,
                self._has_ended,
                self._since,
                self._n_received,
                self._n_processed,
                dict(self._dropped),
                dict(self._reconnects),
                self._gap_s,
                self._lag_s,
                self._last_frame_at,
                self._last_new_at,
                self._created_s,
            )

    def enter(self, state: str | None, reason: str | None = None, cause: str | None = None) -> None:
        """Called by the source: its state is this one from now on; None where it is a file that can be read.

        `reason` is a sentence without secrets.
        """
        with self._lock:
            before = self._state
            self._source_state, self._reason, self._cause = state, reason, cause
            self._note_change(before)

    def end(self) -> None:
        """Called by the roster: the channel's task is done."""
        with self._lock:
            before, self._has_ended = self._state, True
            self._note_change(before)

    def note_new_frame(self, arrived_at: datetime) -> None:
        """Called by the live source: a frame arrived that it had not received before."""
        with self._lock:
            self._last_new_at = arrived_at

    def count_received(self) -> None:
        """One more frame arrived and waits."""
        with self._lock:
            self._n_received += 1

    def count_processed(self) -> None:
        """A waiting frame was matched, or sent to the broker."""
        with self._lock:
            before, self._last_frame_at = self._state, datetime.now(UTC)
            self._n_processed += 1
            self._note_change(before)

    def count_dropped(self, reason: str) -> None:
        """A waiting frame will never be matched."""
        with self._lock:
            self._dropped[reason] += 1

    def count_reconnect(self, reason: str) -> None:
        """The live source opens its stream again after the connection ended for this reason."""
        with self._lock:
            self._reconnects[reason] += 1

    def add_gap(self, seconds: float) -> None:
        """So many seconds of the stream were never received."""
        with self._lock:
            self._gap_s += seconds

    def set_lag(self, lag_s: float) -> None:
        with self._lock:
            self._lag_s = lag_s

    @property
    def _state(self) -> str:
        return _state(self._has_ended, self._source_state, self._n_processed)

    def _note_change(self, before: str) -> None:
        if self._state != before:
            self._since = datetime.now(UTC)


def _state(has_ended: bool, source_state: str | None, n_processed: int) -> str:
    if has_ended:
        return "ended"
    return source_state or ("up" if n_processed else "starting")


class ChannelStatuses:
    """The statuses of all channels of a process, by name; any thread may call."""

    def __init__(self) -> None:
        self._statuses: dict[str, ChannelStatus] = {}
        self._lock = threading.Lock()

    def of(self, channel: str) -> ChannelStatus:
        """The status of the channel; a new one where there is none."""
        with self._lock:
            return self._statuses.setdefault(channel, ChannelStatus(channel))

    def forget(self, channel: str) -> None:
        """Drops the status of a channel that is no longer monitored. What is still written to it is not exported."""
        with self._lock:
            self._statuses.pop(channel, None)

    def reports(self) -> list[ChannelReport]:
        """One report per channel, in the order in which the channels were added."""
        with self._lock:
            statuses = list(self._statuses.values())
        return [status.report() for status in statuses]
