"""The audit trail of the web: two middlewares that write an entry for each change, sign-in and refused request.

`ChangeRecorder` is the innermost middleware. It writes a change to the audit log before the route runs; if that fails,
the route does not run (503). It completes the entry before the response leaves. A route adds what only it knows to
its `Trail`. `RefusalRecorder` is the outermost one and sees every 401, 403 and 429, whoever answered so. Refused and
failed requests are counted when there are many of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monitor.audit.log import DONE, FAILED, REFUSED, Actor, AuditLog, Change, Value
from monitor.audit.refusals import RefusalCounter, network_of
from monitor.errors import AuditFailed
from monitor.web.auth.gatekeeper import CHANGES, SCOPES
from monitor.web.requests.problems import Problem

logger = logging.getLogger(__name__)

REFUSALS = frozenset((401, 403, 429))
FLUSH_S = 30.0  # how often counts of windows that have ended are written
# Actions of routes, in the words of the command line; a route that is missing here is named by method and path.
ACTIONS = {
    "POST /session": "sign in",
    "DELETE /session": "sign out",
    "POST /channels": "channels add",
    "POST /channels/test": "channels test",
    "DELETE /channels/{name}": "channels rm",
    "POST /references": "refs add",
    "POST /references/import": "refs import",
    "DELETE /references/{id}": "refs rm",
    "POST /references/{id}/exclusions": "refs exclude",
    "DELETE /references/{id}/exclusions/{n}": "refs include",
    "POST /alerts/review": "alerts review",
    "POST /alerts/{id}/review": "alerts review",
    "POST /licences": "licences add",
    "DELETE /licences/{id}": "licences rm",
    "POST /webhooks": "webhooks add",
    "DELETE /webhooks/{id}": "webhooks rm",
    "POST /webhooks/{id}/test": "webhooks test",
    "POST /webhooks/{id}/enable": "webhooks enable",
    "POST /webhooks/{id}/rotate": "webhooks rotate",
    "POST /webhooks/{id}/deliveries/{d}/replay": "webhooks replay",
}


@dataclass(slots=True)
class Trail:
    """What a route adds to the entry of its request."""

    who: str | None = None  # of a sign-in: the caller is known only afterwards
    object: str | None = None
    about: str | None = None
    alerts: Sequence[str] = ()
    details: dict[str, Value] = field(default_factory=dict)


class RequestLog:
    """The audit log as the middlewares use it: in threads, and with counters against floods."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._refused, self._failed = RefusalCounter(), RefusalCounter()  # by address; by token

    async def begin(self, change: Change) -> int:
        """Raises Problem 503 if the change cannot be recorded, so that it must not be made."""
        try:
            return await asyncio.to_thread(self._log.begin, change)
        except AuditFailed as error:
            logger.error("%s; the request was not executed", error)
            raise Problem(503, "The audit log cannot be written, so the request was not executed.") from error

    async def finish(self, pending: int, change: Change) -> None:
        """Completes the entry; one of a request that failed is counted when there are many."""
        try:
            if self._gets_entry(change):
                await asyncio.to_thread(self._log.finish, pending, change)
            else:
                await asyncio.to_thread(self._log.discard, pending)
        except AuditFailed as error:  # the pending entry is on disk
            logger.error("%s; the result of %s is recorded later", error, change.action)

    def _gets_entry(self, change: Change) -> bool:
        if change.result != FAILED or (change.status or 500) >= 500:
            return True
        if change.status in REFUSALS:  # the outer middleware records it
            return False
        return self._failed.count(change.actor.who or "", time.monotonic())

    async def append(self, change: Change) -> None:
        """Adds an entry about something that has happened already."""
        try:
            await asyncio.to_thread(self._log.append, change)
        except AuditFailed as error:
            logger.error("%s; %s (%s) is not recorded", error, change.action, change.result)

    async def refuse(self, change: Change) -> None:
        """Records a refused request, or counts it."""
        if self._refused.count(network_of(change.actor.address or ""), time.monotonic()):
            await self.append(change)

    async def run(self) -> None:
        """Writes what was counted when a window ends, and at the end. Works until cancelled."""
        await asyncio.to_thread(self._recover)
        try:
            while True:
                await asyncio.sleep(FLUSH_S)
                for change in self._counted(time.monotonic()):
                    await self.append(change)
        finally:
            for change in self._counted(None):
                await self.append(change)

    def _recover(self) -> None:
        try:
            self._log.recover()
        except AuditFailed as error:
            logger.error("%s; changes are refused until it can", error)

    def _counted(self, now_s: float | None) -> list[Change]:
        refused = [
            Change(action="requests", actor=Actor(None, one.group, "api"), result=REFUSED, details={"requests": one.n})
            for one in self._refused.take(now_s)
        ]
        failed = [
            Change(action="requests", actor=Actor(one.group, None, "api"), result=FAILED, details={"requests": one.n})
            for one in self._failed.take(now_s)
        ]
        return refused + failed


