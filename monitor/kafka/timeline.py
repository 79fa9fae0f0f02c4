"""One channel's records on stream time: which epoch, which second, or why the record is passed over.

All follows from the records themselves, so a replay decides alike. Two producers of one channel, or one that was
started anew, agree on an epoch when their clocks begin within 10 s of each other, which is as well as anybody can
tell. A second is taken once, and never one older than the newest.
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

LEFT_KEPT = 16  # epochs that are remembered after they were left
MAX_HOLE_S = 3600  # of a recording, which has no wall clock: longer ones are passed over second by second in vain


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record belongs."""

    epoch: ChannelEpoch
    second: int


class Timeline:
    """The stream time of one channel."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.newest: Place | None = None
        self._left: dict[str, tuple[int, int]] = {}  # epoch -> its last second, when it was left (ms)
        self._clock: StreamClock | None = None  # of a producer that names no epoch

    def place(self, record: FrameRecord) -> Place | str:
        """The record's place, or the word for why it is passed over: repeated, backward, late."""
        found = self._by_clock(record) if record.epoch is None else self._by_name(record, record.epoch)
        if isinstance(found, Place):
            self.newest = found
        return found

    def position(self) -> dict[str, Any]:
        """All that `resume` needs, as plain values."""
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
        """Goes on from there."""
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
        if newest is not None and _is_same(newest.epoch.name, epoch.name):
            return Place(epoch, second) if second > newest.second else _behind(second, newest.second)
        return self._enter(Place(epoch, second), record.seen_at)

    def _by_name(self, record: FrameRecord, name: str) -> Place | str:
        second, newest = record.pts_ms // MS, self.newest
        if newest is None or not _is_same(newest.epoch.name, name):
            began_at = epoch_time(name)
            word = name if began_at is None else rfc3339(began_at)
            epoch = ChannelEpoch(self.channel, word, record.began_at or began_at, second)
            return self._enter(Place(epoch, second), record.seen_at)
        if second <= newest.second:
            return _behind(second, newest.second)
        epoch = newest.epoch if record.began_at is None else replace(newest.epoch, began_at=record.began_at)
        patience_s = MAX_HOLE_S if epoch.began_at is None else MAX_SILENCE_S
        if second - newest.second > patience_s:  # what was on air is over, though the clock goes on
            epoch = replace(epoch, first_s=second)
        return Place(epoch, second)

    def _enter(self, place: Place, seen_at: datetime) -> Place | str:
        """Leaves the epoch that was on for another one, unless that was left just now, or has had this second."""
        at_ms = round(seen_at.timestamp() * MS)
        known = next((left for left in self._left if _is_same(left, place.epoch.name)), None)
        if known is not None:
            last_s, left_ms = self._left[known]
            if place.second <= last_s or at_ms - left_ms < MAX_JUMP_S * MS:
                return "late"
            del self._left[known]
        if self.newest is not None:
            self._left[self.newest.epoch.name] = (self.newest.second, at_ms)
            self._left = dict(list(self._left.items())[-LEFT_KEPT:])
        return place


def _behind(second: int, newest_s: int) -> str:
    return "repeated" if second == newest_s else "backward"


def _is_same(one: str, other: str) -> bool:
    """Whether two epochs are one clock: the same word, or about the same beginning."""
    if one == other:
        return True
    begun, began = epoch_time(one), epoch_time(other)
    if begun is None or began is None:
        return False
    return abs((begun - began).total_seconds()) <= MAX_JUMP_S
