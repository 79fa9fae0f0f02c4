"""Errors of the monitor; those of the library of references are in reference_db/errors.py.

MonitorError
├── ConfigError        a setting or file is wrong: exit 3, one sentence
├── OutboxFailed       the disk does not keep alerts and state: monitoring goes on, and says so
├── SnapshotRefused    a channel's kept state cannot be gone on from: it begins anew, with a gap
├── DeskError          the desk: licences, exclusions, reviews
│   ├── DeskRefused    what was asked for cannot be
│   ├── NotOnDesk      there is no such thing
│   └── DeskFailed     the disk does not keep it, or cannot be read
├── WebhookError       who is told over the web
│   ├── WebhookRefused what was asked for cannot be
│   ├── NoSuchWebhook  there is no such thing
│   └── WebhooksFailed the disk does not keep it, or cannot be read
├── JobsFailed         uploads cannot be kept on disk until they are registered
├── RepliesFailed      answers cannot be kept on disk for who asks again
└── Unreachable        an address that does not answer: exit 4
"""

from typing import Any


class MonitorError(Exception):
    """The root; its message is one sentence that says what to do."""


class ConfigError(MonitorError):
    """A setting or a file named by one is wrong."""


class Unreachable(MonitorError):
    """An address did not answer."""


class SnapshotRefused(MonitorError):
    """A snapshot that cannot be restored. `notes` are what came with it, where at least they could be read."""

    def __init__(self, reason: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(f"the kept state cannot be used: {reason}")
        self.notes = notes


class WebhookError(MonitorError):
    """The root of what goes wrong with webhooks."""


class WebhookRefused(WebhookError):
    """An address or an event that cannot be."""


class NoSuchWebhook(WebhookError):
    """There is no such webhook or delivery."""


class WebhooksFailed(WebhookError):
    """What is owed to webhooks cannot be kept on disk, or read from it."""


class JobsFailed(MonitorError):
    """Uploads cannot be kept on disk, or read from it."""


class RepliesFailed(MonitorError):
    """Answers cannot be kept, or read."""


class OutboxFailed(MonitorError):
    """Alerts and state cannot be kept on disk, or read from it."""


class RightsError(MonitorError):
    """A licence, an exclusion or a review could not be kept or found."""


class InvalidRights(RightsError):
    """What was asked for cannot be."""


class RightsNotFound(RightsError):
    """There is no such licence, exclusion or alert."""


class RightsStoreFailed(RightsError):
    """The desk cannot be written or read."""
