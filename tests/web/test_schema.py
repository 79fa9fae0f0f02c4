"""The whole OpenAPI document, called by Schemathesis against a running monitor: nothing fails, all fits the schema.

Seeded and bounded: the same calls each time.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from monitor.web.auth import SCOPES
from tests.web.serving import PATIENCE_S, Client, Serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CALLS = 20  # of each operation


@pytest.fixture(scope="module")
def api_schema(serving: Serving) -> Any:
    # What /events sends never ends; it has tests of its own.
    return schemathesis.openapi.from_url(f"{serving.address}/openapi.json").exclude(path="/api/v1/events")


def test_whatever_is_asked(api_schema: Any) -> None:
    n_called = 0
    for operation in api_schema.get_all_operations():

        @settings(
            max_examples=CALLS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.ok().as_strategy())
        def call(case: schemathesis.Case[Any]) -> None:
            nonlocal n_called
            case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)
            n_called += 1

        call()
    assert n_called > 3 * len(SCOPES)


def test_what_is_there_is_told_as_the_schema_says(api_schema: Any, client: Client) -> None:
    """Made-up ids find nothing; so every page of what there is, is asked for by its own id."""
    newest = client.get("/alerts")["items"][0]["id"]
    made = {
        "webhook": client("POST", "/api/v1/webhooks", {"url": "https://user:pw@example.org/h?k=v"}).json,
        "licence": client("POST", "/api/v1/licences", {"owner": "<script>", "until": "2027-01-01T00:00:00Z"}).json,
        "exclusion": client("POST", "/api/v1/references/garden/exclusions", {"start_s": 1, "end_s": 2}).json,
    }
    assert "pw" not in made["webhook"]["url"]
    real = {
        "/api/v1/channels/{name}": {"name": "works"},
        "/api/v1/references/{id}/thumbnails/{second}": {"id": "harbour", "second": 3},
        "/api/v1/references/{id}": {"id": "harbour"},
        "/api/v1/alerts/{id}/evidence/{file}": {"id": newest, "file": "air-start.jpg"},
        "/api/v1/alerts/{id}": {"id": newest},
        "/api/v1/webhooks/{id}": {"id": made["webhook"]["id"]},
    }
    for method, path in sorted(SCOPES):
        if method != "GET" or path in ("/api/v1/events", "/api/v1/jobs/{id}"):
            continue
        values = next((found for begin, found in real.items() if path.startswith(begin)), {})
        case = api_schema[path][method].Case(path_parameters=values)
        reply = case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)
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
