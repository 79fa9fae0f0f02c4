"""The OpenAPI document against a running monitor: some of the calls of `scripts/chaos.py web`, the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import schemathesis

from monitor.web.auth.gatekeeper import SCOPES
from tests.support.schema_calls import call, call_everything, parameters, what_is_there
from tests.support.web_server import Client, Serving

pytestmark = pytest.mark.slow  # thousands of requests

CALLS = 8  # of each operation, in each way


@pytest.fixture(scope="module")
def there(serving: Serving) -> Mapping[str, Mapping[str, Any]]:
    return what_is_there(serving.client())


def test_whatever_is_asked(serving: Serving, there: Mapping[str, Mapping[str, Any]]) -> None:
    done = call_everything(serving.address, there, CALLS)
    assert not done.wrong, "\n\n".join(done.wrong)
    assert set(done.operations) == {f"{method} {path}" for method, path in SCOPES}
    assert done.n_calls > CALLS * len(SCOPES)  # some can be called in one way only
    assert min(done.statuses[status] for status in (200, 201, 404, 422)) > 0, done.statuses


def test_what_is_there_is_told_as_the_schema_says(serving: Serving, there: Mapping[str, Mapping[str, Any]]) -> None:
    """Made-up ids find nothing; so every page of what there is, is asked for by its own id."""
    document = schemathesis.openapi.from_url(f"{serving.address}/openapi.json")
    for method, path in sorted(SCOPES):
        if method == "GET" and path != "/api/v1/jobs/{id}":  # no job was asked for here
            reply = call(document[path][method].Case(path_parameters=parameters(path, there)))
            assert reply.status_code == 200, (path, reply.status_code)


def test_a_review_is_kept_and_told(client: Client) -> None:
    newest, oldest = client.get("/alerts")["items"]
    confirmed = client("POST", f"/api/v1/alerts/{oldest['id']}/review", {"decision": "confirmed", "note": "seen"})
    assert confirmed.json["review"]["decision"] == "confirmed"
    assert confirmed.json["review"]["by"] == "this machine"
    false = client("POST", f"/api/v1/alerts/{newest['id']}/review", {"decision": "false"})
    assert false.json["status"] == "retracted"
    assert false.json["reason"] == "reviewed: false positive"
    assert [one["id"] for one in client.get("/alerts?review=confirmed")["items"]] == [oldest["id"]]
    assert [one["id"] for one in client.get("/alerts?review=false")["items"]] == [newest["id"]]
    assert client.get("/alerts?review=none")["items"] == []
    both = client("POST", "/api/v1/alerts/review", {"ids": [oldest["id"], newest["id"]], "decision": "false"})
    assert [one["status"] for one in both.json["items"]] == ["retracted", "retracted"]
