"""Rules: what the desk has decided, as one immutable whole that a channel's thinking asks.

A licence covers a reference, an owner or a tag on a channel or on all, for a time or for good; what it covers is told
as a licensed play, never hidden. An exclusion is a span of a reference that never alerts. A review is what a person
said of one alert. Nothing here looks at a clock or a file: the same air, library and rules tell the same alerts.
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
REVIEWED = "reviewed"  # the licence of an alert that a person called licensed
WINDOW_SLACK = timedelta(seconds=60)  # a stream arrives late and its ends are read to some seconds


@dataclass(frozen=True, slots=True)
class Licence:
    """A permission: of what, where and when. What is None does not matter; of what is named, all must fit."""

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
        """Whether it permits this play. One without a wall clock (a file) fits no window of time."""
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


@dataclass(frozen=True, slots=True)
class Review:
    """What somebody said of an alert; the newest counts and the older ones are kept. `n` rises with each."""

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
    """All that is decided, at one moment."""

    licences: Sequence[Licence] = ()
    exclusions: Mapping[ReferenceId, Sequence[tuple[float, float]]] = field(default_factory=dict)  # spans, half-open
    verdicts: Mapping[str, str] = field(default_factory=dict)  # alert id -> the decision that counts

    def licence(
        self, alert_id: str, reference: Reference, channel: str, began: datetime | None, ended: datetime | None
    ) -> str | None:
        """What permits this play: the oldest licence that covers it, or the word of a reviewer."""
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
