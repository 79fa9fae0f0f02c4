"""`Idempotency-Key` and `ETag`: a retried request is executed once, and an outdated one changes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from monitor.alerting.outbox import OutboxEntry
from monitor.web.auth.gatekeeper import SCOPES
from monitor.web.auth.tokens import Tokens
from monitor.web.requests import idempotency
from monitor.web.routes import alerts
from tests.support.recorded_channel import RecordedChannel
from tests.support.sample_alert import sample_alert
from tests.support.web_only import WebAppServer
from tests.support.web_server import Reply

KEY = {"Idempotency-Key": "9b1c-4"}


def test_a_retry_gets_the_stored_reply_and_is_executed_once(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        first = server.client()("POST", "/api/v1/licences", {"owner": "ACME"}, KEY)
    with WebAppServer(tmp_path) as server:  # after a restart
        client = server.client()
        again = client("POST", "/api/v1/licences", {"owner": "ACME"}, KEY)
        assert (first.status, again.status) == (201, 201)
        assert again.json == first.json
        assert again.headers["idempotent-replayed"] == "true"
        assert "idempotent-replayed" not in first.headers
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert len(client.get("/licences")["items"]) == 1
        other = client("POST", "/api/v1/licences", {"owner": "EMCA"}, KEY)
        assert other.status == 422
        assert "used for another request" in other.json["detail"]
        assert client("POST", "/api/v1/licences", {"owner": "EMCA"}, {"Idempotency-Key": "9b1c-5"}).status == 201
        assert client("POST", "/api/v1/licences", {"owner": "EMCA"}).status == 201
        assert len(client.get("/licences")["items"]) == 3
    assert (tmp_path / "replies.sqlite").stat().st_mode & 0o777 == 0o600


CRASH = """
import os, sys
from pathlib import Path
from monitor.rights.store import RightsStore
from tests.support.web_only import WebAppServer

def crash(*args, **values):
    if sys.argv[2] == "after":
        add(*args, **values)
    os._exit(9)

add, RightsStore.add_licence = RightsStore.add_licence, crash
with WebAppServer(Path(sys.argv[1])) as server:
    server.client()("POST", "/api/v1/licences", {"owner": "ACME"}, {"Idempotency-Key": "9b1c-4"})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("point", "n_licences"), [("before", 0), ("after", 1)])
def test_after_a_crash_the_outcome_is_reported_as_unknown(tmp_path: Path, point: str, n_licences: int) -> None:
    assert subprocess.run([sys.executable, "-c", CRASH, tmp_path, point]).returncode == 9
    with WebAppServer(tmp_path) as server:
        client = server.client()
        again = client("POST", "/api/v1/licences", {"owner": "ACME"}, KEY)
        assert again.status == 409
        assert "may or may not have been executed" in again.json["detail"]
        assert len(client.get("/licences")["items"]) == n_licences
        assert client("POST", "/api/v1/licences", {"owner": "ACME"}, {"Idempotency-Key": "9b1c-5"}).status == 201


