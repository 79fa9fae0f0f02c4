"""Authorization: every route by every caller, tokens, sessions, requests from other sites and other machines."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitor.config.settings import load_settings
from monitor.errors import ConfigError
from monitor.web.auth import gatekeeper
from monitor.web.auth.gatekeeper import RANK, SCOPES, check_exposure, is_loopback
from monitor.web.auth.tokens import FILE, Tokens
from monitor.web.requests import limits
from tests.support.changing_names import ChangingNames
from tests.support.web_only import WebAppServer

SAMPLES = {
    "{id}": "0" * 24,
    "{name}": "nobody",
    "{second}": "1",
    "{n}": "1",
    "{file}": "air-start.jpg",
    "{d}": "1",
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A token for each scope, and the folder of the token file."""
    folder = tmp_path_factory.mktemp("server")
    tokens = Tokens(folder)
    return {"folder": str(folder)} | {scope: tokens.add(f"{scope}er", scope) for scope in RANK}


@pytest.fixture(scope="module")
def server(tokens: dict[str, str]) -> Iterator[WebAppServer]:
    with WebAppServer(Path(tokens["folder"])) as server:
        yield server


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """Every route of the application, including those of included routers."""
    for route in app.routes:
        if hasattr(route, "methods"):
            yield from ((method, route.path) for method in route.methods)
        elif hasattr(route, "original_router"):
            yield from routes(route.original_router)


def test_the_table_of_scopes_lists_exactly_the_routes_of_the_api(server: WebAppServer) -> None:
    found = set(routes(server.web.app))
    assert {one for one in found if one[1].startswith("/api")} == set(SCOPES)
    open_to_all = {path for _, path in found if not path.startswith("/api")}
    assert open_to_all >= {"/livez", "/readyz", "/channelz", "/metrics", "/openapi.json"}


def test_a_route_that_is_not_in_the_table_is_disabled(
    server: WebAppServer, tokens: dict[str, str], monkeypatch: Any
) -> None:
    monkeypatch.delitem(SCOPES, ("GET", "/api/v1/system"))
    assert server.client(tokens["admin"])("GET", "/api/v1/system").status == 403


@pytest.mark.parametrize(("method", "path"), sorted(SCOPES.keys() - {("GET", "/api/v1/events")}))
def test_each_route_by_each_caller(server: WebAppServer, tokens: dict[str, str], method: str, path: str) -> None:
    wanted = SCOPES[method, path]
    target = re.sub(r"\{\w+\}", lambda part: SAMPLES[part.group()], path)
    assert (server.client()(method, target).status == 401) == (wanted is not None)
    for scope in RANK:
        status = server.client(tokens[scope])(method, target).status
        allowed = wanted is None or RANK[scope] >= RANK[wanted]
        assert (status not in (401, 403)) == allowed, (scope, status)
        assert status < 500


