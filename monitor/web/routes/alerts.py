"""`/alerts`: what was told of each copy, the newest first, and how each alert came to be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal

from fastapi import FastAPI, Path, Query, Request
from pydantic import BaseModel, Field

from monitor.alerting.alerts import ENDED, RETRACTED
from monitor.alerting.outbox import Event
from monitor.web.context import AppContext
from monitor.web.requests.paging import Cursor, Limit, Moment, Page, cursor_of, number_of
from monitor.web.requests.problems import MAY_FAIL, not_found

SCANS = 20  # pages read for one, where reviews are asked for
AT_ONCE = 200  # alerts that are reviewed together
SETTLED_S = 3.0  # within which a running monitor has acted on a review
AlertId = Annotated[str, Path(pattern=r"^[0-9a-f]{24}$")]
Since = Annotated[Moment | None, Query(description="RFC 3339.")]


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


class ReviewIn(BaseModel):
    """What a person says of the alert."""

    decision: Literal["confirmed", "false", "licensed"]
    note: str = Field(default="", max_length=1000)


class ReviewsIn(ReviewIn):
    """What a person says of many alerts at once."""

    ids: list[Annotated[str, Field(pattern=r"^[0-9a-f]{24}$")]] = Field(min_length=1, max_length=AT_ONCE)


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
    emitted_at: str
    review: ReviewOut | None
    has_evidence: bool


class AlertEventOut(BaseModel):
    """One event of an alert's life."""

    n: int
    seq: int
    type: str
    emitted_at: str
    score: float


class AlertStory(AlertOut):
    """An alert and its life."""

    events: list[AlertEventOut]
    reviews: list[ReviewOut] = Field(description="All that people said of it, the oldest first; the last one counts.")
    reference_seconds: int | None = Field(description="Length of the reference; null where it is gone.")


class ReviewedOut(BaseModel):
    """The alerts after a review of all of them, in the order that was asked for."""

    items: list[AlertOut]


def add_alerts(api: FastAPI, station: AppContext) -> None:
    @api.get("/api/v1/alerts", responses=MAY_FAIL, tags=["alerts"])
    def list_alerts(
        channel: Annotated[str | None, Query(max_length=64)] = None,
        reference: Annotated[str | None, Query(max_length=128)] = None,
        owner: Annotated[str | None, Query(max_length=1000)] = None,
        status: Literal["open", "ended", "retracted"] | None = None,
        review: Literal["none", "confirmed", "false", "licensed"] | None = None,
        licensed: bool | None = None,
        min_score: Annotated[float | None, Query(ge=0, le=1)] = None,
        since: Since = None,
        until: Since = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Page[AlertOut]:
        """Alerts, the newest first. A page may be shorter than asked for; `next` says whether there are more."""
        read = partial(
            station.history.alerts,
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
        items: list[AlertOut] = []
        before, has_more = number_of(cursor), True
        for _ in range(SCANS):  # reviews are kept elsewhere, so alerts are read until enough of them fit
            found = read(before=before)
            has_more = len(found) > limit
            views = told([event for _, event in found[:limit]], station)
            for (first_n, _), alert in zip(found, views, strict=False):
                if len(items) == limit:
                    has_more = True
                    break
                before = first_n
                if review is None or review == (alert.review.decision if alert.review else "none"):
                    items.append(alert)
            if len(items) == limit or not has_more:
                break
        return Page(items=items, next=cursor_of(before) if has_more and before is not None else None)

    @api.get("/api/v1/alerts/{id}", responses=MAY_FAIL, tags=["alerts"])
    def show_alert(id: AlertId) -> AlertStory:
        """One alert and how it came to be."""
        return _story(id, station)

    @api.post("/api/v1/alerts/{id}/review", responses=MAY_FAIL, tags=["alerts"])
    async def review_alert(id: AlertId, asked: ReviewIn, request: Request) -> AlertStory:
        """Keeps what somebody says of an alert; `false` retracts it. Who said so is the token's name."""
        await _reviewed([id], asked, request.state.caller.name)
        return await asyncio.to_thread(_story, id, station)

    @api.post("/api/v1/alerts/review", responses=MAY_FAIL, tags=["alerts"])
    async def review_alerts(asked: ReviewsIn, request: Request) -> ReviewedOut:
        """Says the same of many alerts at once: of all of them, or, where one is not there, of none."""
        ids = list(dict.fromkeys(asked.ids))
        await _reviewed(ids, asked, request.state.caller.name)
        return ReviewedOut(items=await asyncio.to_thread(lambda: told([_last(id, station) for id in ids], station)))

    async def _reviewed(ids: Sequence[str], asked: ReviewIn, by: str) -> None:
        """Keeps the reviews, and waits a moment for what a running monitor makes of them."""
        before = await asyncio.to_thread(_seqs, ids, station)
        retracted = {id for id, (_, type) in before.items() if type == RETRACTED}
        await asyncio.to_thread(station.rights.review_all, ids, asked.decision, by, asked.note)
        waiting = [id for id in ids if asked.decision == "false" and id not in retracted]
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLED_S
        while waiting and loop.time() < until:
            await asyncio.sleep(0.1)  # the monitor looks at the desk once a second
            now = await asyncio.to_thread(_seqs, waiting, station)
            waiting = [id for id in waiting if now[id] == before[id]]


def _seqs(ids: Sequence[str], station: AppContext) -> dict[str, tuple[int, str]]:
    """Number and type of each alert's last event."""
    found = {id: _last(id, station).alert for id in ids}
    return {id: (alert.seq, alert.type) for id, alert in found.items()}


def _last(id: str, station: AppContext) -> Event:
    events = station.history.alert(id)
    if not events:
        raise not_found(f"alert {id}")
    return events[-1]


def _story(id: str, station: AppContext) -> AlertStory:
    events = station.history.alert(id)
    if not events:
        raise not_found(f"alert {id}")
    lengths = {one.id: one.n_seconds for one in station.library.index.references}
    life = [
        AlertEventOut(n=one.n, seq=one.alert.seq, type=one.alert.type, emitted_at=one.emitted_at, score=one.alert.score)
        for one in events
    ]
    (view,) = told(events[-1:], station)
    seconds = lengths.get(events[-1].alert.reference)
    said = [ReviewOut.model_validate(review.as_dict()) for review in station.rights.reviews(id)]
    return AlertStory(**view.model_dump(), events=life, reviews=said, reference_seconds=seconds)


def told(events: Sequence[Event], station: AppContext) -> list[AlertOut]:
    """The alerts as everybody is told them."""
    reviews = station.rights.latest_reviews([event.alert.id for event in events])
    found = []
    for event in events:
        review = reviews.get(event.alert.id)
        more = {
            "status": {ENDED: "ended", RETRACTED: "retracted"}.get(event.alert.type, "open"),
            "emitted_at": event.emitted_at,
            "review": None if review is None else review.as_dict(),
            "has_evidence": station.evidence.has(event.alert.id),
        }
        found.append(AlertOut.model_validate({**event.alert.as_dict(), **more}))
    return found


def _utc(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()
