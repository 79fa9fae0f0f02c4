"""Sinks: where alerts go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from monitor.alerting.alerts import Alert
from monitor.errors import ConfigError

TAIL_BYTES = 4 << 20  # of a file, in which a line may be that was written and not noted as such


class Sink(Protocol):
    """Takes alerts in the order in which they were told; telling one twice does no harm, since ids are for life."""

    def send(self, alerts: list[Alert]) -> None:
        """Returns when the alerts are where they belong; raises where they are not, and is then asked again.

        May block; called in a thread of its own.
        """
        ...


class JsonLinesSink:
    """A file with one JSON object a line. Opened anew for each batch, so it may be rotated or removed at any time.

    A line that a crash or a full disk tore is cut off before the next is written, and one that was written just
    before a crash is not written again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_new = True  # nothing was written in this life
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); set alerting.output elsewhere.") from error

    def send(self, alerts: list[Alert]) -> None:
        with self.path.open("a+b") as file:
            _cut_torn_line(file)
            if self._is_new:
                there = _last_told(file)
                alerts = [alert for alert in alerts if (alert.id, alert.seq) not in there]
            lines = "".join(json.dumps(alert.as_dict(), ensure_ascii=False) + "\n" for alert in alerts)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        self._is_new = False


def _cut_torn_line(file: BinaryIO) -> None:
    """Cuts the file after its last whole line."""
    end = whole = file.seek(0, os.SEEK_END)
    if end == 0 or (file.seek(end - 1), file.read(1))[1] == b"\n":
        return
    while whole:
        begin = max(0, whole - TAIL_BYTES)
        file.seek(begin)
        if (at := file.read(whole - begin).rfind(b"\n")) >= 0:
            whole = begin + at + 1
            break
        whole = begin
    file.truncate(whole)


def _last_told(file: BinaryIO) -> set[tuple[str, int]]:
    """Id and seq of the last alerts in the file."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - TAIL_BYTES))
    lines = file.read().splitlines()[1 if end > TAIL_BYTES else 0 :]
    told = set()
    for line in lines:
        try:
            value = json.loads(line)
            told.add((value["id"], value["seq"]))
        except (ValueError, KeyError, TypeError):
            continue  # not ours
    return told


class CallbackSink:
    """Hands each alert to a function, for whoever runs the monitor inside another program."""

    def __init__(self, tell: Callable[[Alert], None]) -> None:
        self._tell = tell

    def send(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._tell(alert)
