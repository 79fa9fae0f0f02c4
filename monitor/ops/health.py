"""Health of the process: problems of the things it needs, and workers that are stuck.

A worker is a thread that other code waits for. Only its work counts: one that has work and finished nothing for too
long is stuck or dead, whatever the reason.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

STUCK_S = 30.0  # no piece of work takes that long: a batch takes 0.1 s, a write to disk less


class Worker:
    """The unfinished work of one worker; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_unfinished = 0
        self._progress_s = 0.0  # monotonic; when work arrived at an idle worker, or was finished

    def track(self, work: Future[Any] | asyncio.Future[Any]) -> None:
        """Counts a piece of work until it is done, failed or cancelled."""
        with self._lock:
            if self._n_unfinished == 0:
                self._progress_s = time.monotonic()
            self._n_unfinished += 1
        work.add_done_callback(self._finish)

    def _finish(self, work: object) -> None:
        with self._lock:
            self._n_unfinished -= 1
            self._progress_s = time.monotonic()

    @property
    def problem(self) -> str | None:
        """None while it makes progress or has nothing to do."""
        with self._lock:
            stuck_s = time.monotonic() - self._progress_s if self._n_unfinished else 0.0
        return f"has finished nothing for {stuck_s:.0f} s; restart it" if stuck_s > STUCK_S else None


class Health:
    """All checks of a process by name: `reported` ones, whose problems other code sets, and workers.

    A channel that is down is no problem of the process: the others continue, and a restart would not help.
    """

    def __init__(
        self, problems: Mapping[str, str], reported: Sequence[str], workers: Mapping[str, Worker], vital: Sequence[str]
    ) -> None:
        self._problems, self._reported, self._workers, self._vital = problems, reported, workers, vital

    @property
    def checks(self) -> dict[str, str | None]:
        """Every check and its problem; None if it is OK."""
        reported = {name: self._problems.get(name) for name in (*self._reported, *self._problems)}
        return reported | {name: worker.problem for name, worker in self._workers.items()}

    @property
    def problems(self) -> dict[str, str]:
        """The checks that fail."""
        return {name: problem for name, problem in self.checks.items() if problem is not None}

    @property
    def stuck_worker(self) -> str | None:
        """The problem that only a restart solves: a vital worker is stuck."""
        stuck = {name: self._workers[name].problem for name in self._vital}
        return next((f"{name} {problem}" for name, problem in stuck.items() if problem), None)


def set_problem(problems: dict[str, str], check: str, problem: str | None) -> None:
    """Sets the problem of a check; None clears it."""
    if problem is None:
        problems.pop(check, None)
    else:
        problems[check] = problem
