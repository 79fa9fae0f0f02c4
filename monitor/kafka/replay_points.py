"""Where a channel can be begun anew and still tell what it told: at a record that nothing known lies near.

The state of a channel may be refused: another version wrote it, other models did, its bytes were damaged. Reading then
goes back to the newest record after which, for long enough, no path was found, open or closed. A watch that knows
nothing and begins there finds the same paths at the same seconds, so the same alerts under the same ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monitor.matching.matcher import BACK_FILL_S
from monitor.matching.tiles import HALO

CLEAR_S = BACK_FILL_S + HALO  # free of paths after a start: as far as a band looks back, and the network before that
KNOWN_S = BACK_FILL_S  # a path that will yet be found begins no longer ago than this
MARK_EVERY_S = 4
LONGEST_S = 3600  # that is ever read again: who is without a pause for longer is not worth the delay of the others


@dataclass(frozen=True, slots=True)
class ReplayPoint:
    """A record that reading can begin at, and where its channel stood on stream time before it."""

    offset: int
    second: int
    position: Mapping[str, Any]  # of the timeline
    seen_at: str | None = None  # when the record before it was seen: what was missed in between is a gap

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ReplayPoints:
    """The newest start of one channel epoch that is known to be safe, and those that may yet be."""

    def __init__(self, safe: ReplayPoint | None = None) -> None:
        self._safe = safe
        self._marks: deque[ReplayPoint] = deque()

    def begin(self, start: ReplayPoint) -> None:
        """An epoch begins: nothing before it matters."""
        self._safe = start
        self._marks.clear()

    def push(self, start: ReplayPoint, spans: Callable[[], Sequence[range]]) -> None:
        """One more second was matched, that of `start`; `spans` has the stream seconds of every path known by now."""
        if self._marks and start.second - self._marks[-1].second < MARK_EVERY_S:
            return
        self._marks.append(start)
        while self._marks and self._marks[0].second + CLEAR_S + KNOWN_S <= start.second:
            mark = self._marks.popleft()
            if all(span.stop <= mark.second or mark.second + CLEAR_S <= span.start for span in spans()):
                self._safe = mark

    def safe(self, newest_s: int) -> ReplayPoint | None:
        """Where to begin anew, unless that is too long ago."""
        safe = self._safe
        return safe if safe is not None and newest_s - safe.second <= LONGEST_S else None
