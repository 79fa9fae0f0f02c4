"""Errors as RFC 9457 problems: `application/problem+json` with one sentence that says what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from monitor.errors import (
    AuditFailed,
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

# Our own errors and their status; the first that matches counts.
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
    (AuditFailed, 503),
    (MonitorError, 422),
)


# An absolute path, not in a URL and not a route of ours.
_PATH = re.compile(r"""(?<![\w:/.~-])/(?!api/)(?:[^/\s;,()'"`]+/)*([^/\s;,()'"`]+)""")
logger = logging.getLogger(__name__)


class ProblemOut(BaseModel):
    """A problem."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    errors: list[dict[str, str]] | None = None  # of an invalid request: the place and the problem


PROBLEM_CONTENT = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemOut"}}}
# The error responses of every route.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is invalid or not permitted.", "content": PROBLEM_CONTENT},
    "5XX": {"description": "The server failed.", "content": PROBLEM_CONTENT},
}
JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}
}
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


class Problem(Exception):
    """A request that fails with this status and sentence."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


def hide_paths(text: str) -> str:
    """The text with each path of this machine's files cut to its last part; the log has the whole."""
    return _PATH.sub(r"\1", text)


def not_found(what: str) -> Problem:
    return Problem(404, f"There is no {what}.")


def reply(
    status: int,
    detail: str,
    instance: str,
    headers: dict[str, str] | None = None,
    errors: list[dict[str, str]] | None = None,
) -> JSONResponse:
    """The problem as a response."""
    body = ProblemOut(
        title=HTTPStatus(status).phrase, status=status, detail=detail, instance=instance, errors=errors
    ).model_dump(exclude={"errors"} if errors is None else None)
    return JSONResponse(body, status, headers=headers, media_type="application/problem+json")


async def _reply_to_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return reply(error.status, error.detail, request.url.path, error.headers)


async def _reply_to_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    sentence = "There is no such resource." if error.status_code == 404 else str(error.detail).rstrip(".") + "."
    return reply(error.status_code, sentence, request.url.path, dict(error.headers or {}))


async def _reply_to_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # The request's own values are not sent back: they may contain a password.
    errors = [
        {"at": ".".join(str(part) for part in one["loc"]), "what": str(one["msg"]).removeprefix("Value error, ")}
        for one in error.errors()
    ]
    listed = "; ".join(f"{one['at']}: {one['what']}" for one in errors[:5])
    return reply(422, f"The request is invalid: {listed}.", request.url.path, errors=errors)


async def _reply_to_own_error(request: Request, error: Exception) -> JSONResponse:
    status = next(status for kind, status in STATUSES if isinstance(error, kind))
    if (detail := hide_paths(redact_text(str(error)))) != str(error):
        logger.warning("%s %s: %s", request.method, request.url.path, redact_text(str(error)))
    headers = {"Retry-After": "5"} if isinstance(error, CatalogLocked) else None
    return reply(status, detail, request.url.path, headers)


EXCEPTION_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    Problem: _reply_to_problem,
    HTTPException: _reply_to_http_error,
    RequestValidationError: _reply_to_invalid_request,
    MonitorError: _reply_to_own_error,
    CatalogError: _reply_to_own_error,
}
