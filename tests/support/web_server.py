"""A real `copywatch serve` for tests of the web: two references, a channel with copies of them, a broken channel.

`Client` uses http.client directly, so that a test can send invalid requests.
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
from tests.support.serve_process import die_with_parent

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends requests to one server as one caller."""

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
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
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
        """The JSON of an existing resource."""
        reply = self("GET", f"/api/v1{path}", headers=headers)
        assert reply.status == 200, (path, reply.status, reply.body)
        return reply.json


class MonitorServer:
    """A running `serve`; a thread reads its log, so that it never blocks."""

    def __init__(self, config: Path, *, environment: Mapping[str, str] | None = None, wait: bool = True) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "monitor.cli", "serve", "--config", str(config)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
            env=inherited | dict(environment or {}),
        )
        self.log: list[str] = []
        self._log_grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address, self.link = "", ""
        self.secret: str | None = None
        if wait:
            found = re.search(r"http://\S+:\d+", self.wait_for("health at"))
            assert found
            self.address = found.group()
            link = re.search(r"#secret=([\w-]+)", self.wait_for("Dashboard: "))
            self.secret = link.group(1) if link else None  # of a server without tokens
            self.link = f"{self.address}/#secret={self.secret}"

    def client(self, token: str | None = None) -> Client:
        """A caller with this token; without one, with the secret of a server without tokens."""
        address, token = self.address.replace("0.0.0.0", "127.0.0.1"), token or self.secret
        return Client(address, {"Authorization": f"Bearer {token}"} if token else None)

    def wait_for(self, words: str) -> str:
        """The first line of the log that contains these words."""
        with self._log_grown:
            is_found = self._log_grown.wait_for(
                lambda: any(words in line for line in self.log) or not self._reader.is_alive(), TIMEOUT_S
            )
            found = [line for line in self.log if words in line]
        assert is_found
        assert found, f"no {words!r} in the log:\n{''.join(self.log)}"
        return found[0]

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._log_grown:
                self.log.append(line)
                self._log_grown.notify_all()
        with self._log_grown:
            self._log_grown.notify_all()

    def stop(self) -> int:
        """Stops it; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(TIMEOUT_S)


def write_config(recorded: RecordedChannel, folder: Path, *, host: str = "127.0.0.1", more: str = "") -> Path:
    """Writes a configuration with its own library and two channels to this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Other tests that use this library write these files.
    runtime_files = shutil.ignore_patterns("alerts.*", "rights.*", "jobs.*", "evidence")
    shutil.copytree(recorded.settings.data_dir, folder / "data", ignore=runtime_files)
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
