"""What goes wrong, as RFC 9457 says it: `application/problem+json` with one sentence that says what to do."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from monitor.errors import (
    ConfigError,
    InvalidRights,
    JobsFailed,
    MonitorError,
    NoSuchWebhook,
    OutboxFailed,
    RightsNotFound,
    RightsStoreFailed,
    Unreachable,
    WebhookRefused,
    WebhooksFailed,
)
from reference_db.errors import (
    CatalogError,
    CatalogLocked,
    EncoderMismatch,
    MediaError,
    NotAReference,
    ReferenceExists,
    StorageError,
    UnknownReference,
)
from reference_db.media.addresses import redact_text

# Errors of ours and the status they mean; the first that fits.
STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (UnknownReference, 404),
    (ReferenceExists, 409),
    (EncoderMismatch, 409),
    (CatalogLocked, 409),
    (MediaError, 422),
    (NotAReference, 422),
    (StorageError, 503),
    (CatalogError, 422),
    (Unreachable, 422),
    (ConfigError, 409),
    (InvalidRights, 422),
    (RightsNotFound, 404),
    (RightsStoreFailed, 503),
    (JobsFailed, 503),
    (WebhookRefused, 422),
    (NoSuchWebhook, 404),
    (WebhooksFailed, 503),
    (OutboxFailed, 503),
    (MonitorError, 422),
)


class ProblemOut(BaseModel):
    """What went wrong."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    errors: list[dict[str, str]] | None = None  # of a request that is not as it should be: where, and what


# What every route may answer beside what it is for.
MAY_FAIL: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What is wrong with the request.", "content": {"application/problem+json": {}}},
    "5XX": {"description": "What is wrong here.", "content": {"application/problem+json": {}}},
}
JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}
}
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
for _one in MAY_FAIL.values():
    _one["content"]["application/problem+json"]["schema"] = {"$ref": "#/components/schemas/ProblemOut"}


class Problem(Exception):
    """A request that is not answered as it was meant."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


def not_found(what: str) -> Problem:
    return Problem(404, f"There is no {what}.")


def reply(
    status: int,
    detail: str,
    instance: str,
    headers: dict[str, str] | None = None,
    errors: list[dict[str, str]] | None = None,
) -> JSONResponse:
    """The problem as an answer."""
    body = ProblemOut(
        title=HTTPStatus(status).phrase, status=status, detail=detail, instance=instance, errors=errors
    ).model_dump(exclude={"errors"} if errors is None else None)
    return JSONResponse(body, status, headers=headers, media_type="application/problem+json")


def tell_problems(app: FastAPI) -> None:
    """Has every error answered as a problem."""

    def problem(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Problem)
        return reply(error.status, error.detail, request.url.path, error.headers)

    def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        sentence = "There is nothing here." if error.status_code == 404 else str(error.detail).rstrip(".") + "."
        return reply(error.status_code, sentence, request.url.path, dict(error.headers or {}))

    def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # What was sent is not sent back: it may hold a password.
        wrong = [
            {"at": ".".join(str(part) for part in one["loc"]), "what": str(one["msg"]).removeprefix("Value error, ")}
            for one in error.errors()
        ]
        said = "; ".join(f"{one['at']}: {one['what']}" for one in wrong[:5])
        return reply(422, f"The request is not as it should be: {said}.", request.url.path, errors=wrong)

    def ours(request: Request, error: Exception) -> JSONResponse:
        status = next(status for kind, status in STATUSES if isinstance(error, kind))
        headers = {"Retry-After": "5"} if isinstance(error, CatalogLocked) else None
        return reply(status, redact_text(str(error)), request.url.path, headers)

    app.add_exception_handler(Problem, problem)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(MonitorError, ours)
    app.add_exception_handler(CatalogError, ours)
