"""Stream time: raw presentation times in, seconds of one continuous clock out.

MPEG time stamps wrap every 26.5 hours and FFmpeg unwraps them only once, so they are unwrapped here. A jump of more
than 10 s that arrival times do not explain, or a silence of more than 30 s, starts a new epoch: time is never stretched
over it. The seconds of a source whose clock runs fast or slow stay as they are; the wall time shown for them follows
the arrivals slowly. Arrival times are arguments; nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from monitor.ops.timestamps import rfc3339

WRAP_S = 2**33 / 90_000  # the 33-bit time stamps of MPEG-TS at 90 kHz
MAX_JUMP_S = 10.0
MAX_SILENCE_S = 30.0
SLEW_EVERY_S = 300.0  # the earliest arrival of such a period shows how far the two clocks have drifted apart
SLEW_RATE = 0.001  # seconds per second; a longer delay after a reconnect is not taken for drift at once
SHOWN_S = 0.5  # drift from which shown times are corrected
WALL_STEP_S = 1.0  # from which the clock of this machine was set


@dataclass(frozen=True, slots=True)
class ChannelEpoch:
    """A period of a channel with one continuous clock; after a silence the same clock may start another.

    `began_at` is the wall time of second 0, as well as it is known so far; a file has none. `first_s` is the first
    second that was received.
    """

    channel: str
    name: str
    began_at: datetime | None = field(compare=False)
    first_s: int = 0

    def wall_time(self, second: float) -> str | None:
        """RFC 3339 in UTC."""
        if self.began_at is None:
            return None
        return rfc3339(self.began_at + timedelta(seconds=second))


class StreamClock:
    """Places the frames of one channel on stream time, epoch by epoch."""

    def __init__(self, channel: str, *, max_silence_s: float = MAX_SILENCE_S) -> None:
        self.channel = channel
        self.epoch: ChannelEpoch | None = None
        self._max_silence_s = max_silence_s
        self._laps_s = 0.0  # added to raw times because they wrapped
        self._last_s = 0.0
        self._last_arrival: datetime | None = None
        self._last_steady_s: float | None = None
        self._drift = _Drift()

    def place(self, pts_s: float, arrived_at: datetime, steady_s: float | None = None) -> tuple[ChannelEpoch, float]:
        """The epoch of this frame and its stream time in it.

        `steady_s` is the arrival on a monotonic clock; without it `arrived_at` is used.
        """
        stream_s = pts_s + self._laps_s
        if self.epoch is not None and stream_s - self._last_s < -WRAP_S / 2:
            self._laps_s += WRAP_S
            stream_s += WRAP_S
        if self.epoch is None or self._is_broken(stream_s, self._waited_s(arrived_at, steady_s)):
            self._laps_s, stream_s = 0.0, pts_s
            self.epoch = self._new_epoch(pts_s, arrived_at)
            self._drift = _Drift()
            self._drift.push(stream_s, arrived_at.timestamp() if steady_s is None else steady_s)
        else:
            self._correct_wall_time(stream_s, arrived_at, steady_s)
        self._last_s, self._last_arrival, self._last_steady_s = stream_s, arrived_at, steady_s
        return self.epoch, stream_s

    def position(self) -> dict[str, Any]:
        """The state of the clock as plain values, for `resume`."""
        assert self.epoch is not None
        assert self.epoch.began_at is not None
        assert self._last_arrival is not None
        return {
            "epoch": self.epoch.name,
            "began_at": self.epoch.began_at.isoformat(),
            "first_s": self.epoch.first_s,
            "laps_s": self._laps_s,
            "last_s": self._last_s,
            "last_arrival": self._last_arrival.isoformat(),
        }

    def resume(self, position: Mapping[str, Any]) -> None:
        """Restores that state: the next frame continues the epoch or starts another, by the same rules as always."""
        began_at = datetime.fromisoformat(position["began_at"])
        self.epoch = ChannelEpoch(self.channel, position["epoch"], began_at, position["first_s"])
        self._laps_s, self._last_s = position["laps_s"], position["last_s"]
        self._last_arrival, self._last_steady_s = datetime.fromisoformat(position["last_arrival"]), None
        self._drift = _Drift()

    def _waited_s(self, arrived_at: datetime, steady_s: float | None) -> float:
        assert self._last_arrival is not None
        if steady_s is not None and self._last_steady_s is not None:
            return steady_s - self._last_steady_s
        return (arrived_at - self._last_arrival).total_seconds()

    def _is_broken(self, stream_s: float, waited_s: float) -> bool:
        moved_s = stream_s - self._last_s
        jumped = abs(moved_s) > MAX_JUMP_S and abs(moved_s - waited_s) > MAX_JUMP_S
        return jumped or waited_s > self._max_silence_s

    def _new_epoch(self, pts_s: float, arrived_at: datetime) -> ChannelEpoch:
        began_at = (arrived_at.astimezone(UTC) - timedelta(seconds=pts_s - 0.5)).replace(microsecond=0)  # the nearest
        return ChannelEpoch(self.channel, rfc3339(began_at), began_at, math.floor(pts_s))

    def _correct_wall_time(self, stream_s: float, arrived_at: datetime, steady_s: float | None) -> None:
        """Moves the wall time of the epoch after drift or a set clock; its seconds do not change."""
        assert self.epoch is not None
        assert self.epoch.began_at is not None
        assert self._last_arrival is not None
        shift_s = self._drift.push(stream_s, arrived_at.timestamp() if steady_s is None else steady_s)
        if steady_s is not None and self._last_steady_s is not None:
            wall_s = (arrived_at - self._last_arrival).total_seconds() - (steady_s - self._last_steady_s)
            shift_s += wall_s if abs(wall_s) > WALL_STEP_S else 0.0
        if shift_s:
            self.epoch = replace(self.epoch, began_at=self.epoch.began_at + timedelta(seconds=shift_s))


class _Drift:
    """How far arrivals drift from stream time. Only the earliest of a period counts: delays are never negative."""

    def __init__(self) -> None:
        self._first_s: float | None = None  # arrival minus stream time at the start of the epoch
        self._until_s = 0.0
        self._least_s = math.inf
        self._drift_s = 0.0  # so far, slewed
        self._applied_s = 0.0  # of it, to the wall time
        self._is_settled = False

    def push(self, stream_s: float, arrived_s: float) -> float:
        """By how much the wall time has to move now; mostly 0."""
        behind_s = arrived_s - stream_s
        if self._first_s is None:
            self._first_s, self._until_s = behind_s, arrived_s + SLEW_EVERY_S
        self._least_s = min(self._least_s, behind_s)
        if arrived_s < self._until_s:
            return 0.0
        change_s = self._least_s - self._first_s - self._drift_s
        max_s = SLEW_RATE * SLEW_EVERY_S
        # The first frames waited until the decoder was open, so the first correction is made in one step.
        self._drift_s += min(max(change_s, -max_s), max_s) if self._is_settled else change_s
        self._is_settled, self._least_s, self._until_s = True, math.inf, arrived_s + SLEW_EVERY_S
        if abs(self._drift_s - self._applied_s) < SHOWN_S:
            return 0.0
        shift_s, self._applied_s = self._drift_s - self._applied_s, self._drift_s
        return shift_s
