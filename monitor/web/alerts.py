"""`/alerts`: what was told of each copy, the newest first, and how each alert came to be."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import FastAPI, Path, Query
from pydantic import AwareDatetime, BaseModel, Field

from monitor.alerting.alerts import ENDED, RETRACTED
from monitor.alerting.outbox import Event
from monitor.web.paging import Cursor, Limit, Page, cursor_of, number_of
from monitor.web.problems import MAY_FAIL, not_found
from monitor.web.station import Station

AlertId = Annotated[str, Path(pattern=r"^[0-9a-f]{24}$")]
Moment = Annotated[AwareDatetime | None, Query(description="RFC 3339.")]


class GapOut(BaseModel):
    """Seconds of the channel that were not seen."""

    at: float
    seconds: float
    reason: str


class PauseOut(BaseModel):
    """Seconds within the alert that show something else."""

    at: float
    seconds: float


class ReviewOut(BaseModel):
    """What a person said of the alert."""

    decision: str
    by: str
    at: str
    note: str


class AlertOut(BaseModel):
    """One alert as it was told last. Times without a zone are seconds of channel or reference."""

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
    speed: float
    score: float
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
    status: Literal["open", "ended", "retracted"]
    told_at: str
    review: ReviewOut | None
    has_evidence: bool


class ToldOut(BaseModel):
    """One event of an alert's life."""

    n: int
    seq: int
    type: str
    told_at: str
    score: float


class AlertStory(AlertOut):
    """An alert and its life."""

    events: list[ToldOut]
    reference_seconds: int | None = Field(description="Length of the reference; null where it is gone.")


def add_alerts(api: FastAPI, station: Station) -> None:
    @api.get("/api/v1/alerts", responses=MAY_FAIL, tags=["alerts"])
    def list_alerts(
        channel: Annotated[str | None, Query(max_length=64)] = None,
        reference: Annotated[str | None, Query(max_length=128)] = None,
        owner: Annotated[str | None, Query(max_length=1000)] = None,
        status: Literal["open", "ended", "retracted"] | None = None,
        review: Literal["none", "confirmed", "false", "licensed"] | None = None,
        licensed: bool | None = None,
        min_score: Annotated[float | None, Query(ge=0, le=1)] = None,
        since: Moment = None,
        until: Moment = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Page[AlertOut]:
        """Alerts, the newest first. A page may be shorter than asked for; `next` says whether there are more."""
        found = station.history.alerts(
            before=number_of(cursor),
            limit=limit + 1,
            channel=channel,
            reference=reference,
            owner=owner,
            status=status,
            licensed=licensed,
            min_score=min_score,
            since=_utc(since),
            until=_utc(until),
        )
        items = [told(event, station) for _, event in found[:limit]]
        return Page(items=items, next=cursor_of(found[limit - 1][0]) if len(found) > limit else None)

    @api.get("/api/v1/alerts/{id}", responses=MAY_FAIL, tags=["alerts"])
    def show_alert(id: AlertId) -> AlertStory:
        """One alert and how it came to be."""
        events = station.history.alert(id)
        if not events:
            raise not_found(f"alert {id}")
        alert = events[-1].alert
        lengths = {one.id: one.n_seconds for one in station.library.index.references}
        story = [
            ToldOut(n=one.n, seq=one.alert.seq, type=one.alert.type, told_at=one.told_at, score=one.alert.score)
            for one in events
        ]
        seconds = lengths.get(alert.reference)
        return AlertStory(**told(events[-1], station).model_dump(), events=story, reference_seconds=seconds)


def told(event: Event, station: Station) -> AlertOut:
    """The alert as everybody is told it."""
    status = {ENDED: "ended", RETRACTED: "retracted"}.get(event.alert.type, "open")
    return AlertOut.model_validate(
        {**event.alert.as_dict(), "status": status, "told_at": event.told_at, "review": None, "has_evidence": False}
    )


def _utc(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()
