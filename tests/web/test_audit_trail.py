"""The audit trail of the API: changes, sign-ins and refusals, with the caller's name and address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from monitor.alerting.outbox import OutboxEntry
from monitor.audit.chain import record_of, verify_chain
from monitor.audit.log import FILE, AuditLog
from monitor.audit.refusals import SHOWN_EACH
from monitor.web.audit_trail import ACTIONS, action_of
from monitor.web.auth.gatekeeper import CHANGES, SCOPES
from monitor.web.auth.tokens import Tokens
from tests.support.sample_alert import sample_alert
from tests.support.web_only import WebAppServer
from tests.support.web_server import Client


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    stored = Tokens(tmp_path)
    return {"ann": stored.add("ann", "read"), "bob": stored.add("bob", "write"), "eve": stored.add("eve", "admin")}


@pytest.fixture
def server(tokens: dict[str, str], tmp_path: Path) -> Iterator[WebAppServer]:
    with WebAppServer(tmp_path) as running:
        yield running


@pytest.fixture
def bob(server: WebAppServer, tokens: dict[str, str]) -> Client:
    return server.client(tokens["bob"])


def entries(data_dir: Path) -> list[dict[str, Any]]:
    log = AuditLog(data_dir)
    assert log.verify().is_whole
    return [one.as_dict() for one in log.records()]


def test_the_named_actions_are_those_of_routes() -> None:
    changes = [(method, path) for method, path in SCOPES if method in CHANGES]
    assert {f"{method} {path.removeprefix('/api/v1')}" for method, path in changes} >= ACTIONS.keys()
    assert action_of("POST", "/api/v1/licences") == "licences add"
    assert action_of("POST", "/api/v1/unnamed/{id}") == "POST /api/v1/unnamed/{id}"


def test_a_change_is_recorded_with_name_address_object_and_result(tmp_path: Path, bob: Client) -> None:
    licence = bob("POST", "/api/v1/licences", {"owner": "ACME", "note": "private words"}).json
    assert bob("DELETE", f"/api/v1/licences/{licence['id']}").status == 204
    added, removed = entries(tmp_path)
    assert (added["who"], added["address"], added["via"]) == ("bob", "127.0.0.1", "api")
    assert (added["action"], added["object"], added["result"], added["status"]) == ("licences add", "L1", "done", 201)
    assert added["details"] == {"owner": "ACME", "channel": "*"}
    assert (removed["action"], removed["object"], removed["status"]) == ("licences rm", "L1", 204)
    assert "private words" not in json.dumps([added, removed])


def test_a_repeated_request_is_recorded_once(tmp_path: Path, bob: Client) -> None:
    for _ in range(3):
        assert bob("POST", "/api/v1/licences", {"owner": "x"}, {"Idempotency-Key": "one"}).status == 201
    assert [one["action"] for one in entries(tmp_path)] == ["licences add"]


def test_reading_is_not_recorded(tmp_path: Path, bob: Client) -> None:
    bob.get("/licences")
    assert not (tmp_path / FILE).exists()


def test_the_entries_of_a_review_name_the_alert(tmp_path: Path, server: WebAppServer, bob: Client) -> None:
    alert = sample_alert()
    server.outbox.write([OutboxEntry(alert.channel, [alert])])
    assert bob("POST", f"/api/v1/alerts/{alert.id}/review", {"decision": "confirmed"}).status == 200
    assert bob("POST", "/api/v1/alerts/review", {"ids": [alert.id], "decision": "licensed"}).status == 200
    found = [one.as_dict() for one in AuditLog(tmp_path).of_alert(alert.id)]
    assert [one["details"]["decision"] for one in found] == ["confirmed", "licensed"]
    assert {one["who"] for one in found} == {"bob"}


def test_sign_in_and_sign_out_are_recorded(tmp_path: Path, server: WebAppServer, tokens: dict[str, str]) -> None:
    browser, own = server.client(), f"http://127.0.0.1:{server.port}"
    page = {"X-Copywatch": "1", "Origin": own}
    reply = browser("POST", "/api/v1/session", {"token": tokens["bob"]}, page)
    cookie = {"Cookie": reply.headers["set-cookie"].partition(";")[0], **page}
    assert browser("POST", "/api/v1/licences", {"owner": "x"}, cookie).status == 201
    assert browser("DELETE", "/api/v1/session", headers=cookie).status == 204
    assert browser("DELETE", "/api/v1/session").status == 204  # of an unknown caller: nothing changes
    assert browser("POST", "/api/v1/session", {"token": "cw_" + "x" * 43}).status == 401
    found = [(one["action"], one["who"], one["via"], one["result"]) for one in entries(tmp_path)]
    assert found == [
        ("sign in", "bob", "dashboard", "done"),
        ("licences add", "bob", "dashboard", "done"),
        ("sign out", "bob", "dashboard", "done"),
        ("sign in", None, "api", "refused"),
    ]
    files = b"".join(path.read_bytes() for path in tmp_path.glob(f"{FILE}*"))
    assert b"cw_" + b"x" * 43 not in files
    assert tokens["bob"].encode() not in files


def test_refused_requests_are_recorded_with_the_name_where_it_is_known(
    tmp_path: Path, server: WebAppServer, tokens: dict[str, str]
) -> None:
    assert server.client()("GET", "/api/v1/alerts").status == 401
    assert server.client(tokens["ann"])("POST", "/api/v1/licences", {"owner": "x"}).status == 403
    assert server.client(tokens["bob"])("GET", "/api/v1/audit").status == 403
    local = {"name": "five", "url": "http://user:pa55@127.0.0.1:1/x"}
    assert server.client(tokens["bob"])("POST", "/api/v1/channels", local).status == 403  # refused by the route
    found = [(one["action"], one["who"], one["status"], one["result"]) for one in entries(tmp_path)]
    assert found == [
        ("GET /api/v1/alerts", None, 401, "refused"),
        ("licences add", "ann", 403, "refused"),
        ("GET /api/v1/audit", "bob", 403, "refused"),
        ("channels add", "bob", 403, "refused"),
    ]
    assert b"pa55" not in (tmp_path / FILE).read_bytes()


def test_many_refusals_are_counted(tmp_path: Path, tokens: dict[str, str]) -> None:
    with WebAppServer(tmp_path) as server:
        for _ in range(50):
            assert server.client()("GET", "/api/v1/alerts").status == 401
    *shown, counted = entries(tmp_path)
    assert len(shown) == SHOWN_EACH
    assert (counted["action"], counted["address"], counted["details"]) == ("requests", "127.0.0.1", {"requests": 40})


def test_many_failed_changes_are_counted(tmp_path: Path, tokens: dict[str, str]) -> None:
    with WebAppServer(tmp_path) as server:
        for _ in range(50):
            assert server.client(tokens["bob"])("DELETE", "/api/v1/licences/L9").status == 404
    *shown, counted = entries(tmp_path)
    assert [(one["action"], one["result"], one["status"]) for one in shown] == [("licences rm", "failed", 404)] * 10
    assert (counted["who"], counted["result"], counted["details"]) == ("bob", "failed", {"requests": 40})


def test_a_change_that_cannot_be_recorded_is_not_made(tmp_path: Path, server: WebAppServer, bob: Client) -> None:
    assert bob("POST", "/api/v1/licences", {"owner": "x"}).status == 201
    blocking = apsw.Connection(str(tmp_path / FILE))
    blocking.execute("CREATE TRIGGER full BEFORE INSERT ON pending BEGIN SELECT raise(ABORT, 'disk full'); END")
    blocking.execute("CREATE TRIGGER full_too BEFORE INSERT ON entry BEGIN SELECT raise(ABORT, 'disk full'); END")
    reply = bob("POST", "/api/v1/licences", {"owner": "y"})
    assert (reply.status, reply.json["detail"]) == (
        503,
        "The audit log cannot be written, so the request was not executed.",
    )
    assert server.client()("GET", "/api/v1/alerts").status == 401  # refused all the same
    assert bob.get("/licences")["items"][0]["owner"] == "x"
    assert len(bob.get("/licences")["items"]) == 1
    blocking.execute("DROP TRIGGER full; DROP TRIGGER full_too")
    blocking.close()
    assert bob("POST", "/api/v1/licences", {"owner": "z"}).status == 201


def test_admins_read_the_log_in_pages_and_export_it(
    tmp_path: Path, server: WebAppServer, tokens: dict[str, str], bob: Client
) -> None:
    for n in range(5):
        assert bob("POST", "/api/v1/licences", {"owner": f"o{n}"}).status == 201
    eve = server.client(tokens["eve"])
    first = eve.get("/audit?limit=2&who=bob")
    assert [one["object"] for one in first["items"]] == ["L5", "L4"]
    assert [one["object"] for one in eve.get(f"/audit?limit=2&cursor={first['next']}")["items"]] == ["L3", "L2"]
    assert eve.get("/audit?action=webhooks")["items"] == []
    assert eve.get("/audit?result=done&since=2999-01-01T00:00:00Z")["items"] == []
    reply = eve("GET", "/api/v1/audit/export")
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    records = [record_of(line) for line in reply.body.decode().splitlines()]
    assert verify_chain(records).is_whole
    assert [one.as_dict()["object"] for one in records] == [f"L{n}" for n in range(1, 6)]


def test_without_tokens_the_caller_is_this_machine(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        assert server.client()("POST", "/api/v1/licences", {"owner": "x"}).status == 201
    (entry,) = entries(tmp_path)
    assert (entry["who"], entry["address"]) == ("this machine", "127.0.0.1")
