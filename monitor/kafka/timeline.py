"""Places one channel's records on stream time: in which epoch, at which second, or why the record is dropped.

Everything follows from the records themselves, so a replay gives the same places. Two producers of one channel, or a
restarted one, share an epoch if their clocks start within 10 s of each other; clocks are not known more exactly. A
second is used once, and never one older than the newest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from monitor.ingest.clock import MAX_JUMP_S, MAX_SILENCE_S, ChannelEpoch, StreamClock
from monitor.kafka.records import MS, FrameRecord, epoch_time
from monitor.ops.timestamps import rfc3339

MAX_LEFT_EPOCHS = 16  # remembered, so that late records of them are recognised
MAX_HOLE_S = 3600  # of a recording, which has no wall clock; after a longer hole the window starts afresh


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a record in stream time."""

    epoch: ChannelEpoch
    second: int


class Timeline:
    """The stream time of one channel."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.newest: Place | None = None
        self._left: dict[str, tuple[int, int]] = {}  # epoch -> its last second, time it was left (ms)
        self._clock: StreamClock | None = None  # for a producer that names no epoch

    def place(self, record: FrameRecord) -> Place | str:
        """The record's place, or the reason why it is dropped: repeated, backward, late."""
        place = self._by_clock(record) if record.epoch is None else self._by_name(record, record.epoch)
        if isinstance(place, Place):
            self.newest = place
        return place

    def position(self) -> dict[str, Any]:
        """The state for `resume`, as plain values."""
        position: dict[str, Any] = {"left": [[name, *when] for name, when in self._left.items()]}
        if self._clock is not None:
            position["clock"] = self._clock.position()
        if self.newest is not None:
            epoch = self.newest.epoch
            began_at = None if epoch.began_at is None else epoch.began_at.isoformat()
            position |= {
                "epoch": epoch.name,
                "first_s": epoch.first_s,
                "began_at": began_at,
                "second": self.newest.second,
            }
        return position

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continues from a position."""
        self._left = {name: (last_s, at_ms) for name, last_s, at_ms in position["left"]}
        if "clock" in position:
            self._clock = StreamClock(self.channel)
            self._clock.resume(position["clock"])
        if "epoch" in position:
            began_at = None if position["began_at"] is None else datetime.fromisoformat(position["began_at"])
            epoch = ChannelEpoch(self.channel, position["epoch"], began_at, position["first_s"])
            self.newest = Place(epoch, position["second"])

    def _by_clock(self, record: FrameRecord) -> Place | str:
        if self._clock is None:
            self._clock = StreamClock(self.channel)
        epoch, stream_s = self._clock.place(record.pts_ms / MS, record.seen_at)
        second, newest = math.floor(stream_s), self.newest
        if newest is not None and _is_same_epoch(newest.epoch.name, epoch.name):
            return Place(epoch, second) if second > newest.second else _drop_reason(second, newest.second)
        return self._enter(Place(epoch, second), record.seen_at)

    def _by_name(self, record: FrameRecord, name: str) -> Place | str:
        second, newest = record.pts_ms // MS, self.newest
        if newest is None or not _is_same_epoch(newest.epoch.name, name):
            began_at = epoch_time(name)
            epoch_name = name if began_at is None else rfc3339(began_at)
            epoch = ChannelEpoch(self.channel, epoch_name, record.began_at or began_at, second)
            return self._enter(Place(epoch, second), record.seen_at)
        if second <= newest.second:
            return _drop_reason(second, newest.second)
        epoch = newest.epoch if record.began_at is None else replace(newest.epoch, began_at=record.began_at)
        max_hole_s = MAX_HOLE_S if epoch.began_at is None else MAX_SILENCE_S
        if second - newest.second > max_hole_s:  # open segments are over, though the clock continues
            epoch = replace(epoch, first_s=second)
        return Place(epoch, second)

    def _enter(self, place: Place, seen_at: datetime) -> Place | str:
        """Changes to another epoch, unless that was left just now or had this second already."""
        at_ms = round(seen_at.timestamp() * MS)
        known = next((left for left in self._left if _is_same_epoch(left, place.epoch.name)), None)
        if known is not None:
            last_s, left_ms = self._left[known]
            if place.second <= last_s or at_ms - left_ms < MAX_JUMP_S * MS:
                return "late"
            del self._left[known]
        if self.newest is not None:
            self._left[self.newest.epoch.name] = (self.newest.second, at_ms)
            self._left = dict(list(self._left.items())[-MAX_LEFT_EPOCHS:])
        return place


def _drop_reason(second: int, newest_s: int) -> str:
    return "repeated" if second == newest_s else "backward"


def _is_same_epoch(one: str, other: str) -> bool:
    """Whether two epochs have the same clock: the same name, or nearly the same start."""
    if one == other:
        return True
    start, other_start = epoch_time(one), epoch_time(other)
    if start is None or other_start is None:
        return False
    return abs((start - other_start).total_seconds()) <= MAX_JUMP_S
