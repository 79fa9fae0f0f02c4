"""Sinks: where alert events are sent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from monitor.alerting.alerts import Alert
from monitor.errors import ConfigError

TAIL_BYTES = 4 << 20  # end of a file that is searched for events written just before a crash


class Sink(Protocol):
    """Receives alert events in order, each at least once; receivers recognise repeats by `id` and `seq`."""

    def send(self, alerts: list[Alert]) -> None:
        """Returns when the events are delivered; if it raises, the dispatcher calls it again with the same events.

        May block: the dispatcher calls it in a thread of the sink's own.
        """
        ...


class JsonLinesSink:
    """A file with one JSON object per line, opened for each batch, so it may be rotated or removed at any time.

    A line that a crash or a full disk tore is cut off before the next one is written. Events of an attempt whose
    outcome is unknown (a crash, a failed sync) are written again only if they are not in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_unsure = True  # the file may have events that count as not delivered
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); set alerting.output elsewhere.") from error

    def send(self, alerts: list[Alert]) -> None:
        with self.path.open("a+b") as file:
            _cut_torn_line(file)
            if self._is_unsure:
                written = _last_events(file)
                alerts = [alert for alert in alerts if (alert.id, alert.seq) not in written]
            lines = "".join(json.dumps(alert.as_dict(), ensure_ascii=False) + "\n" for alert in alerts)
            self._is_unsure = True
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        self._is_unsure = False


def _cut_torn_line(file: BinaryIO) -> None:
    """Truncates the file after its last complete line."""
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


def _last_events(file: BinaryIO) -> set[tuple[str, int]]:
    """Id and seq of the last events in the file."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - TAIL_BYTES))
    lines = file.read().splitlines()[1 if end > TAIL_BYTES else 0 :]
    events = set()
    for line in lines:
        try:
            value = json.loads(line)
            events.add((value["id"], value["seq"]))
        except (ValueError, KeyError, TypeError):
            continue  # not one of ours
    return events


class CallbackSink:
    """Passes each event to a function, for programs that embed the monitor."""

    def __init__(self, callback: Callable[[Alert], None]) -> None:
        self._callback = callback

    def send(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._callback(alert)
