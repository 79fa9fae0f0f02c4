"""The guard before every route: who asks is known before a byte of the body is read, and no body is endless or slow.

It also answers whatever a route failed by, and adds the headers that tell browsers to trust nothing but our own files.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import FastAPI
from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monitor.errors import ConfigError
from monitor.web.auth.gatekeeper import Gatekeeper
from monitor.web.requests.problems import Problem, reply

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20  # of all but uploads
BODY_S = 30.0  # between two pieces of a body
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# Routes that take whole videos count their bytes themselves.
UPLOADS = frozenset(("/api/v1/references", "/api/v1/references/import"))


class SecurityMiddleware:
    """Middleware around the application `api`, whose routes it looks at."""

    def __init__(self, app: ASGIApp, api: FastAPI, gatekeeper: Gatekeeper) -> None:
        self._app, self._api, self._gatekeeper = app, api, gatekeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/api/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        path = self._route(scope)
        try:
            if path is not None:
                scope.setdefault("state", {})["caller"] = self._gatekeeper.judge(
                    HTTPConnection(scope), scope["method"], path
                )
            length = None if path in UPLOADS else MAX_BODY_BYTES
            await self._app(scope, _Body(receive, length).receive, with_headers)
        except Problem as problem:
            await reply(problem.status, problem.detail, scope["path"], problem.headers)(scope, receive, with_headers)
        except ConfigError as error:  # the tokens cannot be read: closed
            logger.error("nobody is let in: %s", error)
            await reply(503, "Nobody is let in: the tokens cannot be read.", scope["path"])(
                scope, receive, with_headers
            )
        except ClientDisconnect:
            logger.debug("%s %s: the caller left", scope["method"], scope["path"])
        except SendTimeoutError:
            logger.info("a listener whose connection was stuck was dropped")
        except Exception:  # whatever a route fails by is that request's failure and nobody else's
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun:
                raise
            answer = reply(500, "Something failed here; the log says what.", scope["path"])
            await answer(scope, receive, with_headers)

    def _route(self, scope: Scope) -> str | None:
        """The template of the API's route that will answer; None for what needs no scope or is not there."""
        if not scope["path"].startswith("/api/"):
            return None
        for route in self._api.routes:
            path = getattr(route, "path", "")
            if path.startswith("/api/") and route.matches(scope)[0] is Match.FULL:
                return str(path)
        return None


class _Body:
    """A request's body as it comes: not longer than allowed, not slower than patience lasts."""

    def __init__(self, receive: Receive, length: int | None) -> None:
        self._receive, self._left, self._is_whole = receive, length, False

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()  # waits for the client to leave, for as long as that takes
        try:
            async with asyncio.timeout(BODY_S):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"Nothing came for {BODY_S:.0f} s") from None
        self._is_whole = not message.get("more_body", False)
        if self._left is not None:
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, f"The body is too long: {MAX_BODY_BYTES} bytes are the most")
        return message
