"""A real `copywatch serve` for tests of the web: two references, a channel that aired copies of them, one that cannot.

`Client` speaks to it by plain sockets, so that a test can send what no polite library would.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.recorded_channel import RecordedChannel
from tests.support.serve_process import dies_with_us

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks one server, as one caller."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(address)
        assert parts.hostname
        assert parts.port
        self.host, self.port = parts.hostname, parts.port
        self.headers = dict(headers or {})

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        sent = {**self.headers, **(headers or {})}
        if body is not None:
            raw, sent = json.dumps(body).encode(), {"Content-Type": "application/json", **sent}
        try:
            connection.request(method, path, raw, sent)
            reply = connection.getresponse()
            return Reply(reply.status, reply.headers, reply.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Any:
        """The JSON of a page that is there."""
        reply = self("GET", f"/api/v1{path}", headers=headers)
        assert reply.status == 200, (path, reply.status, reply.body)
        return reply.json


class Serving:
    """A running serve; its log is read to the end, so that it never waits for a reader."""

    def __init__(self, config: Path, *, environment: Mapping[str, str] | None = None, wait: bool = True) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "monitor.cli", "serve", "--config", str(config)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dies_with_us,
            env=inherited | dict(environment or {}),
        )
        self.log: list[str] = []
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = ""
        if wait:
            found = re.search(r"http://\S+:\d+", self.wait_for("health at"))
            assert found
            self.address = found.group()

    def client(self, token: str | None = None) -> Client:
        address = self.address.replace("0.0.0.0", "127.0.0.1")
        return Client(address, {"Authorization": f"Bearer {token}"} if token else None)

    def wait_for(self, words: str) -> str:
        """The first line of the log that has these words."""
        with self._grown:
            is_there = self._grown.wait_for(
                lambda: any(words in line for line in self.log) or not self._reader.is_alive(), PATIENCE_S
            )
            found = [line for line in self.log if words in line]
        assert is_there
        assert found, f"no {words!r} in the log:\n{''.join(self.log)}"
        return found[0]

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._grown:
                self.log.append(line)
                self._grown.notify_all()
        with self._grown:
            self._grown.notify_all()

    def stop(self) -> int:
        """Asks it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)


def furnish(recorded: RecordedChannel, folder: Path, *, host: str = "127.0.0.1", more: str = "") -> Path:
    """A configuration with a library of its own and two channels, in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # tests that use this folder directly leave these there
    ignored = shutil.ignore_patterns("alerts.*", "rights.*", "jobs.*", "evidence")
    shutil.copytree(recorded.settings.data_dir, folder / "data", ignore=ignored)
    config = folder / "copywatch.yaml"
    config.write_text(
        f"""
data_dir: data
web: {{host: {host}, port: 0}}
channels:
  - {{name: works, url: "{recorded.recording}", mode: exact}}
  - {{name: broken, url: "http://user:s3cret@127.0.0.1:9/nothing.m3u8?token=hush"}}
{more}"""
    )
    return config
