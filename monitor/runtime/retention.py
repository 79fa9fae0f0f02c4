"""Retention of what is stored about people: reviews go with their alerts, audit entries after `audit.keep_days`.

Alerts and evidence are deleted by their own stores; a review is deleted once there is neither, and not before
`alerting.keep_days` after it was made, since a `match` stores no alerts beside its reviews.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from monitor.alerting.outbox import History
from monitor.audit.log import AuditLog
from monitor.config.settings import Settings
from monitor.errors import AuditFailed, OutboxFailed, RightsStoreFailed
from monitor.evidence.store import EvidenceStore
from monitor.rights.store import RightsStore

logger = logging.getLogger(__name__)

EVERY_S = 3600.0
BATCH = 500  # alerts whose reviews are deleted in one transaction


@dataclass(frozen=True, slots=True)
class Expired:
    """What is older than the settings permit."""

    n_reviewed: int  # alerts whose reviews go
    n_audit_entries: int


class Retention:
    """The retention of one data folder; any process may apply it."""

    def __init__(self, settings: Settings) -> None:
        folder = settings.data_dir
        self._rights, self._history, self._evidence = RightsStore(folder), History(folder), EvidenceStore(folder)
        self._audit = AuditLog(folder)
        self._keep_reviews = timedelta(days=settings.alerting.keep_days)
        self._keep_audit = timedelta(days=settings.audit.keep_days)

    def expired(self) -> Expired:
        """What `apply` would delete now."""
        return Expired(len(self._expired_reviews()), self._audit.n_expired(self._keep_audit))

    def apply(self) -> Expired:
        """Deletes what has expired. Raises RightsStoreFailed, OutboxFailed and AuditFailed."""
        alert_ids = self._expired_reviews()
        for first in range(0, len(alert_ids), BATCH):
            self._rights.remove_reviews(alert_ids[first : first + BATCH])
        n_entries = self._audit.apply_retention(self._keep_audit) if self._audit.n_expired(self._keep_audit) else 0
        return Expired(len(alert_ids), n_entries)

    def _expired_reviews(self) -> list[str]:
        """Alerts that were last reviewed long ago, and of which nothing else is stored."""
        reviewed = self._rights.reviewed_before(datetime.now(UTC) - self._keep_reviews)
        existing = self._history.existing(reviewed)
        return [id for id in reviewed if id not in existing and not self._evidence.has(id)]


async def run_retention(settings: Settings) -> None:
    """Applies the retention now and every hour. Works until cancelled."""
    retention = Retention(settings)
    while True:
        try:
            done = await asyncio.to_thread(retention.apply)
            if done.n_reviewed or done.n_audit_entries:
                logger.info(
                    "deleted the reviews of %d alerts and %d audit entries", done.n_reviewed, done.n_audit_entries
                )
        except (RightsStoreFailed, OutboxFailed, AuditFailed) as error:
            logger.error("%s; old reviews and audit entries stay until it can", error)
        await asyncio.sleep(EVERY_S)
