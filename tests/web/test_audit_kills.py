"""No change without an entry: the server is killed with `kill -9` in the middle of changes, again and again."""

from __future__ import annotations

import http.client
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from monitor.audit.log import AuditLog
from monitor.rights.store import RightsStore
from monitor.web.auth.tokens import Tokens
from tests.support.serve_process import die_with_parent
from tests.support.web_server import Client

SERVER = """
import sys, threading
from pathlib import Path
from tests.support.web_only import WebAppServer
with WebAppServer(Path(sys.argv[1])) as server:
    print(server.port, flush=True)
    threading.Event().wait()
"""
N_KILLS, N_CLIENTS, MAX_EACH = 3, 4, 200


class Clients:
    """Clients that add licences until the server dies; they record what was acknowledged."""

    def __init__(self, port: int, token: str) -> None:
        self.acknowledged: list[str] = []
        self._client = Client(f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"})
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._add) for _ in range(N_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _add(self) -> None:
        for _ in range(MAX_EACH):
            try:
                reply = self._client("POST", "/api/v1/licences", {"owner": "ACME"})
            except (OSError, ValueError, http.client.HTTPException):  # killed
                return
            assert reply.status == 201, reply.body
            with self._changed:
                self.acknowledged.append(reply.json["id"])
                self._changed.notify_all()

    def wait_for(self, n: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.acknowledged) >= n, 120)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)


@pytest.mark.slow
def test_every_change_has_an_entry_wherever_the_server_is_killed(tmp_path: Path) -> None:
    token = Tokens(tmp_path).add("ada", "write")
    generator = random.Random(7)
    acknowledged: list[str] = []
    for _ in range(N_KILLS):
        command = [sys.executable, "-c", SERVER, str(tmp_path)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        assert server.stdout
        clients = Clients(int(server.stdout.readline()), token)
        clients.wait_for(generator.randrange(5, 30))
        server.kill()
        server.communicate()
        clients.join()
        acknowledged += clients.acknowledged
    log = AuditLog(tmp_path)
    log.recover()
    found = log.verify()
    assert found.is_whole, found.faults
    entries = [one.as_dict() for one in log.records()]
    done = [one["object"] for one in entries if one["result"] == "done"]
    unknown = [one for one in entries if one["result"] == "unknown"]
    assert {one["who"] for one in entries} == {"ada"}
    assert len(done) == len(set(done))
    assert set(acknowledged) <= set(done)
    assert len(unknown) <= N_KILLS * N_CLIENTS  # what was under way
    unrecorded = {one.id for one in RightsStore(tmp_path).licences()} - set(done)
    assert len(unrecorded) <= len(unknown)  # made, and killed before the result was recorded
