"""Alert events: what an alert states at one moment, and what a review makes of one that is over.

An alert has one id for life and its events are numbered. `AlertBook` (`alert_book.py`) builds them from segments;
`after_review` builds the event that follows a review of an ended alert. Every field states what was known by then; what
is not known is None.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, Self

from monitor.matching.stitching import Seconds
from monitor.ops.timestamps import rfc3339
from monitor.rights.rules import CONFIRMED, FALSE, LICENSED, REVIEWED
from reference_db.store.catalog import ReferenceId

STARTED, UPDATED, ENDED, RETRACTED = "alert.started", "alert.updated", "alert.ended", "alert.retracted"
REVIEWED_FALSE, REVIEWED_TRUE = "reviewed: false positive", "reviewed: not a false positive"


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds of a channel that were not seen."""

    at: Seconds
    seconds: Seconds
    reason: str

    def touches(self, start_s: float, end_s: float) -> bool:
        """Whether it overlaps or adjoins this span; a copy may reach into an adjoining gap."""
        return self.at <= end_s + 1 and self.at + self.seconds >= start_s - 1


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds of a channel within an alert that were seen and show something else, such as a short advert."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Version:
    """Another reference that shows the same pictures, such as a shorter cut of a spot, and where it matches."""

    reference: ReferenceId
    reference_start: float
    reference_end: float
    score: float


@dataclass(frozen=True, slots=True)
class Alert:
    """One event of an alert: the copy as known by then. Times without a zone are channel or reference seconds."""

    id: str
    type: str
    seq: int
    channel: str
    reference: ReferenceId
    title: str
    owner: str
    channel_start: float
    channel_end: float
    started_at: str | None  # RFC 3339 UTC; None where the channel is a file and has no wall clock
    ended_at: str | None
    detected_at: float  # the newest stream second that had to be seen before the alert could be emitted
    reference_start: float
    reference_end: float
    speed: float | None  # reference seconds per channel second; None for a short copy or an uncertain place
    confidence: float | None  # the chance that it is right; None for an alert of a version that did not state it
    score: float
    matched_seconds: int
    coverage_channel: float
    coverage_reference: float
    gaps: tuple[Gap, ...]
    licence: str | None
    model: str
    evidence: str | None
    pauses: tuple[Pause, ...] = ()
    continues: str | None = None  # id of the alert that this one resumes after a break
    reason: str | None = None  # why it ended or was retracted, if the copy did not simply end
    ambiguous: bool = False  # whether the reference shows the same in several places, listed in `alternatives`
    alternatives: tuple[tuple[float, float], ...] = ()  # further [reference_start, reference_end] that fit as well
    versions: tuple[Version, ...] = ()  # other references that show the same pictures

    def as_dict(self) -> dict[str, object]:
        """Plain values, in the order of the fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The alert of these values; fields of a later version are ignored."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        known.setdefault("confidence", None)
        known["gaps"] = tuple(Gap(**gap) for gap in values["gaps"])
        known["pauses"] = tuple(Pause(**pause) for pause in values.get("pauses", ()))
        known["alternatives"] = tuple((start, end) for start, end in values.get("alternatives", ()))
        known["versions"] = tuple(Version(**version) for version in values.get("versions", ()))
        return cls(**known)

    def ended(self, reason: str) -> Alert:
        """The final event of an alert whose channel or segment is gone, built from the last one emitted."""
        ended_at = None
        if self.started_at is not None:
            seconds = timedelta(seconds=round(self.channel_end - self.channel_start))
            ended_at = rfc3339(datetime.fromisoformat(self.started_at) + seconds)
        return replace(self, type=ENDED, seq=self.seq + 1, ended_at=ended_at, reason=reason)

    def retracted(self, reason: str) -> Alert:
        """The event after this one that withdraws the alert."""
        return replace(self, type=RETRACTED, seq=self.seq + 1, reason=reason)


def after_review(last: Alert, decision: str) -> Alert | None:
    """The event that a review leads to, given the last one of an alert that is over; None if nothing changes."""
    if decision == FALSE:
        return last.retracted(REVIEWED_FALSE) if last.type == ENDED else None
    licence = REVIEWED if decision == LICENSED else last.licence
    if decision == CONFIRMED and last.licence == REVIEWED:
        licence = None
    if last.type == RETRACTED and last.reason == REVIEWED_FALSE:
        return replace(last.ended(REVIEWED_TRUE), licence=licence)
    if last.type == ENDED and licence != last.licence and last.licence in (None, REVIEWED):
        return replace(last, seq=last.seq + 1, licence=licence)
    return None
