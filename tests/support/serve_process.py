"""A real `copywatch serve` process for tests, with its log, its probes and its metrics."""

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
WAIT_S = 120.0  # for a busy machine; normally a few seconds


def die_with_parent() -> None:
    """For `preexec_fn`: the child ends with the thread that started it, so killed tests leave no process behind."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def wait_until(condition: Callable[[], bool], state: Callable[[], object]) -> None:
    """Returns once the condition holds; fails with `state` after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.05)  # polls another process


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without the settings of the user who runs the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("COPYWATCH_", "NOTIFY_"))}
    return clean | dict(more or {})


class ServeProcess:
    """A running `serve` and its URLs."""

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
            self.wait_for("Dashboard: ")
        except BaseException:
            self.kill()
            raise
        line = next(line for line in self.log if "health at" in line)
        self.addresses = re.findall(r"http://[\d.]+:\d+", line)
        secret = re.search(r"#secret=([\w-]+)", "".join(self.log))
        self._headers = {"Authorization": f"Bearer {secret.group(1)}"} if secret else {}

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line)

    def wait_for(self, text: str) -> None:
        """Returns when a line of the log contains this text."""
        wait_until(
            lambda: any(text in line for line in self.log) or self.process.poll() is not None,
            lambda: f"no {text!r} in\n{''.join(self.log)}",
        )
        assert any(text in line for line in self.log), f"it ended without {text!r}:\n{''.join(self.log)}"

    def get(self, path: str, address: int = 0) -> tuple[int, str]:
        try:
            request = urllib.request.Request(self.addresses[address] + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=20) as reply:
                return reply.status, reply.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def problems(self) -> dict[str, Any]:
        """The problems that /readyz lists; its status code agrees."""
        status, body = self.get("/readyz")
        problems: dict[str, Any] = json.loads(body).get("problems", {})
        assert status == (503 if problems else 200)
        return problems

    def value(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics; -1 while there is none."""
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
