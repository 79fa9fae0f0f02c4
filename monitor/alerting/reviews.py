"""Applies licences, exclusions and reviews to a running monitor, each change as soon as it is made.

A change in this process wakes `watch_rights` at once; one made by another process (the command line) is seen within
LOOK_S, and passed on to the other watchers of this process by `RightsStore.changed`.

An open alert belongs to its channel, which obeys the rules from its next second on. An alert that is over has no
channel any more: a review of it is applied here, as the alert's next event. The event is on disk before the review is
marked as applied, and which event follows depends only on the last one, so a crash in between emits nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from monitor.alerting.alerts import ENDED, RETRACTED, after_review
from monitor.alerting.outbox import History, OutboxEntry
from monitor.errors import ConfigError, OutboxFailed, RightsStoreFailed
from monitor.ops.change_signal import watch
from monitor.ops.metrics import Metrics
from monitor.ops.process import wait_for_event
from monitor.rights.rules import NO_RULES, Rules
from monitor.rights.store import RightsStore

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the file is checked for changes by other processes, and waiting reviews are tried again


class RulesHolder(Protocol):
    """Holds the rules that channels obey; `ActiveLibrary` is one."""

    rules: Rules

    @property
    def retracted_open(self) -> Mapping[str, Collection[str]]:
        """By channel, ids of the alerts that are retracted while their segments are still open."""
        ...


class EventOutput(Protocol):
    """Takes events; `AlertDispatcher` is one."""

    async def put(self, entry: OutboxEntry) -> None:
        """Returns when the entry is safe."""
        ...


def load_rules(rights: RightsStore) -> Rules:
    """The rules to start with; none if they cannot be read, since monitoring matters more."""
    try:
        return rights.rules()
    except RightsStoreFailed as error:
        logger.error("%s; starting without licences and exclusions until it can", error)
        return NO_RULES


async def watch_rights(
    rights: RightsStore,
    holder: RulesHolder,
    metrics: Metrics,
    problems: dict[str, str],
    history: History | None = None,
    output: EventOutput | None = None,
) -> None:
    """Puts every change of the rights into force. Works until cancelled.

    With `history` and `output` it also applies reviews of alerts that are over.
    """
    revision = None
    with watch(rights.changed) as changed:
        while True:
            changed.clear()
            try:
                newest = await asyncio.to_thread(rights.revision)
                if newest != revision:
                    holder.rules = await asyncio.to_thread(rights.rules)
                    revision = newest
                    rights.changed.notify()
                if history is not None and output is not None:
                    retracted_open = {id for ids in dict(holder.retracted_open).values() for id in ids}
                    await _apply_reviews(rights, history, metrics, output, retracted_open)
                if problems.pop("rights", None):
                    logger.warning("licences, exclusions and reviews can be read again")
            except (RightsStoreFailed, ConfigError, OutboxFailed) as error:
                if "rights" not in problems:
                    logger.error("%s; licences, exclusions and reviews stay as they were", error)
                problems["rights"] = str(error)
            await wait_for_event(changed, LOOK_S)


async def _apply_reviews(
    rights: RightsStore, history: History, metrics: Metrics, output: EventOutput, retracted_open: Collection[str]
) -> None:
    """Applies the newest unapplied review of each alert that is over; the others stay unapplied."""
    unapplied = await asyncio.to_thread(rights.unapplied_reviews)
    newest = {review.alert_id: review for review in unapplied}
    for alert_id, review in newest.items():
        events = await asyncio.to_thread(history.alert, alert_id)
        if events and events[-1].alert.type not in (ENDED, RETRACTED):
            continue  # its channel obeys the rules
        if events and (event := after_review(events[-1].alert, review.decision)) is not None:
            if alert_id in retracted_open:
                continue  # its channel resumes it
            await output.put(OutboxEntry(event.channel, [event]))
            metrics.count_alert(event.channel, event.type, event.licence)
        applied = [one for one in unapplied if one.alert_id == alert_id]
        await asyncio.to_thread(rights.mark_applied, [one.n for one in applied])
        for one in applied:
            metrics.reviews.labels(one.decision).inc()
