"""Sessions and tokens over time: what ends them, what survives a restart, and what ends with them."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from monitor.alerting.outbox import OutboxEntry
from monitor.errors import ConfigError
from monitor.web.auth import local_secret, sessions, token_uses
from monitor.web.auth.gatekeeper import COOKIE
from monitor.web.auth.sessions import Sessions
from monitor.web.auth.tokens import FILE as TOKEN_FILE
from monitor.web.auth.tokens import Token, Tokens, digest_of
from monitor.web.requests.jobs import Jobs
from monitor.web.routes import events
from tests.support.sample_alert import sample_alert
from tests.support.serve_process import wait_until
from tests.support.web_only import WebAppServer
from tests.support.web_server import TIMEOUT_S, Client, Reply


def log_in(client: Client, token: str, **headers: str) -> str:
    """The cookie of a new session."""
    reply = client("POST", "/api/v1/session", {"token": token}, headers)
    assert reply.status == 200
    return str(reply.headers["set-cookie"].partition(";")[0])


def own_page(server: WebAppServer, cookie: str) -> dict[str, str]:
    """The headers of a request by the dashboard."""
    return {"Cookie": cookie, "Origin": f"http://127.0.0.1:{server.port}", "X-Copywatch": "1"}


def status(server: WebAppServer, cookie: str) -> int:
    return server.stranger()("GET", "/api/v1/session", headers={"Cookie": cookie}).status


def test_the_cookie_is_not_the_token_and_ends_by_logging_out(tmp_path: Path) -> None:
    token = Tokens(tmp_path).add("ada", "write")
    with WebAppServer(tmp_path) as server:
        client = server.stranger()
        cookie, other = log_in(client, token), log_in(client, token)
        assert token not in cookie
        assert cookie != other
        assert status(server, f"{COOKIE}={token}") == 401  # a token is no session
        assert client("GET", "/api/v1/session", headers={"Authorization": f"Bearer {cookie}"}).status == 401
        assert (status(server, cookie), status(server, other)) == (200, 200)
        assert client("DELETE", "/api/v1/session", headers=own_page(server, cookie)).status == 204
        assert (status(server, cookie), status(server, other)) == (401, 200)
        renewed = log_in(client, token, **own_page(server, other))
        assert (status(server, other), status(server, renewed)) == (401, 200)
        stored = (tmp_path / sessions.FILE).read_text()
        assert not any(secret.partition("=")[2] in stored for secret in (cookie, other, renewed))
        assert token not in stored
        assert stat.S_IMODE((tmp_path / sessions.FILE).stat().st_mode) == 0o600


def test_a_session_survives_a_restart_but_not_its_token(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token, _ = tokens.add("ada", "write"), tokens.add("bob", "read")
    with WebAppServer(tmp_path) as server:
        cookie = log_in(server.stranger(), token)
    with WebAppServer(tmp_path) as server:
        assert status(server, cookie) == 200
        tokens.remove("ada")
        tokens.add("ada", "admin")  # of the same name, but another token
        wait_until(lambda: status(server, cookie) == 401, lambda: "the session is still open")


@pytest.mark.parametrize(("after_s", "is_open"), [(50, True), (70, False)])
def test_a_session_ends_when_it_is_not_used(
    after_s: float, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    found = Sessions(tmp_path, idle_s=60, max_s=300)
    id = found.start("token")
    session = found.use(id)
    assert session
    clock.now += after_s
    assert found.is_open(session.sha256) == is_open  # asking is no use
    assert (found.use(id) is not None) == is_open


def test_a_session_ends_some_time_after_its_start_however_often_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    found = Sessions(tmp_path, idle_s=60, max_s=300)
    id = found.start("token")
    uses = []
    for _ in range(7):
        clock.now += 50
        uses.append(found.use(id) is not None)
    assert uses == [True] * 5 + [False] * 2


def test_sessions_are_limited_and_a_damaged_file_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "MAX_PER_TOKEN", 2)
    found = Sessions(tmp_path, idle_s=60, max_s=300)
    ids = [found.start("one") for _ in range(3)]
    kept = found.start("two")
    assert [found.use(id) is not None for id in (*ids, kept)] == [False, True, True, True]
    found.save()
    assert Sessions(tmp_path, idle_s=60, max_s=300).use(kept)
    (tmp_path / sessions.FILE).write_text('[{"sha256": 1}]')
    assert Sessions(tmp_path, idle_s=60, max_s=300).use(kept) is None
    assert "all sessions have ended" in caplog.text


class Clock:
    """Replaces the wall clock of sessions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_expires(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    kept, ending = tokens.add("kept", "read"), tokens.add("ending", "read", days=30)
    expired = tokens.add("expired", "read", days=0)
    assert tokens.find(kept)
    assert tokens.find(ending)
    assert tokens.find(expired) is None
    with WebAppServer(tmp_path) as server:
        statuses = [server.client(one)("GET", "/api/v1/session").status for one in (kept, ending, expired)]
        assert statuses == [200, 200, 401]
    now = datetime(2027, 1, 1, tzinfo=UTC)
    token = Token("a", "read", "0" * 64, "", expires_at="2027-01-01T00:00:00Z")
    assert [token.is_expired(now + timedelta(seconds=s)) for s in (-1, 0, 1)] == [False, True, True]
    (tmp_path / TOKEN_FILE).write_text(
        json.dumps([{"name": "a", "scope": "read", "sha256": "0" * 64, "created_at": "", "expires_at": "soon"}])
    )
    with pytest.raises(ConfigError, match="is damaged"):
        Tokens(tmp_path).all()


def test_tokens_show_when_they_were_last_used(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    admin, _ = tokens.add("ada", "admin"), tokens.add("bob", "read", days=2)
    with WebAppServer(tmp_path) as server:
        shown = {one["name"]: one for one in server.client(admin).get("/tokens")["items"]}
        assert shown["ada"]["last_used_at"].startswith("20")
        assert (shown["ada"]["expires_at"], shown["bob"]["last_used_at"]) == (None, None)
        assert shown["bob"]["expires_at"] > shown["bob"]["created_at"]
    assert stat.S_IMODE((tmp_path / token_uses.FILE).stat().st_mode) == 0o600
    command = [sys.executable, "-m", "monitor.cli", "tokens", "list", "--json", "--data-dir", str(tmp_path)]
    listed = json.loads(subprocess.run(command, capture_output=True, env={**os.environ, "COPYWATCH_CONFIG": ""}).stdout)
    assert [(one["name"], one["last_used_at"] is not None) for one in listed] == [("ada", True), ("bob", False)]


# --- what ends with a token ------------------------------------------------------------------------------------------


class Stream:
    """An open event stream of this caller; a thread reads it."""

    def __init__(self, server: WebAppServer, head: str) -> None:
        self._connection = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)
        self._connection.sendall(f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
        self.received = b""
        self.is_over = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: b": welcome" in self.received, lambda: self.received)

    def _read(self) -> None:
        with self._connection:
            while not self.received.endswith(b"0\r\n\r\n") and (part := self._connection.recv(1 << 16)):
                self.received += part
        self.is_over.set()


def remove(server: WebAppServer, tokens: Tokens, cookie: str) -> None:
    tokens.remove("ada")


def log_out(server: WebAppServer, tokens: Tokens, cookie: str) -> None:
    assert server.stranger()("DELETE", "/api/v1/session", headers=own_page(server, cookie)).status == 204


@pytest.mark.parametrize(
    ("end", "ends_token_s_stream"), [(remove, True), (log_out, False)], ids=["token removed", "logged out"]
)
def test_event_streams_end_with_their_token_or_session(
    end: Callable[[WebAppServer, Tokens, str], None], ends_token_s_stream: bool, tmp_path: Path
) -> None:
    tokens = Tokens(tmp_path)
    token, other = tokens.add("ada", "read"), tokens.add("bob", "read")
    with WebAppServer(tmp_path) as server:
        cookie = log_in(server.stranger(), token)
        by_session = Stream(server, f"Cookie: {cookie}")
        by_token, by_other = (Stream(server, f"Authorization: Bearer {one}") for one in (token, other))
        end(server, tokens, cookie)
        assert by_session.is_over.wait(TIMEOUT_S)
        if ends_token_s_stream:
            assert by_token.is_over.wait(TIMEOUT_S)
        assert server.context.feed.n_of("bob") == 1
        assert server.context.feed.n_of("ada") == (0 if ends_token_s_stream else 1)
        assert not by_other.is_over.is_set()


def test_a_removed_token_gets_no_further_event(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token, other = tokens.add("ada", "read"), tokens.add("bob", "admin")
    with WebAppServer(tmp_path) as server:
        stream, witness = (Stream(server, f"Authorization: Bearer {one}") for one in (token, other))
        tokens.remove("ada")
        assert stream.is_over.wait(TIMEOUT_S)
        before = stream.received
        server.outbox.write([OutboxEntry("ch5", [sample_alert()])])
        wait_until(lambda: b"alert.started" in witness.received, lambda: witness.received)
        assert stream.received == before


@pytest.mark.parametrize("sends_on", [False, True], ids=["silent", "sending"])
def test_uploads_end_with_their_token(sends_on: bool, tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token, _ = tokens.add("ada", "write"), tokens.add("bob", "read")
    boundary = "x" * 20
    head = (
        "POST /api/v1/references HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n"
        f"Content-Type: multipart/form-data; boundary={boundary}\r\nAuthorization: Bearer {token}\r\n\r\n"
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="f.mp4"\r\n\r\n'
    )
    with WebAppServer(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port)) as upload:
        upload.settimeout(TIMEOUT_S)
        upload.sendall(head.encode() + b"0" * 1000)
        folder = Jobs(tmp_path).folder
        wait_until(lambda: any(folder.glob("*/*")), lambda: "nothing was received")
        tokens.remove("ada")
        stop = threading.Event()

        def send() -> None:
            while sends_on and not stop.wait(0.01):
                try:
                    upload.sendall(b"0" * 1000)
                except OSError:
                    return

        sending = threading.Thread(target=send)
        sending.start()
        try:
            assert upload.recv(12) == b"HTTP/1.1 401"
        finally:
            stop.set()
            sending.join()
        wait_until(lambda: not any(folder.glob("*/*")), lambda: list(folder.glob("*/*")))


def test_one_token_does_not_take_all_places_of_listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LISTENERS", 3)
    monkeypatch.setattr(events, "MAX_PER_TOKEN", 2)
    tokens = Tokens(tmp_path)
    reader, admin = tokens.add("reader", "read"), tokens.add("ada", "admin")

    def listen(server: WebAppServer, token: str) -> Reply:
        return server.client(token)("GET", "/api/v1/events")

    with WebAppServer(tmp_path) as server:
        cookie = log_in(server.stranger(), reader)
        Stream(server, f"Authorization: Bearer {reader}")
        Stream(server, f"Cookie: {cookie}")
        refused = listen(server, reader)
        assert refused.status == 429
        assert "with this token" in refused.json["detail"]
        Stream(server, f"Authorization: Bearer {admin}")
        assert "3 listeners are already connected" in listen(server, admin).json["detail"]


# --- without tokens --------------------------------------------------------------------------------------------------


def test_without_tokens_the_secret_of_this_start_is_needed(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        secret = server.context.local_secret
        assert secret.link("http://127.0.0.1:8080") == f"http://127.0.0.1:8080/#secret={secret.value}"
        assert server.stranger()("GET", "/api/v1/system").status == 401
        assert server.stranger()("POST", "/api/v1/session", {"token": "guess"}).status == 401
        cookie = log_in(server.stranger(), secret.value)
        assert status(server, cookie) == 200
        stream = Stream(server, f"Cookie: {cookie}")
        token = Tokens(tmp_path).add("ada", "read")
        assert stream.is_over.wait(TIMEOUT_S)  # from now on only tokens count
        assert status(server, cookie) == 401
        assert server.client(secret.value)("GET", "/api/v1/system").status == 401
        assert server.client(token)("GET", "/api/v1/system").status == 200
    with WebAppServer(tmp_path / "again") as server:
        assert server.context.local_secret.value != secret.value


def test_the_secret_is_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    secret = local_secret.LocalSecret(tmp_path)
    secret.store()
    path = tmp_path / local_secret.FILE
    assert path.read_text() == secret.value
    assert digest_of(secret.value) == secret.sha256
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret.remove()
    secret.remove()
    assert not path.exists()