def test_events_need_a_token(server: WebAppServer, tokens: dict[str, str]) -> None:
    assert server.client()("GET", "/api/v1/events").status == 401
    with socket.create_connection(("127.0.0.1", server.port)) as listener:  # the body never ends
        bearer = f"Authorization: Bearer {tokens['read']}"
        listener.sendall(f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n{bearer}\r\n\r\n".encode())
        assert listener.recv(15) == b"HTTP/1.1 200 OK"


def test_a_token_is_stored_as_a_hash_readable_by_its_owner_only(tokens: dict[str, str]) -> None:
    path = Path(tokens["folder"]) / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    for scope in RANK:
        assert tokens[scope].startswith("cw_")
        assert len(tokens[scope]) == 46  # 256 bits
        assert tokens[scope][3:] not in text


def test_tokens_on_the_command_line(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "monitor.cli", "tokens", *words, "--data-dir", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COPYWATCH_CONFIG": ""})

    token = run("add", "ada", "--scope", "write").stdout.strip()
    found = Tokens(tmp_path).find(token)
    assert found
    assert (found.name, found.scope) == ("ada", "write")
    again = run("add", "ada")
    assert (again.returncode, again.stderr) == (
        3,
        "copywatch: token ada already exists; choose another name or remove it.\n",
    )
    listed = json.loads(run("list", "--json").stdout)
    assert [(one["name"], one["scope"]) for one in listed] == [("ada", "write")]
    assert "sha256" not in listed[0]
    assert run("rm", "ada").returncode == 0
    assert Tokens(tmp_path).find(token) is None


def test_a_removed_token_is_refused_and_a_damaged_file_refuses_all(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token, _ = tokens.add("one", "read"), tokens.add("two", "read")
    with WebAppServer(tmp_path) as server:
        assert server.client(token)("GET", "/api/v1/session").json == {"name": "one", "scopes": ["read"]}
        tokens.remove("one")
        statuses_after_removal = (server.client(token)("GET", "/api/v1/session").status for _ in range(10_000))
        assert 401 in statuses_after_removal
        (tmp_path / FILE).write_text("[{")  # damaged
        statuses_after_damage = (server.stranger()("GET", "/api/v1/session").status for _ in range(10_000))
        assert 503 in statuses_after_damage


def test_ten_thousand_invalid_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "BAD_TOKENS_S", 600.0)  # a busy machine needs more than a minute for all of them
    good = Tokens(tmp_path).add("one", "read")
    with WebAppServer(tmp_path) as server:
        statuses = [status for batch in range(20) for status in _guess(server.port, batch * 500, 500)]
        assert statuses == [401] * 10 + [429] * 9990
        assert server.client(good)("GET", "/api/v1/session").status == 200  # other callers are not locked out
        reply = server.client("cw_wrong")("GET", "/api/v1/session")
        assert 0 < int(reply.headers["retry-after"]) <= 600


def _guess(port: int, first: int, n: int) -> list[int]:
    """The statuses of `n` requests with invalid tokens, all sent at once."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answers:
        close = {first + n - 1: "Connection: close\r\n"}
        heads = [
            f"GET /api/v1/session HTTP/1.1\r\nHost: localhost\r\n{close.get(one, '')}"
            f"Authorization: Bearer cw_{one:043}\r\n\r\n"
            for one in range(first, first + n)
        ]
        sending = threading.Thread(target=connection.sendall, args=("".join(heads).encode(),))
        sending.start()
        text = answers.read()
        sending.join()
    return [int(line.split()[1]) for line in re.findall(rb"HTTP/1.1 \d+", text)]


# --- a browser's session ---------------------------------------------------------------------------------------------


@pytest.fixture
def cookie(server: WebAppServer, tokens: dict[str, str]) -> str:
    reply = server.client()("POST", "/api/v1/session", {"token": tokens["write"]})
    assert reply.status == 200
    assert reply.json["scopes"] == ["read", "write"]
    set_cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in set_cookie
    assert "SameSite=strict" in set_cookie
    return str(set_cookie.partition(";")[0])


def test_a_session_needs_a_valid_token(server: WebAppServer) -> None:
    assert server.client()("POST", "/api/v1/session", {"token": "cw_wrong"}).status == 401


def test_pages_of_other_sites_change_nothing(server: WebAppServer, cookie: str) -> None:
    client, own = server.client(), f"http://127.0.0.1:{server.port}"
    licence = {"owner": "ACME"}

    def post(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return client("POST", "/api/v1/licences", licence, {"Cookie": cookie, **named}).status

    assert client("GET", "/api/v1/session", headers={"Cookie": cookie}).status == 200
    assert post(X_Copywatch="1", Origin=own) == 201
    assert post(Origin=own) == 403  # a form of another service on our own host
    assert post(X_Copywatch="1") == 403
    assert post(X_Copywatch="1", Origin="http://evil.example") == 403
    assert post(X_Copywatch="1", Origin="null") == 403
    assert post(X_Copywatch="1", Origin=own, Sec_Fetch_Site="cross-site") == 403
    assert (
        client("DELETE", "/api/v1/session", headers={"Cookie": cookie, "Origin": own, "X-Copywatch": "1"}).status == 204
    )


def test_without_tokens_only_this_machine_is_served_by_a_loopback_name(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        client = server.client()
        assert client.get("/session") == {"name": "this machine", "scopes": ["read", "write", "admin"]}
        refused = server.stranger()("GET", "/api/v1/session")
        assert refused.status == 401
        assert "open the link that `copywatch serve` printed" in refused.json["detail"]
        assert server.client("wrong")("GET", "/api/v1/session").status == 401
        for host, status in [
            ("localhost", 200),
            ("[::1]:80", 200),
            ("rebound.example", 403),
            ("127.0.0.1.evil.example", 403),
        ]:
            assert client("GET", "/api/v1/system", headers={"Host": host}).status == status, host
        evil = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        assert client("POST", "/api/v1/licences", raw=b'{"owner": "x"}', headers=evil).status == 403
        assert client("POST", "/api/v1/licences", {"owner": "x"}, {"Sec-Fetch-Site": "cross-site"}).status == 403
        assert client("POST", "/api/v1/licences", {"owner": "x"}).status == 201
        # forwarded by a proxy on this machine, so from another one
        for name in ("Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"):
            refused = client("GET", "/api/v1/system", headers={name: "203.0.113.9"})
            assert refused.status == 403, name
            assert "copywatch tokens add" in refused.json["detail"]


def test_without_tokens_other_machines_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    with WebAppServer(tmp_path, host="0.0.0.0") as server:
        assert server.client(host=own)("GET", "/api/v1/system", headers={"Host": "localhost"}).status == 403
        assert server.client(host=own)("GET", "/livez").status == 200


def test_listening_beyond_loopback_needs_a_token(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, tokens)
    for host in ("0.0.0.0", "::", "192.168.1.4"):
        with pytest.raises(ConfigError, match="run `copywatch tokens add NAME --scope admin` first"):
            check_exposure(host, tokens)
    tokens.add("one", "read")
    check_exposure("0.0.0.0", tokens)


def test_loopback_names_and_addresses() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"]))
    assert not any(
        map(is_loopback, ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.1.evil", "2130706433"])
    )


# --- proxies ---------------------------------------------------------------------------------------------------------


def test_forwarding_headers_are_believed_from_trusted_proxies_only(tmp_path: Path) -> None:
    Tokens(tmp_path).add("one", "read")

    def statuses(server: WebAppServer) -> list[int]:
        """Of twelve different invalid tokens, each from an invented client."""
        client = server.client()
        return [
            client(
                "GET",
                "/api/v1/session",
                headers={"Authorization": f"Bearer cw_{n}", "X-Forwarded-For": f"203.0.113.{n}"},
            ).status
            for n in range(12)
        ]

    with WebAppServer(tmp_path) as server:
        assert statuses(server) == [401] * 10 + [429] * 2
    with WebAppServer(tmp_path, trusted_proxies=["127.0.0.0/8"]) as server:
        assert statuses(server) == [401] * 12


def test_no_redirect_names_the_host_that_a_client_sent(server: WebAppServer, tokens: dict[str, str]) -> None:
    for path in ("/api/v1/system/", "/livez/"):
        reply = server.client(tokens["read"])("GET", path, headers={"Host": "evil.example"})
        assert reply.status == 404
        assert "location" not in reply.headers
        assert "server" not in reply.headers


# --- paths and texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id",
    [
        "..",
        "../x",
        "%2e%2e",
        "%2e%2e%2fcatalog.sqlite",
        "..%2f..%2fetc%2fpasswd",
        "a%00b",
        "a%0ab",
        "%5c..%5c",
        ".hidden",
    ],
)
def test_an_id_is_never_a_path(server: WebAppServer, tokens: dict[str, str], id: str) -> None:
    client = server.client(tokens["admin"])
    for path in (
        "references/{}",
        "references/{}/export",
        "references/{}/thumbnails/0",
        "channels/{}/thumbnail",
        "alerts/{}",
    ):
        for method in ("GET", "DELETE"):
            reply = client(method, f"/api/v1/{path.format(id)}")
            assert reply.status in (404, 405, 422), (path, reply.status)
            assert reply.headers["content-type"] == "application/problem+json"


def test_text_is_returned_unchanged_as_json(server: WebAppServer, tokens: dict[str, str]) -> None:
    client, words = server.client(tokens["write"]), "<script>alert('ä')</script>"
    made = client("POST", "/api/v1/licences", {"owner": words, "note": words})
    assert made.json["note"] == words
    reply = client("GET", "/api/v1/licences")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert words in [one["note"] for one in reply.json["items"]]
    bad = client("GET", "/api/v1/references/%3Cscript%3E")
    assert bad.headers["content-type"] == "application/problem+json"


def test_a_body_is_limited(server: WebAppServer, tokens: dict[str, str]) -> None:
    reply = server.client(tokens["write"])("POST", "/api/v1/licences", {"note": "x" * (2 << 20)})
    assert reply.status == 413
    assert server.client()("POST", "/api/v1/licences", {"note": "x" * (2 << 20)}).status == 401


def test_only_admins_name_private_addresses(server: WebAppServer, tokens: dict[str, str]) -> None:
    write, admin = server.client(tokens["write"]), server.client(tokens["admin"])
    for url in (
        "http://127.0.0.1/x",
        "http://10.1.2.3/x",
        "udp://239.0.0.1:5000",
        "http://[::ffff:10.0.0.1]/",
        "rtsp://localhost/x",
    ):
        assert write("POST", "/api/v1/channels", {"name": "x", "url": url}).status == 403, url
        assert write("POST", "/api/v1/channels/test", {"url": url}).status == 403, url
    for client in (write, admin):
        for url in ("/etc/passwd", "file:///etc/passwd", "ftp://x/y", "srt://x:1", "concat:/etc/passwd"):
            assert client("POST", "/api/v1/channels", {"name": "x", "url": url}).status == 422, url
    made = admin("POST", "/api/v1/channels", {"name": "inside", "url": "http://user:pa55@10.1.2.3/x?key=hush"})
    assert made.status == 201
    assert made.headers["location"] == "/api/v1/channels/inside"
    assert b"pa55" not in made.body
    assert b"hush" not in made.body
    assert admin("POST", "/api/v1/channels", {"name": "inside", "url": "http://10.1.2.3/x"}).status == 409
    assert "inside" in (server.context.config or Path()).read_text()


def test_a_name_with_a_private_address_is_named_as_private_by_an_admin(
    server: WebAppServer, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ChangingNames(monkeypatch, camera_example="10.1.2.3", cdn_example="93.184.216.34")
    write, admin = server.client(tokens["write"]), server.client(tokens["admin"])
    for body in ({"url": "http://camera.example/"}, {"url": "http://cdn.example/", "private": True}):
        assert write("POST", "/api/v1/channels", {"name": "x", **body}).status == 403, body
        assert write("POST", "/api/v1/channels/test", body).status == 403, body
    refused = admin("POST", "/api/v1/channels", {"name": "camera", "url": "http://camera.example/"})
    assert refused.status == 422
    assert "set `private`" in refused.json["detail"]
    for client, body in (
        (admin, {"name": "camera", "url": "http://camera.example/", "private": True}),
        (write, {"name": "cdn", "url": "http://cdn.example/"}),
    ):
        assert client("POST", "/api/v1/channels", body).status == 201
    assert server.context.config
    stored = {one.name: one.private for one in load_settings(server.context.config).channels}
    assert (stored["camera"], stored["cdn"]) == (True, False)


def test_channels_are_limited_in_all(tmp_path: Path) -> None:
    with WebAppServer(tmp_path, max_channels=3) as server:
        asked = [{"name": f"c{n}", "url": f"http://192.0.2.7/{n}"} for n in range(4)]
        replies = [server.client()("POST", "/api/v1/channels", one) for one in asked]
    assert [reply.status for reply in replies][-1] == 409
    assert "limit of 3 channels" in replies[-1].json["detail"]
    assert server.context.config
    assert len(load_settings(server.context.config).channels) == 3


def test_new_channels_are_limited_per_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANNELS_PER_MINUTE", 2)
    with WebAppServer(tmp_path) as server:
        asked = [{"name": f"c{n}", "url": f"http://192.0.2.7/{n}"} for n in range(4)]
        replies = [server.client()("POST", "/api/v1/channels", one) for one in asked]
        assert [reply.status for reply in replies] == [201, 201, 429, 429]
        assert replies[-1].headers["retry-after"] == "60"
