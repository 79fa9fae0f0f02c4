"""Schemathesis calls every operation of the OpenAPI document: no call may fail, all replies must fit the schema.

Each operation is called with valid values, with invalid values, and, if its path names a resource, for an existing
one. The calls follow from a seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from requests.adapters import HTTPAdapter
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.web_server import TIMEOUT_S, Client

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class FirstEventAdapter(HTTPAdapter):
    """Reads whole responses, but only the first event of an endless event stream."""

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        response = super().send(request, *args, **{**kwargs, "stream": True})
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            lines = [response.raw.readline()]
            while lines[-1].strip():
                lines.append(response.raw.readline())
            response._content = b"".join(lines)
            response.close()
        return response


def call(case: schemathesis.Case[Any], client: Client) -> schemathesis.Response:
    """Calls as this client and validates; raises the failures that Schemathesis found."""
    with requests.Session() as session:
        session.headers.update(client.headers)
        session.mount("http://", FirstEventAdapter())
        return case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S, session=session)


@dataclass
class Calls:
    """The calls, their statuses and failures."""

    operations: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def n_calls(self) -> int:
        return sum(self.operations.values())


def call_everything(
    client: Client, existing: Mapping[str, Mapping[str, Any]], calls_each: int, number: int = 0
) -> Calls:
    """Calls every operation `calls_each` times of each of three kinds; `existing` has path parameters of resources."""
    address = f"http://{client.host}:{client.port}"
    document, done = schemathesis.openapi.from_url(f"{address}/openapi.json"), Calls()
    for found in document.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        for strategy in _strategies(operation, existing):
            try:
                _call_often(operation.label, strategy, client, calls_each, number, done)
            except Unsatisfiable:
                pass  # it has no invalid values
            except Exception as error:
                done.failures.append(f"{operation.label}: {error}")
    return done


def _call_often(name: str, strategy: Any, client: Client, calls_each: int, number: int, done: Calls) -> None:
    """Calls one operation `calls_each` times; raises the first failure."""

    @seed(number)
    @settings(
        max_examples=calls_each,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def call_once(case: schemathesis.Case[Any]) -> None:
        done.operations[name] += 1
        done.statuses[call(case, client).status_code] += 1

    call_once()


def _strategies(operation: Any, existing: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    yield operation.as_strategy(GenerationMode.POSITIVE)
    yield operation.as_strategy(GenerationMode.NEGATIVE)
    if operation.method != "delete" and (known := parameters(operation.path, existing)):
        yield operation.as_strategy(GenerationMode.POSITIVE, path_parameters=known)


def parameters(path: str, existing: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The path parameters of an existing resource."""
    return dict(next((values for begin, values in existing.items() if path.startswith(begin)), {}))


def existing_resources(client: Client) -> dict[str, dict[str, Any]]:
    """Path parameters by the beginning of a path; creates the resources that the server lacks."""
    newest = client.get("/alerts")["items"][0]["id"]
    webhook = client("POST", "/api/v1/webhooks", {"url": "https://user:pw@example.org/h?k=v"}).json
    assert "pw" not in webhook["url"]
    assert client("POST", "/api/v1/licences", {"owner": "<script>", "until": "2027-01-01T00:00:00Z"}).status == 201
    assert client("POST", "/api/v1/references/garden/exclusions", {"start_s": 1, "end_s": 2}).status == 201
    return {
        "/api/v1/channels/{name}": {"name": "works"},
        "/api/v1/references/{id}/thumbnails/{second}": {"id": "harbour", "second": 3},
        "/api/v1/references/{id}": {"id": "harbour"},
        "/api/v1/alerts/{id}/evidence/{file}": {"id": newest, "file": "air-start.jpg"},
        "/api/v1/alerts/{id}": {"id": newest},
        "/api/v1/webhooks/{id}": {"id": webhook["id"]},
    }
