"""Replay points: records from which a channel without state finds the same alerts again.

The state of a channel may be refused: another version or other models wrote it, or its bytes are damaged. Reading then
goes back to the newest record after which, for long enough, no path was found, open or closed. A new channel monitor
that starts there finds the same paths at the same seconds, so the same alerts with the same ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monitor.matching.matcher import BACK_FILL_S
from monitor.matching.tiles import HALO

CLEAR_S = BACK_FILL_S + HALO  # without paths after the point: as far as a band looks back, and the network before it
KNOWN_S = BACK_FILL_S  # a path that is found later starts no longer ago than this
CANDIDATE_EVERY_S = 4
MAX_REPLAY_S = 3600  # a longer replay would delay the other channels too much


@dataclass(frozen=True, slots=True)
class ReplayPoint:
    """A record to start reading at, and the channel's position on stream time before it."""

    offset: int
    second: int
    position: Mapping[str, Any]  # of the timeline
    seen_at: str | None = None  # arrival of the previous record: the time in between is a gap

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ReplayPoints:
    """The newest safe point of one channel epoch, and the candidates after it."""

    def __init__(self, safe: ReplayPoint | None = None) -> None:
        self._safe = safe
        self._candidates: deque[ReplayPoint] = deque()

    def start_epoch(self, point: ReplayPoint) -> None:
        """The first record of an epoch is safe: no path crosses it."""
        self._safe = point
        self._candidates.clear()

    def push(self, point: ReplayPoint, spans: Callable[[], Sequence[range]]) -> None:
        """The second of `point` was matched; `spans` returns the stream seconds of every path found so far."""
        if self._candidates and point.second - self._candidates[-1].second < CANDIDATE_EVERY_S:
            return
        self._candidates.append(point)
        while self._candidates and self._candidates[0].second + CLEAR_S + KNOWN_S <= point.second:
            candidate = self._candidates.popleft()
            start_s = candidate.second
            if all(span.stop <= start_s or start_s + CLEAR_S <= span.start for span in spans()):
                self._safe = candidate

    def newest_safe(self, newest_s: int) -> ReplayPoint | None:
        """The point to replay from, unless it is too long ago."""
        safe = self._safe
        return safe if safe is not None and newest_s - safe.second <= MAX_REPLAY_S else None
