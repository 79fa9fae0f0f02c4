"""Outages: webhooks are told of a channel that stays away (`channel.down`), and when it is back (`channel.up`).

A channel that reconnects at once is nobody's news: one is down after `webhooks.channel_down_s` without pictures.
What was told is kept with what is owed, so a restart in between neither tells an outage twice nor forgets its end.
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
from monitor.web.channel_board import ChannelBoard

logger = logging.getLogger(__name__)

LOOK_S = 1.0
DOWN = frozenset(("stalled", "no_video", "denied", "failed"))
UP = frozenset(("up", "impaired"))


class Outages:
    """Looks at the board; `run` works until it is cancelled."""

    def __init__(self, board: ChannelBoard, webhooks: WebhookStore, patience_s: float) -> None:
        self._board, self._webhooks, self._patience_s = board, webhooks, patience_s
        self._since: dict[str, int] = {}  # of channels that are away: since when, in seconds of the epoch

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.to_thread(self._look)
            except WebhooksFailed as error:
                logger.error("%s; outages are told when it works again", error)

    def _look(self) -> None:
        now, states = int(time.time()), self._board.states()
        self._since = {name: self._since.get(name, now) for name, state in states.items() if state in DOWN}
        if not self._webhooks.all():
            return  # who comes later is told of those that are away then
        told = self._webhooks.outages()
        for name, state in states.items():
            if state in DOWN and name not in told and now - self._since[name] >= self._patience_s:
                self._tell(CHANNEL_DOWN, name, state, self._since[name])
            elif state in UP and name in told:
                self._tell(CHANNEL_UP, name, state, told[name])

    def _tell(self, event: str, name: str, state: str, since: int) -> None:
        data = {"channel": name, "state": state, "down_since": rfc3339(datetime.fromtimestamp(since, UTC))}
        digest = hashlib.sha256(f"{event} {name} {since}".encode()).hexdigest()[:24]  # an id may have no dots
        message = Message(f"msg_{digest}", event, None, body_of(event, data))
        self._webhooks.enqueue([message], (f"down {name}", since if event == CHANNEL_DOWN else 0))
