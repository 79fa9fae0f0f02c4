"""`/webhooks`: who is told of alerts over the web, and what became of every delivery."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI, Path, Query
from pydantic import BaseModel, Field

from monitor.alerting.webhook_delivery import WebhookSender
from monitor.web.requests.paging import Cursor, Limit, Page, cursor_of, number_of, page_of
from monitor.web.requests.problems import MAY_FAIL

WebhookId = Annotated[str, Path(pattern=r"^wh_[0-9a-f]{16}$")]
DeliveryId = Annotated[int, Path(ge=1, lt=2**63)]


class WebhookIn(BaseModel):
    """Whom to tell, and of what."""

    url: str = Field(min_length=1, max_length=2000)
    types: list[str] = Field(default=[], max_length=16, description="Which events; all when left out.")


class WebhookOut(BaseModel):
    """Somebody who is told."""

    id: str
    url: str = Field(description="Without what may be a credential.")
    types: list[str]
    enabled: bool
    created_at: str
    disabled_reason: str | None
    old_secret_until: str | None = Field(description="While its secret is being replaced: until when both sign.")


class NewWebhookOut(WebhookOut):
    """The same, with its secret: this once."""

    secret: str


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


def add_webhooks(api: FastAPI, sender: WebhookSender) -> None:
    webhooks = sender.webhooks

    @api.get("/api/v1/webhooks", responses=MAY_FAIL, tags=["webhooks"])
    def list_webhooks(limit: Limit = 50, cursor: Cursor = None) -> Page[WebhookOut]:
        """Who is told."""
        found = sorted(webhooks.all(), key=lambda one: one.id)
        part, following = page_of(found, limit, cursor, lambda one: one.id)
        return Page(items=[WebhookOut.model_validate(one.as_dict()) for one in part], next=following)

    @api.post("/api/v1/webhooks", status_code=201, responses=MAY_FAIL, tags=["webhooks"])
    def new_webhook(asked: WebhookIn) -> NewWebhookOut:
        """Tells somebody from now on. The secret is shown here and never again."""
        made = webhooks.add(asked.url, asked.types)
        return NewWebhookOut.model_validate({**made.as_dict(), "secret": made.secret})

    @api.delete("/api/v1/webhooks/{id}", status_code=204, responses=MAY_FAIL, tags=["webhooks"])
    def drop_webhook(id: WebhookId) -> None:
        """Tells it nothing more; what it is owed is forgotten."""
        webhooks.remove(id)

    @api.post("/api/v1/webhooks/{id}/test", responses=MAY_FAIL, tags=["webhooks"])
    async def test_webhook(id: WebhookId) -> DeliveryOut:
        """Sends a test message now, once, and says what came of it."""
        return DeliveryOut.model_validate((await sender.ping(id)).as_dict())

    @api.post("/api/v1/webhooks/{id}/enable", responses=MAY_FAIL, tags=["webhooks"])
    async def enable_webhook(id: WebhookId) -> WebhookOut:
        """Switches one on again that was switched off; what waited goes out."""
        enabled = await asyncio.to_thread(webhooks.enable, id)
        sender.wake()
        return WebhookOut.model_validate(enabled.as_dict())

    @api.post("/api/v1/webhooks/{id}/rotate", responses=MAY_FAIL, tags=["webhooks"])
    def rotate_secret(
        id: WebhookId,
        at_once: Annotated[bool, Query(description="The old secret signs no more, not even for a day.")] = False,
    ) -> NewWebhookOut:
        """Gives it a new secret, which is shown here and never again; for a day messages carry both signatures."""
        made = webhooks.rotate(id, at_once=at_once)
        return NewWebhookOut.model_validate({**made.as_dict(), "secret": made.secret})

    @api.get("/api/v1/webhooks/{id}/deliveries", responses=MAY_FAIL, tags=["webhooks"])
    def list_deliveries(id: WebhookId, limit: Limit = 50, cursor: Cursor = None) -> Page[DeliveryOut]:
        """Its deliveries, the newest first."""
        found = webhooks.deliveries(id, number_of(cursor), limit + 1)
        following = cursor_of(found[limit - 1].n) if len(found) > limit else None
        return Page(items=[DeliveryOut.model_validate(one.as_dict()) for one in found[:limit]], next=following)

    @api.post("/api/v1/webhooks/{id}/deliveries/{d}/replay", responses=MAY_FAIL, tags=["webhooks"])
    async def replay_delivery(id: WebhookId, d: DeliveryId) -> DeliveryOut:
        """Sends one again, with the same webhook-id."""
        again = await asyncio.to_thread(webhooks.replay, id, d)
        sender.wake()
        return DeliveryOut.model_validate(again.as_dict())
