"""`/webhooks`: the receivers of alert events over HTTP, and the outcome of every delivery."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from monitor.web.context import Context, CurrentTrail
from monitor.web.requests.paging import Cursor, Limit, Page, cursor_of, number_of, page_of
from monitor.web.requests.problems import ERROR_RESPONSES
from reference_db.media.addresses import redact_url

WebhookId = Annotated[str, Path(pattern=r"^wh_[0-9a-f]{16}$")]
DeliveryId = Annotated[int, Path(ge=1, lt=2**63)]

router = APIRouter(tags=["webhooks"], responses=ERROR_RESPONSES)


class WebhookIn(BaseModel):
    """A receiver, and the events it wants."""

    url: str = Field(min_length=1, max_length=2000)
    types: list[str] = Field(default=[], max_length=16, description="Types of events; all if left out.")


class WebhookOut(BaseModel):
    """A receiver of events."""

    id: str
    url: str = Field(description="Credentials are masked.")
    types: list[str]
    enabled: bool
    created_at: str
    disabled_reason: str | None
    old_secret_until: str | None = Field(description="While the secret is being rotated: until when both sign.")


class NewWebhookOut(WebhookOut):
    """A receiver of events with its secret, which is shown only once."""

    secret: str | None = Field(description="Null in the reply to a retry: it is not stored; rotate it for a new one.")


class DeliveryOut(BaseModel):
    """One message to one webhook."""

    id: int
    event: str
    alert: str | None
    state: str = Field(description="waiting, done or failed.")
    tries: int
    last_status: int | None
    last_error: str | None
    next_at: str | None
    created_at: str


@router.get("/api/v1/webhooks")
def list_webhooks(context: Context, limit: Limit = 50, cursor: Cursor = None) -> Page[WebhookOut]:
    """The webhooks, by id."""
    found = sorted(context.webhooks.all(), key=lambda one: one.id)
    part, following = page_of(found, limit, cursor, lambda one: one.id)
    return Page(items=[WebhookOut.model_validate(one.as_dict()) for one in part], next=following)


@router.post("/api/v1/webhooks", status_code=201)
def new_webhook(context: Context, trail: CurrentTrail, body: WebhookIn) -> NewWebhookOut:
    """Adds a webhook; events are sent from now on. The secret is shown only in this response."""
    endpoint = context.webhooks.add(body.url, body.types)
    trail.object, trail.details = endpoint.id, {"url": redact_url(body.url)}
    return NewWebhookOut.model_validate({**endpoint.as_dict(), "secret": endpoint.secret})


@router.delete("/api/v1/webhooks/{id}", status_code=204)
def drop_webhook(context: Context, id: WebhookId) -> None:
    """Removes a webhook and its queued deliveries."""
    context.webhooks.remove(id)


@router.post("/api/v1/webhooks/{id}/test")
async def test_webhook(context: Context, id: WebhookId) -> DeliveryOut:
    """Sends a test message now, once, and returns the outcome."""
    return DeliveryOut.model_validate((await context.webhook_sender.ping(id)).as_dict())


@router.post("/api/v1/webhooks/{id}/enable")
async def enable_webhook(context: Context, id: WebhookId) -> WebhookOut:
    """Enables a disabled webhook; its queued deliveries are sent."""
    enabled = await asyncio.to_thread(context.webhooks.enable, id)
    return WebhookOut.model_validate(enabled.as_dict())


@router.post("/api/v1/webhooks/{id}/rotate")
def rotate_secret(
    context: Context,
    id: WebhookId,
    at_once: Annotated[bool, Query(description="Drop the old secret now instead of after a day.")] = False,
) -> NewWebhookOut:
    """Creates a new secret, shown only in this response; for a day messages carry both signatures."""
    endpoint = context.webhooks.rotate(id, at_once=at_once)
    return NewWebhookOut.model_validate({**endpoint.as_dict(), "secret": endpoint.secret})


@router.get("/api/v1/webhooks/{id}/deliveries")
def list_deliveries(context: Context, id: WebhookId, limit: Limit = 50, cursor: Cursor = None) -> Page[DeliveryOut]:
    """Its deliveries, newest first."""
    found = context.webhooks.deliveries(id, number_of(cursor), limit + 1)
    following = cursor_of(found[limit - 1].n) if len(found) > limit else None
    return Page(items=[DeliveryOut.model_validate(one.as_dict()) for one in found[:limit]], next=following)


@router.post("/api/v1/webhooks/{id}/deliveries/{d}/replay")
async def replay_delivery(context: Context, id: WebhookId, d: DeliveryId) -> DeliveryOut:
    """Sends a delivery again, with the same webhook-id."""
    queued = await asyncio.to_thread(context.webhooks.replay, id, d)
    return DeliveryOut.model_validate(queued.as_dict())