def test_a_secret_is_not_stored_with_the_replies(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        client = server.client()
        made = [client("POST", "/api/v1/webhooks", {"url": "https://example.org/h"}, KEY).json for _ in "12"]
        rotated = client("POST", f"/api/v1/webhooks/{made[0]['id']}/rotate", {}, KEY).json
    secret = made[0]["secret"]
    assert secret.startswith("whsec_")
    assert made[1] == {**made[0], "secret": None}
    content = b"".join(path.read_bytes() for path in tmp_path.glob("replies.sqlite*"))
    assert made[0]["id"].encode() in content
    for shown in (secret, rotated["secret"]):
        assert shown.encode() not in content


def test_a_token_is_not_stored_with_the_replies(tmp_path: Path) -> None:
    token = Tokens(tmp_path).add("ada", "admin")
    with WebAppServer(tmp_path) as server:
        for _ in range(2):
            reply = server.client(token)("POST", "/api/v1/session", {"token": token}, KEY)
            assert (reply.status, "idempotent-replayed" in reply.headers) == (200, False)
        assert server.client(token)("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 201
    content = b"".join(path.read_bytes() for path in tmp_path.glob("replies.sqlite*"))
    assert b"ACME" in content
    assert token.encode() not in content


def test_a_retried_upload_is_one_job(tmp_path: Path, recorded: RecordedChannel) -> None:
    content = recorded.recording.read_bytes()

    def body(boundary: str) -> bytes:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.mp4"\r\n\r\n'
        return head.encode() + content + f"\r\n--{boundary}--\r\n".encode()

    with WebAppServer(tmp_path) as server:
        client, jobs = server.client(), []
        for boundary in ("one", "another"):
            kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            reply = client("POST", "/api/v1/references", raw=body(boundary), headers={**kind, **KEY})
            assert reply.status == 202, reply.body
            jobs.append(reply.json["job"]["id"])
            assert reply.headers["location"] == f"/api/v1/jobs/{jobs[-1]}"
        assert jobs[0] == jobs[1]
        assert len(client.get("/jobs")["items"]) == 1


def test_a_failed_request_may_be_retried(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        client = server.client()
        assert client("POST", "/api/v1/licences", {"note": "for nothing"}, KEY).status == 422
        assert client("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 201


def test_a_key_belongs_to_its_caller_and_its_route(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    ada, bob = tokens.add("ada", "admin"), tokens.add("bob", "admin")
    with WebAppServer(tmp_path) as server:
        for token in (ada, bob):
            assert server.client(token)("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 201
        assert server.client(ada)("POST", "/api/v1/webhooks", {"url": "https://example.org"}, KEY).status == 201
        assert len(server.client(ada).get("/licences")["items"]) == 2
        assert server.client("cw_wrong")("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 401


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "\u00e4"])
def test_an_invalid_key_is_refused(tmp_path: Path, key: str) -> None:
    with WebAppServer(tmp_path) as server:
        reply = server.client()("POST", "/api/v1/licences", {"owner": "ACME"}, {"Idempotency-Key": key})
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/problem+json"


def test_two_concurrent_requests_with_one_key_are_executed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second arrives while the first is still reading the alert."""
    has_started, may_end = threading.Event(), threading.Event()
    last_events = alerts._last_events

    def slowly(*args: object) -> dict[str, tuple[int, str]]:
        has_started.set()
        assert may_end.wait(60)
        return last_events(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(alerts, "_last_events", slowly)
    with WebAppServer(tmp_path) as server:
        server.outbox.write([OutboxEntry("ch5", [sample_alert()])])
        path, replies = f"/api/v1/alerts/{sample_alert().id}/review", list[Reply]()
        first = threading.Thread(
            target=lambda: replies.append(server.client()("POST", path, {"decision": "confirmed"}, KEY))
        )
        first.start()
        assert has_started.wait(60)
        second = server.client()("POST", path, {"decision": "confirmed"}, KEY)
        assert (second.status, second.headers["retry-after"]) == (409, "1")
        may_end.set()
        first.join()
        assert replies[0].status == 200
        assert len(server.context.rights.reviews()) == 1


def test_replies_are_stored_for_a_day_and_limited_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = idempotency.Replies(tmp_path)
    reply = idempotency.StoredReply("", 201, [("a", "b")], b"{}")
    monkeypatch.setattr(idempotency, "MAX_REPLIES", 3)
    for n in range(5):
        replies.store(("ada", "/x?", str(n)), reply)
    assert [replies.find(("ada", "/x?", str(n))) for n in range(5)] == [None, None, reply, reply, reply]
    monkeypatch.setattr(idempotency, "RETENTION_S", 0.0)
    assert replies.find(("ada", "/x?", "4")) is None


def test_without_a_store_of_replies_a_request_with_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "replies.sqlite").write_bytes(b"not a database, but long enough to look like one" * 100)
    with WebAppServer(tmp_path) as server:
        assert server.client()("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 503
        assert server.client()("POST", "/api/v1/licences", {"owner": "ACME"}).status == 201
        assert len(server.client().get("/licences")["items"]) == 1


def test_openapi_names_the_key_for_every_post_except_the_login(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        paths = json.loads(server.client()("GET", "/openapi.json").body)["paths"]
    with_key = {
        path
        for path, methods in paths.items()
        if "Idempotency-Key" in [one["name"] for one in methods.get("post", {}).get("parameters", [])]
    }
    assert with_key == {path for (method, path), scope in SCOPES.items() if method == "POST" and scope is not None}


# --- ETag ------------------------------------------------------------------------------------------------------------


def test_etags_of_a_reference_avoid_transfers_and_guard_its_removal(tmp_path: Path, recorded: RecordedChannel) -> None:
    shutil.copytree(recorded.settings.data_dir, tmp_path / "data")
    with WebAppServer(tmp_path / "data") as server:
        client = server.client()
        for path in ("/references/harbour", "/references/harbour/export", "/references/harbour/thumbnails/3"):
            reply = client("GET", f"/api/v1{path}")
            tag = reply.headers["etag"]
            for known in (tag, f'"other", W/{tag}', "*"):
                again = client("GET", f"/api/v1{path}", headers={"If-None-Match": known})
                assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag), (path, known)
            assert client("GET", f"/api/v1{path}", headers={"If-None-Match": '"other"'}).status == 200
        harbour = client("GET", "/api/v1/references/harbour").headers["etag"]
        garden = client("GET", "/api/v1/references/garden").headers["etag"]
        assert harbour != garden
        refused = client("DELETE", "/api/v1/references/harbour", headers={"If-Match": garden})
        assert refused.status == 412
        assert client("GET", "/api/v1/references/harbour").status == 200
        assert client("DELETE", "/api/v1/references/harbour", headers={"If-Match": harbour}).status == 204
        assert client("DELETE", "/api/v1/references/harbour", headers={"If-Match": harbour}).status == 404


# --- many alerts ---------------------------------------------------------------------------------------------------


def test_many_alerts_are_reviewed_together_or_not_at_all(tmp_path: Path) -> None:
    with WebAppServer(tmp_path) as server:
        server.outbox.write([OutboxEntry("ch5", [sample_alert(n) for n in range(3)])])
        client, ids = server.client(), [sample_alert(n).id for n in range(3)]
        unknown = client("POST", "/api/v1/alerts/review", {"ids": [*ids, "f" * 24], "decision": "confirmed"})
        assert unknown.status == 404
        assert server.context.rights.reviews() == []
        for invalid in ([], ["x"], ids * 100):
            assert client("POST", "/api/v1/alerts/review", {"ids": invalid, "decision": "confirmed"}).status == 422
        reviewed = client(
            "POST", "/api/v1/alerts/review", {"ids": [*ids, ids[0]], "decision": "confirmed", "note": "seen"}
        )
        assert [one["id"] for one in reviewed.json["items"]] == ids
        assert {(one["review"]["decision"], one["review"]["note"]) for one in reviewed.json["items"]} == {
            ("confirmed", "seen")
        }
        assert len(server.context.rights.reviews()) == 3
