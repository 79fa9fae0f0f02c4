"""`Idempotency-Key` and `ETag`: a request that is sent again is done once, and nobody changes what he has not seen."""

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
from tests.support.web_only import Door
from tests.support.web_server import Reply

KEY = {"Idempotency-Key": "9b1c-4"}


def test_a_request_sent_again_is_answered_again_and_done_once(tmp_path: Path) -> None:
    with Door(tmp_path) as door:
        first = door.client()("POST", "/api/v1/licences", {"owner": "ACME"}, KEY)
    with Door(tmp_path) as door:  # after a restart
        client = door.client()
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
    assert (tmp_path / "replies.sqlite").stat().st_mode & 0o777 == 0o600  # a webhook's secret may be in it


CRASH = """
import os, sys
from pathlib import Path
from monitor.rights.store import RightsStore
from tests.support.web_only import Door

def dies(*args, **values):
    if sys.argv[2] == "after":
        add(*args, **values)
    os._exit(9)

add, RightsStore.add_licence = RightsStore.add_licence, dies
with Door(Path(sys.argv[1])) as door:
    door.client()("POST", "/api/v1/licences", {"owner": "ACME"}, {"Idempotency-Key": "9b1c-4"})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("point", "n_licences"), [("before", 0), ("after", 1)])
def test_whether_it_was_done_before_a_crash_is_not_guessed(tmp_path: Path, point: str, n_licences: int) -> None:
    assert subprocess.run([sys.executable, "-c", CRASH, tmp_path, point]).returncode == 9
    with Door(tmp_path) as door:
        client = door.client()
        again = client("POST", "/api/v1/licences", {"owner": "ACME"}, KEY)
        assert again.status == 409
        assert "may or may not have been executed" in again.json["detail"]
        assert len(client.get("/licences")["items"]) == n_licences
        assert client("POST", "/api/v1/licences", {"owner": "ACME"}, {"Idempotency-Key": "9b1c-5"}).status == 201


def test_a_secret_that_got_lost_on_the_way_is_told_again(tmp_path: Path) -> None:
    with Door(tmp_path) as door:
        made = [door.client()("POST", "/api/v1/webhooks", {"url": "https://example.org/h"}, KEY).json for _ in "12"]
    assert made[0] == made[1]
    assert made[0]["secret"].startswith("whsec_")


def test_a_token_is_not_kept_with_the_answers(tmp_path: Path) -> None:
    token = Tokens(tmp_path).add("ada", "admin")
    with Door(tmp_path) as door:
        for _ in range(2):
            reply = door.client(token)("POST", "/api/v1/session", {"token": token}, KEY)
            assert (reply.status, "idempotent-replayed" in reply.headers) == (200, False)
        assert door.client(token)("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 201
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("replies.sqlite*"))
    assert b"ACME" in kept
    assert token.encode() not in kept


def test_an_upload_sent_again_is_one_job(tmp_path: Path, recorded: RecordedChannel) -> None:
    content = recorded.recording.read_bytes()

    def body(boundary: str) -> bytes:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.mp4"\r\n\r\n'
        return head.encode() + content + f"\r\n--{boundary}--\r\n".encode()

    with Door(tmp_path) as door:
        client, jobs = door.client(), []
        for boundary in ("one", "another"):
            kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            reply = client("POST", "/api/v1/references", raw=body(boundary), headers={**kind, **KEY})
            assert reply.status == 202, reply.body
            jobs.append(reply.json["job"]["id"])
            assert reply.headers["location"] == f"/api/v1/jobs/{jobs[-1]}"
        assert jobs[0] == jobs[1]
        assert len(client.get("/jobs")["items"]) == 1


def test_what_failed_may_be_tried_again(tmp_path: Path) -> None:
    with Door(tmp_path) as door:
        client = door.client()
        assert client("POST", "/api/v1/licences", {"note": "for nothing"}, KEY).status == 422
        assert client("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 201


def test_a_key_belongs_to_its_caller_and_its_route(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    ada, bob = tokens.add("ada", "admin"), tokens.add("bob", "admin")
    with Door(tmp_path) as door:
        for token in (ada, bob):
            assert door.client(token)("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 201
        assert door.client(ada)("POST", "/api/v1/webhooks", {"url": "https://example.org"}, KEY).status == 201
        assert len(door.client(ada).get("/licences")["items"]) == 2
        assert door.client("cw_wrong")("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 401


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "\u00e4"])
def test_a_key_that_is_none(tmp_path: Path, key: str) -> None:
    with Door(tmp_path) as door:
        reply = door.client()("POST", "/api/v1/licences", {"owner": "ACME"}, {"Idempotency-Key": key})
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/problem+json"


def test_twice_at_once_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first waits for the monitor, which is not there, to retract an alert."""
    looked, may_end = threading.Event(), threading.Event()
    seqs = alerts._last_events

    def slowly(*args: object) -> dict[str, tuple[int, str]]:
        looked.set()
        assert may_end.wait(60)
        return seqs(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(alerts, "_last_events", slowly)
    with Door(tmp_path) as door:
        door.outbox.write([OutboxEntry("ch5", [sample_alert()])])
        path, replies = f"/api/v1/alerts/{sample_alert().id}/review", list[Reply]()
        first = threading.Thread(
            target=lambda: replies.append(door.client()("POST", path, {"decision": "confirmed"}, KEY))
        )
        first.start()
        assert looked.wait(60)
        second = door.client()("POST", path, {"decision": "confirmed"}, KEY)
        assert (second.status, second.headers["retry-after"]) == (409, "1")
        may_end.set()
        first.join()
        assert replies[0].status == 200
        assert len(door.context.rights.reviews()) == 1


def test_answers_are_kept_for_a_day_and_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = idempotency.Replies(tmp_path)
    answer = idempotency.StoredReply("", 201, [("a", "b")], b"{}")
    monkeypatch.setattr(idempotency, "MAX_REPLIES", 3)
    for n in range(5):
        replies.store(("ada", "/x?", str(n)), answer)
    assert [replies.find(("ada", "/x?", str(n))) for n in range(5)] == [None, None, answer, answer, answer]
    monkeypatch.setattr(idempotency, "RETENTION_S", 0.0)
    assert replies.find(("ada", "/x?", "4")) is None


def test_a_disk_that_keeps_no_answers_lets_nothing_be_done_twice(tmp_path: Path) -> None:
    (tmp_path / "replies.sqlite").write_bytes(b"no database at all, but long enough to look like one" * 100)
    with Door(tmp_path) as door:
        assert door.client()("POST", "/api/v1/licences", {"owner": "ACME"}, KEY).status == 503
        assert door.client()("POST", "/api/v1/licences", {"owner": "ACME"}).status == 201
        assert len(door.client().get("/licences")["items"]) == 1


def test_the_document_names_it_for_every_post_but_logging_in(tmp_path: Path) -> None:
    with Door(tmp_path) as door:
        paths = json.loads(door.client()("GET", "/openapi.json").body)["paths"]
    with_key = {
        path
        for path, methods in paths.items()
        if "Idempotency-Key" in [one["name"] for one in methods.get("post", {}).get("parameters", [])]
    }
    assert with_key == {path for (method, path), scope in SCOPES.items() if method == "POST" and scope is not None}


# --- ETag ------------------------------------------------------------------------------------------------------------


def test_a_reference_is_sent_once_and_removed_as_it_was_seen(tmp_path: Path, recorded: RecordedChannel) -> None:
    shutil.copytree(recorded.settings.data_dir, tmp_path / "data")
    with Door(tmp_path / "data") as door:
        client = door.client()
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


# --- many at once ----------------------------------------------------------------------------------------------------


def test_many_alerts_are_reviewed_at_once_or_none(tmp_path: Path) -> None:
    with Door(tmp_path) as door:
        door.outbox.write([OutboxEntry("ch5", [sample_alert(n) for n in range(3)])])
        client, ids = door.client(), [sample_alert(n).id for n in range(3)]
        unknown = client("POST", "/api/v1/alerts/review", {"ids": [*ids, "f" * 24], "decision": "confirmed"})
        assert unknown.status == 404
        assert door.context.rights.reviews() == []
        for wrong in ([], ["x"], ids * 100):
            assert client("POST", "/api/v1/alerts/review", {"ids": wrong, "decision": "confirmed"}).status == 422
        said = client("POST", "/api/v1/alerts/review", {"ids": [*ids, ids[0]], "decision": "confirmed", "note": "seen"})
        assert [one["id"] for one in said.json["items"]] == ids
        assert {(one["review"]["decision"], one["review"]["note"]) for one in said.json["items"]} == {
            ("confirmed", "seen")
        }
        assert len(door.context.rights.reviews()) == 3
