"""Whether the process can do its work: what is wrong with the things it needs, and which of its workers hangs.

A worker is a thread that others wait for. It is judged by its work alone: one that was given something and has
finished nothing for too long hangs or is dead, whatever the reason.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

PATIENCE_S = 30.0  # no piece of work takes that long: a turn of computing takes 0.1 s, a write to disk less


class Worker:
    """What was given to one worker and is not done yet; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_waiting = 0
        self._moved_at = 0.0

    def given(self, work: Future[Any] | asyncio.Future[Any]) -> None:
        """Counts one more piece of work, until it is done, failed or cancelled."""
        with self._lock:
            if self._n_waiting == 0:
                self._moved_at = time.monotonic()
            self._n_waiting += 1
        work.add_done_callback(self._done)

    def _done(self, work: object) -> None:
        with self._lock:
            self._n_waiting -= 1
            self._moved_at = time.monotonic()

    @property
    def complaint(self) -> str | None:
        """None while it works or has nothing to do."""
        with self._lock:
            stuck_s = time.monotonic() - self._moved_at if self._n_waiting else 0.0
        return f"has finished nothing for {stuck_s:.0f} s; restart it" if stuck_s > PATIENCE_S else None


class Health:
    """All checks of a process by name. `problems` is kept up by those who know, workers are asked.

    One dead channel is no problem of the process: the others go on, and a restart would not mend it.
    """

    def __init__(
        self, problems: Mapping[str, str], told: Sequence[str], workers: Mapping[str, Worker], vital: Sequence[str]
    ) -> None:
        self.problems = problems  # of the names in `told`: what is wrong
        self._told, self._workers, self._vital = told, workers, vital

    @property
    def checks(self) -> dict[str, str | None]:
        """Every check: None where all is well, else what is wrong."""
        told = {name: self.problems.get(name) for name in (*self._told, *self.problems)}
        return told | {name: worker.complaint for name, worker in self._workers.items()}

    @property
    def complaints(self) -> dict[str, str]:
        """The checks that fail."""
        return {name: complaint for name, complaint in self.checks.items() if complaint is not None}

    @property
    def hangs(self) -> str | None:
        """What only a restart would mend: a vital worker that hangs."""
        stuck = {name: self._workers[name].complaint for name in self._vital}
        return next((f"{name} {complaint}" for name, complaint in stuck.items() if complaint), None)
