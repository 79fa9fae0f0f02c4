"""The desk in force: a running monitor takes up each change within seconds, and acts on what reviewers say.

An alert that is open belongs to its channel, which heeds the rules with its next second. One that has ended is nobody's
any more: a review of it is told from here, as the alert's next event. What was told is on disk before the review is
noted as settled, and what a review leads to depends on what was told last, so a crash in between tells nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from monitor.alerting.alerts import ENDED, RETRACTED, after_review
from monitor.alerting.outbox import History, OutboxEntry
from monitor.errors import ConfigError, OutboxFailed, RightsStoreFailed
from monitor.ops.metrics import Metrics
from monitor.rights.rules import NO_RULES, Rules
from monitor.rights.store import RightsStore

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the desk is asked whether it changed


class RulesHolder(Protocol):
    """What has rules in force."""

    rules: Rules

    @property
    def retracted_open(self) -> Mapping[str, Collection[str]]:
        """By channel, ids of the alerts that are retracted and still on air."""
        ...


class EventOutput(Protocol):
    """Where events go."""

    async def put(self, entry: OutboxEntry) -> None:
        """Returns when the entry is safe."""
        ...


def load_rules(data_dir: Path) -> Rules:
    """What the desk has decided; nothing where it cannot be read, since monitoring matters more."""
    try:
        return RightsStore(data_dir).rules()
    except RightsStoreFailed as error:
        logger.error("%s; nothing is licensed and nothing excluded until it can be", error)
        return NO_RULES


async def watch_rights(
    data_dir: Path,
    heeding: RulesHolder,
    metrics: Metrics,
    problems: dict[str, str],
    telling: EventOutput | None = None,
) -> None:
    """Keeps the rules in force up to date; with `telling`, acts on reviews of alerts that have ended. Never returns."""
    desk, known = RightsStore(data_dir), None
    while True:
        try:
            change = await asyncio.to_thread(desk.revision)
            if change != known:
                heeding.rules = await asyncio.to_thread(desk.rules)
                known = change
            if telling is not None:
                on_air = {alert_id for ids in dict(heeding.retracted_open).values() for alert_id in ids}
                await _settle(desk, History(data_dir), metrics, telling, on_air)
            if problems.pop("desk", None):
                logger.warning("the desk can be read again")
        except (RightsStoreFailed, ConfigError, OutboxFailed) as error:
            if "desk" not in problems:
                logger.error("%s; licences, exclusions and reviews stay as they were", error)
            problems["desk"] = str(error)
        await asyncio.sleep(LOOK_S)


async def _settle(
    desk: RightsStore, history: History, metrics: Metrics, telling: EventOutput, on_air: Collection[str]
) -> None:
    """Acts on every review that waits, the newest of each alert; those of alerts on air go on waiting."""
    waiting = await asyncio.to_thread(desk.unapplied_reviews)
    newest = {review.alert_id: review for review in waiting}
    for alert_id, review in newest.items():
        events = await asyncio.to_thread(history.alert, alert_id)
        if events and events[-1].alert.type not in (ENDED, RETRACTED):
            continue  # its channel heeds the rules, and tells
        if events and (news := after_review(events[-1].alert, review.decision)) is not None:
            if alert_id in on_air:
                continue
            await telling.put(OutboxEntry(news.channel, [news]))
            metrics.count_alert(news.channel, news.type, news.licence)
        settled = [one for one in waiting if one.alert_id == alert_id]
        await asyncio.to_thread(desk.mark_applied, [one.n for one in settled])
        for one in settled:
            metrics.reviews.labels(one.decision).inc()
