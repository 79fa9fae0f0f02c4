"""A real `copywatch serve` for tests: its log is read as it comes, its probes are asked, its metrics are read."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

LIBC = ctypes.CDLL(None)
WAIT_S = 120.0  # a busy machine; what is waited for comes in a few


def dies_with_us() -> None:
    """For a child before it begins: tests that are killed leave none behind. It ends with the thread that began it."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def until(is_so: Callable[[], bool], what: Callable[[], object]) -> None:
    """Returns once it is so."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)  # another process is asked, which cannot tell us


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without settings of whoever runs the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("COPYWATCH_", "NOTIFY_"))}
    return clean | dict(more or {})


class Serve:
    """A running `serve` and where it answers."""

    def __init__(
        self,
        config: Path,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "monitor.cli"),
    ) -> None:
        self.process = subprocess.Popen(
            [*program, "serve", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(environment),
        )
        self.log: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        try:
            self.wait_for("health at")
        except BaseException:
            self.kill()
            raise
        line = next(line for line in self.log if "health at" in line)
        self.addresses = re.findall(r"http://[\d.]+:\d+", line)

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line)

    def wait_for(self, words: str) -> None:
        """Returns when the log has a line with these words."""
        until(
            lambda: any(words in line for line in self.log) or self.process.poll() is not None,
            lambda: f"no {words!r} in\n{''.join(self.log)}",
        )
        assert any(words in line for line in self.log), f"it ended without {words!r}:\n{''.join(self.log)}"

    def get(self, path: str, address: int = 0) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.addresses[address] + path, timeout=20) as reply:
                return reply.status, reply.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def problems(self) -> dict[str, Any]:
        """What /readyz complains of; its status says the same."""
        status, body = self.get("/readyz")
        problems: dict[str, Any] = json.loads(body).get("problems", {})
        assert status == (503 if problems else 200)
        return problems

    def value(self, name: str, **labels: str) -> float:
        """One sample of /metrics; -1 while there is none."""
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return -1.0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
