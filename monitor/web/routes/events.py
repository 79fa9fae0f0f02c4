"""`/events`: server-sent events of alerts, reviews, channels and references, as they happen."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query
from sse_starlette import EventSourceResponse

from monitor.web.context import Context, CurrentCaller
from monitor.web.event_feed import Listener
from monitor.web.requests.problems import ERROR_RESPONSES, Problem

MAX_LISTENERS = 200
MAX_PER_TOKEN = 50  # so that one token's listeners do not keep out all others
PING_S = 15
SEND_S = 30.0  # that a listener's connection may be stuck

router = APIRouter(tags=["events"], responses=ERROR_RESPONSES)


@router.get(
    "/api/v1/events",
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    response_class=EventSourceResponse,
)
async def listen(
    context: Context,
    caller: CurrentCaller,
    last_event_id: Annotated[str | None, Header(max_length=20, pattern=r"^[0-9]*$")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="Like Last-Event-ID, for programs.")] = None,
) -> EventSourceResponse:
    """Server-sent events: alert.started, updated, ended, retracted, reviewed; channel; reference."""
    if context.feed.n_listeners >= MAX_LISTENERS:
        raise Problem(429, f"{MAX_LISTENERS} listeners are already connected; try again later.", {"Retry-After": "10"})
    if context.feed.n_of(caller.name) >= MAX_PER_TOKEN:
        detail = f"{MAX_PER_TOKEN} listeners with this token are already connected; try again later."
        raise Problem(429, detail, {"Retry-After": "10"})
    newest = await asyncio.to_thread(context.feed.newest)  # before the response starts, so that no event is lost
    since = int(last_event_id) if last_event_id else newest if after is None else after
    listener = Listener(caller.name, partial(context.gatekeeper.is_current, caller))
    return EventSourceResponse(context.feed.listen(since, listener), ping=PING_S, send_timeout=SEND_S)
