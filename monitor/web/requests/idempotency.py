"""`Idempotency-Key`: a POST that is sent again, since its answer was lost, is answered again and not done again.

    replies.sqlite    by caller, route and key: what was asked for, and the answer

An answer is on disk before it is sent and kept for a day. Only what succeeded is kept: whatever failed may be tried
again under the same key. That a request was begun is on disk before its work: where a crash comes in between, nobody
knows whether it was done, and its key is answered so. Of an upload the body is not compared, since no two multipart
bodies are alike; nor is its beginning kept, since the same video twice is one reference.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monitor.errors import RepliesFailed
from monitor.ops.sqlite_store import SqliteStore
from monitor.web.middleware import UPLOADS
from monitor.web.requests.problems import Problem

logger = logging.getLogger(__name__)

FILE = "replies.sqlite"
KEPT_S = 86_400.0
KEPT = 10_000  # answers, the newest
SESSION = "/api/v1/session"  # its answer has a token in it, which is nowhere kept
BEGUN = 0  # in place of a status: no answer yet
KEY = re.compile(r"[\x21-\x7e]{1,255}")
SCHEMA = """
CREATE TABLE reply (
    n INTEGER PRIMARY KEY AUTOINCREMENT, caller TEXT NOT NULL, route TEXT NOT NULL, key TEXT NOT NULL,
    asked TEXT NOT NULL, status INTEGER NOT NULL, headers TEXT NOT NULL, body BLOB NOT NULL, at REAL NOT NULL,
    UNIQUE (caller, route, key)
) STRICT;
"""
# Of every POST but the one that logs in, in the words of OpenAPI.
PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,255}$"},
    "description": "Whatever names this one request: sent again with it within a day, it is not done again.",
}


@dataclass(frozen=True, slots=True)
class StoredReply:
    """An answer that was given, or that a request was begun."""

    asked: str  # what its request was, by SHA-256
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Replies:
    """The answers of a data folder. Raises RepliesFailed where the disk does not do it."""

    def __init__(self, data_dir: Path) -> None:
        self._file = SqliteStore(data_dir / FILE, (SCHEMA,), RepliesFailed)

    def find(self, request: tuple[str, str, str]) -> StoredReply | None:
        """What was answered to this caller, route and key within a day."""
        wanted = "SELECT asked, status, headers, body FROM reply WHERE (caller, route, key) = (?, ?, ?) AND at > ?"
        for asked, status, headers, body in self._file.rows(wanted, (*request, time.time() - KEPT_S)):
            return StoredReply(asked, status, [(name, value) for name, value in json.loads(headers)], body)
        return None

    def begin(self, request: tuple[str, str, str], asked: str) -> None:
        """Keeps that the work begins; on disk when this returns."""
        self.keep(request, StoredReply(asked, BEGUN, [], b""))

    def forget(self, request: tuple[str, str, str]) -> None:
        """Has the key be as if it had never come."""
        with self._file.writing() as db:
            db.execute("DELETE FROM reply WHERE (caller, route, key) = (?, ?, ?)", request)

    def keep(self, request: tuple[str, str, str], answer: StoredReply) -> None:
        """On disk when this returns."""
        with self._file.writing() as db:
            db.execute("DELETE FROM reply WHERE at <= ?", (time.time() - KEPT_S,))
            db.execute(
                "INSERT OR REPLACE INTO reply (caller, route, key, asked, status, headers, body, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*request, answer.asked, answer.status, json.dumps(answer.headers), answer.body, time.time()),
            )
            db.execute("DELETE FROM reply WHERE n <= (SELECT max(n) FROM reply) - ?", (KEPT,))


class Idempotency:
    """Middleware behind the guard, which has judged who asks."""

    def __init__(self, app: ASGIApp, replies: Replies) -> None:
        self._app, self._replies = app, replies
        self._busy: set[tuple[str, str, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        key = Headers(scope=scope).get("idempotency-key") if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST" or caller is None or scope["path"] == SESSION:
            await self._app(scope, receive, send)
            return
        if not KEY.fullmatch(key):
            raise Problem(400, "An Idempotency-Key is 1 to 255 printable characters without blanks.")
        route = f"{scope['path']}?{scope['query_string'].decode('latin-1')}"
        request = (caller.name, route, key)
        if request in self._busy:
            raise Problem(409, "The request with this Idempotency-Key is still being worked on.", {"Retry-After": "1"})
        self._busy.add(request)
        try:
            await self._once(request, scope, receive, send)
        finally:
            self._busy.discard(request)

    async def _once(self, request: tuple[str, str, str], scope: Scope, receive: Receive, send: Send) -> None:
        with _or_nothing():
            kept = await asyncio.to_thread(self._replies.find, request)
        asked = ""
        if scope["path"] not in UPLOADS:
            body = await _whole(receive)
            asked, receive = hashlib.sha256(body).hexdigest(), _again(body, receive)
        if kept is None:
            await self._do(request, asked, scope, receive, send)
        elif kept.asked != asked:
            raise Problem(422, "This Idempotency-Key was used for another request; take a new one for a new request.")
        elif kept.status == BEGUN:
            raise Problem(
                409,
                "Copywatch stopped while it worked on this request, which may have been done or not: look, and where "
                "it was not, send it with a new Idempotency-Key.",
            )
        else:
            headers = [*kept.headers, ("idempotent-replayed", "true")]
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            await send({"type": "http.response.start", "status": kept.status, "headers": raw})
            await send({"type": "http.response.body", "body": kept.body})

    async def _do(self, request: tuple[str, str, str], asked: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Has the request done and its answer kept, then given."""
        if asked:
            with _or_nothing():
                await asyncio.to_thread(self._replies.begin, request, asked)
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.take)
        except Exception:
            await self._settle(request, None)
            raise
        kept = answer.kept(asked)
        await self._settle(request, kept if 200 <= kept.status < 300 else None)
        await answer.give()

    async def _settle(self, request: tuple[str, str, str], answer: StoredReply | None) -> None:
        """Keeps the answer; where there is none, forgets that the request was begun."""
        try:
            if answer is not None:
                await asyncio.to_thread(self._replies.keep, request, answer)
            else:
                await asyncio.to_thread(self._replies.forget, request)
        except RepliesFailed as error:
            logger.error("%s; what became of a request cannot be told to who sends it again", error)


@contextmanager
def _or_nothing() -> Iterator[None]:
    """Raises Problem 503 where the disk fails before anything was done."""
    try:
        yield
    except RepliesFailed as error:
        logger.error("%s", error)
        raise Problem(503, "Answers cannot be kept just now, so nothing is done; try again later.") from error


class _Answer:
    """What a route answers, held back until it is kept; answers to a POST are small."""

    def __init__(self, send: Send) -> None:
        self._send, self._messages = send, list[Message]()

    async def take(self, message: Message) -> None:
        self._messages.append(message)

    def kept(self, asked: str) -> StoredReply:
        start = next(one for one in self._messages if one["type"] == "http.response.start")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        body = b"".join(one.get("body", b"") for one in self._messages if one["type"] == "http.response.body")
        return StoredReply(asked, start["status"], headers, body)

    async def give(self) -> None:
        for message in self._messages:
            await self._send(message)


async def _whole(receive: Receive) -> bytes:
    """A request's body; the guard sees to it that it is neither long nor slow."""
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, and then whatever comes after it."""
    left = [body]

    async def again() -> Message:
        return {"type": "http.request", "body": left.pop()} if left else await receive()

    return again
