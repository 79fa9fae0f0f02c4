"""Stream time: raw presentation times in, seconds of one unbroken clock out.

MPEG time stamps wrap every 26.5 hours and FFmpeg unwraps them once only, so they are unwrapped here. A jump of
more than 10 s that arrival does not explain, or a silence of more than 30 s, begins a new epoch: time is never
stretched over it. Arrival times come in as arguments; nothing here looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

WRAP_S = 2**33 / 90_000  # the 33-bit time stamps of MPEG-TS at 90 kHz
MAX_JUMP_S = 10.0
MAX_SILENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class ChannelEpoch:
    """A stretch of a channel with one unbroken clock; after a silence the same clock may begin another.

    `began_at` is the wall time of its second 0; a file has none. `first_s` is the first second that was seen of it.
    """

    channel: str
    name: str
    began_at: datetime | None
    first_s: int = 0

    def wall_time(self, second: float) -> str | None:
        """RFC 3339 in UTC."""
        if self.began_at is None:
            return None
        return _rfc3339(self.began_at + timedelta(seconds=second))


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class StreamClock:
    """Places the pictures of one channel on stream time, epoch by epoch."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.epoch: ChannelEpoch | None = None
        self._laps_s = 0.0  # added to raw times since they wrapped
        self._last_s = 0.0
        self._last_arrival: datetime | None = None

    def place(self, pts_s: float, arrived_at: datetime) -> tuple[ChannelEpoch, float]:
        """The epoch this picture belongs to and its stream time in it."""
        stream_s = pts_s + self._laps_s
        if self.epoch is not None and stream_s - self._last_s < -WRAP_S / 2:
            self._laps_s += WRAP_S
            stream_s += WRAP_S
        if self.epoch is None or self._is_broken(stream_s, arrived_at):
            self._laps_s, stream_s = 0.0, pts_s
            self.epoch = self._begin(pts_s, arrived_at)
        self._last_s, self._last_arrival = stream_s, arrived_at
        return self.epoch, stream_s

    def position(self) -> dict[str, Any]:
        """Where the clock stands, as plain values: all that `resume` needs."""
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
        """Goes on from there: the next picture continues the epoch or begins another, by the rules of any other."""
        began_at = datetime.fromisoformat(position["began_at"])
        self.epoch = ChannelEpoch(self.channel, position["epoch"], began_at, position["first_s"])
        self._laps_s, self._last_s = position["laps_s"], position["last_s"]
        self._last_arrival = datetime.fromisoformat(position["last_arrival"])

    def _is_broken(self, stream_s: float, arrived_at: datetime) -> bool:
        assert self._last_arrival is not None
        waited_s = (arrived_at - self._last_arrival).total_seconds()
        moved_s = stream_s - self._last_s
        jumped = abs(moved_s) > MAX_JUMP_S and abs(moved_s - waited_s) > MAX_JUMP_S
        return jumped or waited_s > MAX_SILENCE_S

    def _begin(self, pts_s: float, arrived_at: datetime) -> ChannelEpoch:
        began_at = (arrived_at.astimezone(UTC) - timedelta(seconds=pts_s)).replace(microsecond=0)
        return ChannelEpoch(self.channel, _rfc3339(began_at), began_at, math.floor(pts_s))
