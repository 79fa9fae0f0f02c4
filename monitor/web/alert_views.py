"""Alerts as the API shows them: the last event of each, with its review and whether there is evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from monitor.alerting.alerts import ENDED, RETRACTED
from monitor.alerting.outbox import Event
from monitor.evidence.store import EvidenceStore
from monitor.rights.store import RightsStore


class GapOut(BaseModel):
    """Seconds of the channel that are missing."""

    at: float
    seconds: float
    reason: str


class PauseOut(BaseModel):
    """Seconds within the alert that show something else."""

    at: float
    seconds: float


class VersionOut(BaseModel):
    """Another reference that shows the same pictures, and where it matches."""

    reference: str
    reference_start: float
    reference_end: float
    score: float


class ReviewOut(BaseModel):
    """A person's decision on an alert."""

    decision: str
    by: str
    at: str
    note: str


class AlertOut(BaseModel):
    """One alert as last emitted. Times without a zone are seconds of channel or reference."""

    id: str
    type: str
    seq: int
    channel: str
    reference: str
    title: str
    owner: str
    channel_start: float
    channel_end: float
    started_at: str | None
    ended_at: str | None
    detected_at: float
    reference_start: float
    reference_end: float
    speed: float | None
    confidence: float | None = Field(description="The chance that the alert is right; null for alerts of old versions.")
    score: float = Field(description="The method's own number: mean of similarity times mask, less for short copies.")
    matched_seconds: int
    coverage_channel: float
    coverage_reference: float
    gaps: list[GapOut]
    licence: str | None
    model: str
    evidence: str | None
    pauses: list[PauseOut]
    continues: str | None
    reason: str | None
    ambiguous: bool
    alternatives: list[tuple[float, float]]
    versions: list[VersionOut]
    status: Literal["open", "ended", "retracted"]
    emitted_at: str
    review: ReviewOut | None
    has_evidence: bool


def alert_views(events: Sequence[Event], rights: RightsStore, evidence: EvidenceStore) -> list[AlertOut]:
    """The alert of each event, in this order, with its latest review."""
    reviews = rights.latest_reviews([event.alert.id for event in events])
    views = []
    for event in events:
        review = reviews.get(event.alert.id)
        more = {
            "status": {ENDED: "ended", RETRACTED: "retracted"}.get(event.alert.type, "open"),
            "emitted_at": event.emitted_at,
            "review": None if review is None else review.as_dict(),
            "has_evidence": evidence.has(event.alert.id),
        }
        views.append(AlertOut.model_validate({**event.alert.as_dict(), **more}))
    return views
