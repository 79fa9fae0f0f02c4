"""Security before every route: the caller is authorized before a byte of the body is read, and no body is endless.

It also answers a route's unexpected failure, and adds the headers that make browsers trust only our own files.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence

from fastapi import APIRouter
from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monitor.errors import ConfigError
from monitor.web.auth.gatekeeper import Caller, Gatekeeper
from monitor.web.requests.problems import Problem, reply

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20  # of all requests except uploads
RECHECK_S = 0.5  # how often a long request checks that its token still exists
BODY_S = 30.0  # between two chunks of a body
WHOLE_BODY_S = 60.0  # for the whole body of all requests except uploads
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# Routes that receive whole videos count their bytes themselves.
UPLOADS = frozenset(("/api/v1/references", "/api/v1/references/import"))


class SecurityMiddleware:
    """Around the application whose API routes are those of `routers`."""

    def __init__(self, app: ASGIApp, routers: Sequence[APIRouter], gatekeeper: Gatekeeper) -> None:
        self._app, self._gatekeeper = app, gatekeeper
        self._routes = [route for router in routers for route in router.routes if isinstance(route, Route)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/api/"):
                    headers.setdefault("Cache-Control", "no-store")
            elif message.get("more_body") and not recheck.is_current():
                raise ClientDisconnect  # the rest of a long response is not for this caller any more
            await send(message)

        path, recheck = self._route(scope), _Recheck(self._gatekeeper, None)
        try:
            if path is not None:
                scope.setdefault("state", {})["route"] = path
                caller = self._gatekeeper.authorize(HTTPConnection(scope), scope["method"], path)
                scope["state"]["caller"], recheck = caller, _Recheck(self._gatekeeper, caller)
            max_bytes = None if path in UPLOADS else MAX_BODY_BYTES
            await self._app(scope, _LimitedBody(receive, max_bytes, recheck).receive, with_headers)
        except Problem as problem:
            await reply(problem.status, problem.detail, scope["path"], problem.headers)(scope, receive, with_headers)
        except ConfigError as error:  # the token file cannot be read: refuse everyone
            logger.error("authentication is unavailable: %s", error)
            response = reply(503, "Authentication is unavailable: the token file cannot be read.", scope["path"])
            await response(scope, receive, with_headers)
        except ClientDisconnect:
            logger.debug("%s %s: the client disconnected", scope["method"], scope["path"])
        except SendTimeoutError:
            logger.info("dropped an event listener whose connection was stuck")
        except Exception:  # a route's failure ends its own request only
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if has_started:
                raise
            response = reply(500, "Internal error; see the server's log.", scope["path"])
            await response(scope, receive, with_headers)

    def _route(self, scope: Scope) -> str | None:
        """The path template of the API route that handles this request; None if no API route does."""
        if not scope["path"].startswith("/api/"):
            return None
        return next((route.path for route in self._routes if route.matches(scope)[0] is Match.FULL), None)


class _Recheck:
    """Whether the caller of a long request may go on: its token may be removed meanwhile, its session may end."""

    def __init__(self, gatekeeper: Gatekeeper, caller: Caller | None) -> None:
        self._gatekeeper, self._caller, self._checked_at = gatekeeper, caller, time.monotonic()

    def is_current(self) -> bool:
        if self._caller is None or time.monotonic() - self._checked_at < RECHECK_S:
            return True
        self._checked_at = time.monotonic()
        return self._gatekeeper.is_current(self._caller)


class _LimitedBody:
    """A request's body, limited in length and time; it ends when its caller may not go on."""

    def __init__(self, receive: Receive, max_bytes: int | None, recheck: _Recheck) -> None:
        self._receive, self._n_left, self._is_complete = receive, max_bytes, False
        self._recheck = recheck
        self._until = None if max_bytes is None else asyncio.get_running_loop().time() + WHOLE_BODY_S

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()  # waits for the client to disconnect, without a limit
        message = await self._next_message()
        self._is_complete = not message.get("more_body", False)
        if self._n_left is not None:
            self._n_left -= len(message.get("body", b""))
            if self._n_left < 0:
                raise HTTPException(413, f"The request body is too long; at most {MAX_BODY_BYTES} bytes are accepted")
        return message

    async def _next_message(self) -> Message:
        loop = asyncio.get_running_loop()
        until = min(loop.time() + BODY_S, self._until or math.inf)
        while True:
            if not self._recheck.is_current():
                raise Problem(401, "The token was removed or has expired, or the session has ended.")
            try:
                async with asyncio.timeout_at(min(until, loop.time() + RECHECK_S)):
                    return await self._receive()
            except TimeoutError:
                if loop.time() >= until:
                    raise HTTPException(408, "The request body did not arrive in time") from None
