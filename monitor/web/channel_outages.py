"""Outages: webhooks get `channel.down` when a channel stays down, and `channel.up` when it is back.

A channel is down after `webhooks.channel_down_s` without a new frame, so a quick reconnect is not reported; the outage
counts from the newest frame. The reported outages are stored with the queued messages: a restart neither reports an
outage twice nor misses its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from datetime import UTC, datetime

from monitor.alerting.webhooks import CHANNEL_DOWN, CHANNEL_UP, Message, WebhookStore, body_of
from monitor.errors import WebhooksFailed
from monitor.ops.channel_status import ChannelReport
from monitor.ops.timestamps import rfc3339
from monitor.web.channel_views import ChannelViews

logger = logging.getLogger(__name__)

CHECK_S = 1.0  # between two checks of the channels
DOWN = frozenset(("stalled", "no_video", "denied", "failed"))
UP = frozenset(("up", "impaired"))


class OutageReporter:
    """Checks the states of the channels; `run` works until it is cancelled."""

    def __init__(self, channels: ChannelViews, webhooks: WebhookStore, down_s: float) -> None:
        self._channels, self._webhooks, self._down_s = channels, webhooks, down_s
        self._down_since: dict[str, int] = {}  # Unix time, by channel that is down

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await asyncio.to_thread(self._check)
            except WebhooksFailed as error:
                logger.error("%s; outages are reported when it works again", error)

    def _check(self) -> None:
        now, reports = int(time.time()), self._channels.reports()
        self._down_since = {
            name: self._down_since.get(name) or _down_since(one) or now
            for name, one in reports.items()
            if one.state in DOWN
        }
        if not self._webhooks.all():
            return  # a webhook added later gets the outages of that time
        reported = self._webhooks.outages()
        for name, one in reports.items():
            if one.state in DOWN and name not in reported and now - self._down_since[name] >= self._down_s:
                self._report(CHANNEL_DOWN, one, self._down_since[name])
            elif one.state in UP and name in reported:
                self._report(CHANNEL_UP, one, reported[name])

    def _report(self, event: str, report: ChannelReport, since: int) -> None:
        name = report.channel
        data = {"channel": name, "state": report.state, "down_since": rfc3339(datetime.fromtimestamp(since, UTC))}
        if report.reason is not None:
            data["reason"] = report.reason
        digest = hashlib.sha256(f"{event} {name} {since}".encode()).hexdigest()[:24]  # an id may have no dots
        message = Message(f"msg_{digest}", event, None, body_of(event, data))
        self._webhooks.enqueue([message], (f"down {name}", since if event == CHANNEL_DOWN else 0))


def _down_since(report: ChannelReport) -> int | None:
    """The Unix time of its newest frame; None if there was none."""
    return None if report.last_new_at is None else int(report.last_new_at.timestamp())
