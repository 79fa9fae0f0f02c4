"""The whole OpenAPI document called by Schemathesis against a running monitor: nothing fails, all fits the schema.

Each operation is called with what the document allows, with what it forbids, and, where its path names something, for
something that is there. Calls follow from a seed.
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

from tests.support.web_server import PATIENCE_S, Client

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class HangsUp(HTTPAdapter):
    """Reads answers to their end, but of events, which have none, only the first."""

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        response = super().send(request, *args, **{**kwargs, "stream": True})
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            lines = [response.raw.readline()]
            while lines[-1].strip():
                lines.append(response.raw.readline())
            response._content = b"".join(lines)
            response.close()
        return response


def call(case: schemathesis.Case[Any]) -> schemathesis.Response:
    """Calls and validates; raises what Schemathesis found wrong."""
    with requests.Session() as session:
        session.mount("http://", HangsUp())
        return case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S, session=session)


@dataclass
class Calls:
    """What was asked and what came of it."""

    operations: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def n_calls(self) -> int:
        return sum(self.operations.values())


def call_everything(address: str, there: Mapping[str, Mapping[str, Any]], calls_each: int, number: int = 0) -> Calls:
    """Calls every operation so often, in each of three ways; `there` has path parameters of what there is."""
    document, done = schemathesis.openapi.from_url(f"{address}/openapi.json"), Calls()
    for found in document.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        for strategy in _ways(operation, there):
            try:
                _ask(operation.label, strategy, calls_each, number, done)
            except Unsatisfiable:
                pass  # nothing about it can be forbidden
            except Exception as error:
                done.wrong.append(f"{operation.label}: {error}")
    return done


def _ask(name: str, strategy: Any, calls_each: int, number: int, done: Calls) -> None:
    """Calls one operation so often; raises what is wrong with the first answer that is not right."""

    @seed(number)
    @settings(
        max_examples=calls_each,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def ask(case: schemathesis.Case[Any]) -> None:
        done.operations[name] += 1
        done.statuses[call(case).status_code] += 1

    ask()


def _ways(operation: Any, there: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    yield operation.as_strategy(GenerationMode.POSITIVE)
    yield operation.as_strategy(GenerationMode.NEGATIVE)
    if operation.method != "delete" and (known := parameters(operation.path, there)):
        yield operation.as_strategy(GenerationMode.POSITIVE, path_parameters=known)


def parameters(path: str, there: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The path parameters of something that there is."""
    return dict(next((values for begin, values in there.items() if path.startswith(begin)), {}))


def what_is_there(client: Client) -> dict[str, dict[str, Any]]:
    """By the beginning of a path; makes what the server does not have yet."""
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
