"""Errors of the monitor; those of the reference library are in reference_db/errors.py.

MonitorError
├── ConfigError            a setting or a file is invalid: exit 3, one sentence
├── OutboxFailed           alerts and snapshots cannot be written or read: monitoring continues and reports it
├── SnapshotRefused        a snapshot cannot be restored: the channel starts fresh, with a gap
├── RightsError            licences, exclusions, reviews
│   ├── InvalidRights      the request is invalid
│   ├── RightsNotFound     not found
│   └── RightsStoreFailed  the file cannot be written or read
├── WebhookError           webhooks
│   ├── WebhookRefused     the request is invalid
│   ├── NoSuchWebhook      not found
│   └── WebhooksFailed     the file cannot be written or read
├── JobsFailed             uploads waiting for registration cannot be written or read
├── AuditFailed            the audit log cannot be written: the change is not made
├── RepliesFailed          stored replies for retried requests cannot be written or read
└── Unreachable            an address does not answer: exit 4
"""

from typing import Any


class MonitorError(Exception):
    """The root; the message is one sentence that says what to do."""


class ConfigError(MonitorError):
    """A setting, or a file that one names, is invalid."""


class Unreachable(MonitorError):
    """An address did not answer."""


class SnapshotRefused(MonitorError):
    """A snapshot cannot be restored. `notes` are those stored with it, if they could be read."""

    def __init__(self, reason: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(f"the snapshot cannot be restored: {reason}")
        self.notes = notes


class WebhookError(MonitorError):
    """The root of webhook errors."""


class WebhookRefused(WebhookError):
    """An address or an event type is invalid."""


class NoSuchWebhook(WebhookError):
    """There is no such webhook or delivery."""


class WebhooksFailed(WebhookError):
    """Webhooks and their deliveries cannot be written to disk or read from it."""


class JobsFailed(MonitorError):
    """Upload jobs cannot be written to disk or read from it."""


class AuditFailed(MonitorError):
    """The audit log cannot be written to disk or read from it."""


class RepliesFailed(MonitorError):
    """Stored replies cannot be written to disk or read from it."""


class OutboxFailed(MonitorError):
    """Alerts and snapshots cannot be written to disk or read from it."""


class RightsError(MonitorError):
    """The root of errors about licences, exclusions and reviews."""


class InvalidRights(RightsError):
    """The request is invalid."""


class RightsNotFound(RightsError):
    """There is no such licence, exclusion or alert."""


class RightsStoreFailed(RightsError):
    """Licences, exclusions and reviews cannot be written to disk or read from it."""
