"""The OpenAPI document against a running monitor: a small, reproducible run of `scripts/chaos.py web`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import schemathesis

from monitor.web.auth.gatekeeper import SCOPES
from tests.support.schema_calls import call, call_everything, existing_resources, parameters
from tests.support.web_server import Client, MonitorServer

pytestmark = pytest.mark.slow  # thousands of requests

CALLS = 8  # of each operation and kind


@pytest.fixture(scope="module")
def existing(server: MonitorServer) -> Mapping[str, Mapping[str, Any]]:
    return existing_resources(server.client())


def test_every_operation_conforms_to_the_schema(
    server: MonitorServer, existing: Mapping[str, Mapping[str, Any]]
) -> None:
    done = call_everything(server.client(), existing, CALLS)
    assert not done.failures, "\n\n".join(done.failures)
    assert set(done.operations) == {f"{method} {path}" for method, path in SCOPES}
    assert done.n_calls > CALLS * len(SCOPES)  # some have only one kind of call
    assert min(done.statuses[status] for status in (200, 201, 404, 422)) > 0, done.statuses


def test_existing_resources_conform_to_the_schema(
    server: MonitorServer, existing: Mapping[str, Mapping[str, Any]]
) -> None:
    """Generated ids find nothing, so every resource is requested by an existing id."""
    document = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    for method, path in sorted(SCOPES):
        if method == "GET" and path != "/api/v1/jobs/{id}":  # there is no job here
            reply = call(document[path][method].Case(path_parameters=parameters(path, existing)), server.client())
            assert reply.status_code == 200, (path, reply.status_code)


def test_a_review_is_stored_and_shown(client: Client) -> None:
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
