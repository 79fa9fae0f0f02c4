"""`/alerts`: the alerts, newest first; the events of each; reviews by people."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from monitor.alerting.alerts import RETRACTED
from monitor.alerting.outbox import AlertStatus, Event
from monitor.ops.change_signal import watch
from monitor.web.alert_views import AlertOut, ReviewOut, alert_views
from monitor.web.context import AppContext, Context, CurrentCaller, CurrentTrail
from monitor.web.requests.paging import Cursor, Limit, Moment, Page, cursor_of, number_of
from monitor.web.requests.problems import ERROR_RESPONSES, not_found

MAX_SCANS = 20  # pages read from the history for one page that is filtered by review
MAX_REVIEWED = 200  # alerts reviewed in one request
APPLIED_S = 3.0  # a running monitor retracts an open alert with the channel's next second
AlertId = Annotated[str, Path(pattern=r"^[0-9a-f]{24}$")]
Since = Annotated[Moment | None, Query(description="RFC 3339.")]

router = APIRouter(tags=["alerts"], responses=ERROR_RESPONSES)


class ReviewIn(BaseModel):
    """A decision on an alert."""

    decision: Literal["confirmed", "false", "licensed"]
    note: str = Field(default="", max_length=1000)


class ReviewsIn(ReviewIn):
    """One decision on many alerts."""

    ids: list[Annotated[str, Field(pattern=r"^[0-9a-f]{24}$")]] = Field(min_length=1, max_length=MAX_REVIEWED)


class AlertEventOut(BaseModel):
    """One event of an alert."""

    n: int
    seq: int
    type: str
    emitted_at: str
    confidence: float | None
    score: float


class AlertStory(AlertOut):
    """An alert with all its events and reviews."""

    events: list[AlertEventOut]
    reviews: list[ReviewOut] = Field(description="All reviews, oldest first; the last one counts.")
    reference_seconds: int | None = Field(description="Length of the reference; null if it was removed.")
    min_confidence: float = Field(description="Confidence from which on this monitor emits alerts.")


class ReviewedOut(BaseModel):
    """The alerts after the review, in the order of the request."""

    items: list[AlertOut]


@router.get("/api/v1/alerts")
def list_alerts(
    context: Context,
    channel: Annotated[str | None, Query(max_length=64)] = None,
    reference: Annotated[str | None, Query(max_length=128)] = None,
    owner: Annotated[str | None, Query(max_length=1000)] = None,
    status: Annotated[AlertStatus | None, Query(description="`valid`: open or ended, not retracted.")] = None,
    review: Literal["none", "confirmed", "false", "licensed"] | None = None,
    licensed: bool | None = None,
    min_confidence: Annotated[float | None, Query(ge=0, le=1)] = None,
    since: Since = None,
    until: Since = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[AlertOut]:
    """Alerts, newest first. A page may be shorter than `limit`; `next` says whether there are more."""
    read = partial(
        context.history.alerts,
        limit=limit + 1,
        channel=channel,
        reference=reference,
        owner=owner,
        status=status,
        licensed=licensed,
        min_confidence=min_confidence,
        since=_utc(since),
        until=_utc(until),
    )
    items: list[AlertOut] = []
    before, has_more = number_of(cursor), True
    for _ in range(MAX_SCANS):  # reviews are in another store, so pages are read until enough alerts match
        found = read(before=before)
        has_more = len(found) > limit
        views = _views([event for _, event in found[:limit]], context)
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


@router.get("/api/v1/alerts/{id}")
def show_alert(context: Context, id: AlertId) -> AlertStory:
    """One alert with all its events and reviews."""
    return _story(id, context)


@router.post("/api/v1/alerts/{id}/review")
async def review_alert(
    context: Context, caller: CurrentCaller, trail: CurrentTrail, id: AlertId, body: ReviewIn
) -> AlertStory:
    """Stores a decision on an alert; `false` retracts it. The reviewer is the token's name."""
    trail.details = {"decision": body.decision}
    await _review([id], body, caller.name, context)
    return await asyncio.to_thread(_story, id, context)


@router.post("/api/v1/alerts/review")
async def review_alerts(context: Context, caller: CurrentCaller, trail: CurrentTrail, body: ReviewsIn) -> ReviewedOut:
    """Stores one decision on many alerts: on all of them, or on none if one does not exist."""
    ids = list(dict.fromkeys(body.ids))
    trail.alerts, trail.details = ids, {"decision": body.decision, "alerts": len(ids)}
    await _review(ids, body, caller.name, context)
    return ReviewedOut(items=await asyncio.to_thread(lambda: _views([_last(id, context) for id in ids], context)))


async def _review(ids: Sequence[str], review: ReviewIn, by: str, context: AppContext) -> None:
    """Stores the reviews; if they retract alerts, waits up to APPLIED_S until the running monitor has done so."""
    with watch(context.emitted) as emitted:
        before = await asyncio.to_thread(_last_events, ids, context)
        await asyncio.to_thread(context.rights.review_all, ids, review.decision, by, review.note)
        waiting = [id for id, (_, type) in before.items() if review.decision == "false" and type != RETRACTED]
        with suppress(TimeoutError):
            async with asyncio.timeout(APPLIED_S):
                while waiting:
                    await emitted.wait()
                    emitted.clear()
                    now = await asyncio.to_thread(_last_events, waiting, context)
                    waiting = [id for id in waiting if now[id] == before[id]]


def _last_events(ids: Sequence[str], context: AppContext) -> dict[str, tuple[int, str]]:
    """Number and type of each alert's last event."""
    found = {id: _last(id, context).alert for id in ids}
    return {id: (alert.seq, alert.type) for id, alert in found.items()}


def _last(id: str, context: AppContext) -> Event:
    events = context.history.alert(id)
    if not events:
        raise not_found(f"alert {id}")
    return events[-1]


def _story(id: str, context: AppContext) -> AlertStory:
    events = context.history.alert(id)
    if not events:
        raise not_found(f"alert {id}")
    lengths = {one.id: one.n_seconds for one in context.library.index.references}
    event_views = [
        AlertEventOut(
            n=one.n,
            seq=one.alert.seq,
            type=one.alert.type,
            emitted_at=one.emitted_at,
            confidence=one.alert.confidence,
            score=one.alert.score,
        )
        for one in events
    ]
    (view,) = _views(events[-1:], context)
    seconds = lengths.get(events[-1].alert.reference)
    reviews = [ReviewOut.model_validate(review.as_dict()) for review in context.rights.reviews(id)]
    return AlertStory(
        **view.model_dump(),
        events=event_views,
        reviews=reviews,
        reference_seconds=seconds,
        min_confidence=context.settings.alerting.min_confidence,
    )


def _views(events: Sequence[Event], context: AppContext) -> list[AlertOut]:
    return alert_views(events, context.rights, context.evidence)


def _utc(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()
