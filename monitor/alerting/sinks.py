"""Sinks: where alerts go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from monitor.alerting.alerts import Alert
from monitor.errors import ConfigError


class Sink(Protocol):
    """Takes alerts in the order in which they were told; telling one twice does no harm, since ids are for life."""

    def send(self, alerts: list[Alert]) -> None:
        """Returns when the alerts are where they belong. May block; called off the loop."""
        ...


class JsonLinesSink:
    """A file with one JSON object a line. Opened anew for each batch, so it may be rotated or removed at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); set alerting.output elsewhere.") from error

    def send(self, alerts: list[Alert]) -> None:
        lines = "".join(json.dumps(alert.as_dict(), ensure_ascii=False) + "\n" for alert in alerts)
        with self.path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())


class CallbackSink:
    """Hands each alert to a function, for whoever runs the monitor inside another program."""

    def __init__(self, tell: Callable[[Alert], None]) -> None:
        self._tell = tell

    def send(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._tell(alert)