class ChangeRecorder:
    """Inside all other middlewares: the caller is authorized, and a repeated request is not executed again."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trail = scope.setdefault("state", {}).setdefault("trail", Trail())
        route = scope["state"].get("route")
        if scope["type"] != "http" or scope["method"] not in CHANGES or route is None:
            await self._app(scope, receive, send)
            return
        request = Change(
            action=action_of(scope["method"], route),
            actor=_actor(scope),
            object=_object(route, scope["path"]),
            alerts=_alerts(route, scope["path"]),
        )
        # Every client may try to sign in or out: only the result is recorded, so that attempts cannot fill the log.
        needs_token = SCOPES.get((scope["method"], route)) is not None
        pending = await self._log.begin(request) if needs_token else None

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._record(pending, _result(request, trail, message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except Exception:
            await self._record(pending, _result(request, trail, 500))
            raise

    async def _record(self, pending: int | None, change: Change) -> None:
        if pending is not None:
            await self._log.finish(pending, change)
        elif change.status is not None and change.status < 400 and change.actor.who is not None:
            await self._log.append(change)


class RefusalRecorder:
    """Around all other middlewares."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in REFUSALS:
                route = scope.get("state", {}).get("route") or scope["path"]
                action = action_of(scope["method"], route)
                status, object = message["status"], _object(route, scope["path"])
                await self._log.refuse(
                    Change(action=action, actor=_actor(scope), result=REFUSED, status=status, object=object)
                )
            await send(message)

        await self._app(scope, receive, send_recorded)


def action_of(method: str, route: str) -> str:
    """What a request does, in the words of the command line where there are some."""
    name = f"{method} {route.removeprefix('/api/v1')}"
    return ACTIONS.get(name, f"{method} {route}")


def _actor(scope: Scope) -> Actor:
    state, headers = scope.get("state", {}), Headers(scope=scope)
    caller = state.get("caller")
    who = caller.name if caller is not None else state.get("refused")
    via: Literal["api", "dashboard"] = "dashboard" if headers.get("x-copywatch") == "1" else "api"
    return Actor(who, scope["client"][0] if scope.get("client") else None, via)


def _object(route: str, path: str) -> str | None:
    """The ids in the path."""
    parts = zip(route.split("/"), path.split("/"), strict=False)
    return "/".join(given for named, given in parts if named.startswith("{")) or None


def _alerts(route: str, path: str) -> tuple[str, ...]:
    """The alert that the path names."""
    object = _object(route, path)
    return (object,) if object is not None and route.startswith("/api/v1/alerts/{id}") else ()


def _result(request: Change, trail: Trail, status: int) -> Change:
    """The change with its result and with what the route added."""
    return replace(
        request,
        actor=replace(request.actor, who=trail.who or request.actor.who),
        result=DONE if status < 400 else FAILED,
        status=status,
        object=trail.object or request.object,
        about=trail.about,
        alerts=tuple(trail.alerts) or request.alerts,
        details=trail.details,
    )
