"""Rules: licences, exclusions and reviews as one immutable value that every channel's alerts obey.

A licence covers a reference, an owner or a tag, on one channel or all, for a time or for good; a play that it covers is
emitted as a licensed alert, never hidden. An exclusion is a span of a reference that never alerts. A review is a
person's verdict on one alert. Nothing here reads a clock or a file: the same broadcast, library and rules give the same
alerts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from monitor.ops.timestamps import rfc3339
from reference_db.store.catalog import Reference, ReferenceId

CONFIRMED, FALSE, LICENSED = "confirmed", "false", "licensed"
DECISIONS = (CONFIRMED, FALSE, LICENSED)
ANY_CHANNEL = "*"
REVIEWED = "reviewed"  # the licence of an alert that a reviewer called licensed
WINDOW_SLACK = timedelta(seconds=60)  # streams arrive late, and ends are known only to a few seconds


@dataclass(frozen=True, slots=True)
class Licence:
    """A permission to air something. A field that is None matches everything; all others must match."""

    id: str
    reference: str | None
    owner: str | None
    tag: str | None  # "key=value"
    channel: str  # a channel's name, or "*" for all
    from_: datetime | None  # aware UTC
    until: datetime | None
    note: str
    added_at: datetime

    def covers(self, reference: Reference, channel: str, began: datetime | None, ended: datetime | None) -> bool:
        """Whether it permits this play. A play without a wall clock (a file) is in no time window."""
        if self.channel not in (ANY_CHANNEL, channel) or self.reference not in (None, reference.id):
            return False
        if self.owner not in (None, reference.owner):
            return False
        if self.tag is not None and self.tag not in {f"{key}={value}" for key, value in reference.tags.items()}:
            return False
        from_too_late = self.from_ is not None and (began is None or began < self.from_ - WINDOW_SLACK)
        until_too_early = self.until is not None and (ended is None or ended > self.until + WINDOW_SLACK)
        return not from_too_late and not until_too_early

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_` is called `from`."""
        values = {name.rstrip("_"): value for name, value in asdict(self).items()}
        return values | {name: _plain(values[name]) for name in ("from", "until", "added_at")}

    @property
    def terms(self) -> dict[str, str]:
        """What it permits, where and when, without the fields that match everything."""
        names = ("reference", "owner", "tag", "channel", "from", "until")
        return {name: value for name, value in self.as_dict().items() if name in names and value is not None}


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A span of a reference that never alerts: an ident, end credits."""

    id: int
    reference: str
    start_s: float
    end_s: float
    note: str
    added_at: datetime

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"added_at": _plain(self.added_at)}

    @property
    def span(self) -> str:
        return f"{self.start_s:g}-{self.end_s:g} s"


@dataclass(frozen=True, slots=True)
class Review:
    """A person's verdict on an alert; the newest counts, older ones stay on record. `n` rises with each."""

    n: int
    alert_id: str
    decision: str
    by: str
    at: datetime
    note: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"at": _plain(self.at)}


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """All licences, exclusions and newest reviews at one moment."""

    licences: Sequence[Licence] = ()
    exclusions: Mapping[ReferenceId, Sequence[tuple[float, float]]] = field(default_factory=dict)  # spans, half-open
    verdicts: Mapping[str, str] = field(default_factory=dict)  # alert id -> decision of its newest review

    def licence(
        self, alert_id: str, reference: Reference, channel: str, began: datetime | None, ended: datetime | None
    ) -> str | None:
        """The id of the oldest licence that covers this play, REVIEWED if a reviewer called it licensed, or None."""
        for licence in self.licences:
            if licence.covers(reference, channel, began, ended):
                return licence.id
        return REVIEWED if self.verdicts.get(alert_id) == LICENSED else None

    def is_rejected(self, alert_id: str) -> bool:
        """Whether a reviewer called it a false positive."""
        return self.verdicts.get(alert_id) == FALSE

    def excluded(self, reference: ReferenceId) -> Sequence[tuple[float, float]]:
        """Spans of this reference that never alert."""
        return self.exclusions.get(reference, ())


NO_RULES = Rules()


def _plain(moment: datetime | None) -> str | None:
    return None if moment is None else rfc3339(moment)
