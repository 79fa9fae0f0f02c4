"""Outages: webhooks get `channel.down` when a channel stays down, and `channel.up` when it is back.

A channel is down after `webhooks.channel_down_s` without frames, so a quick reconnect is not reported. The reported
outages are stored with the queued messages: a restart neither reports an outage twice nor misses its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from datetime import UTC, datetime

from monitor.alerting.webhooks import CHANNEL_DOWN, CHANNEL_UP, Message, WebhookStore, body_of
from monitor.errors import WebhooksFailed
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
        now, states = int(time.time()), self._channels.states()
        self._down_since = {name: self._down_since.get(name, now) for name, state in states.items() if state in DOWN}
        if not self._webhooks.all():
            return  # a webhook added later gets the outages of that time
        reported = self._webhooks.outages()
        for name, state in states.items():
            if state in DOWN and name not in reported and now - self._down_since[name] >= self._down_s:
                self._report(CHANNEL_DOWN, name, state, self._down_since[name])
            elif state in UP and name in reported:
                self._report(CHANNEL_UP, name, state, reported[name])

    def _report(self, event: str, name: str, state: str, since: int) -> None:
        data = {"channel": name, "state": state, "down_since": rfc3339(datetime.fromtimestamp(since, UTC))}
        digest = hashlib.sha256(f"{event} {name} {since}".encode()).hexdigest()[:24]  # an id may have no dots
        message = Message(f"msg_{digest}", event, None, body_of(event, data))
        self._webhooks.enqueue([message], (f"down {name}", since if event == CHANNEL_DOWN else 0))
