"""`Idempotency-Key`: a retried POST gets the stored reply of the first attempt and is not executed again.

    replies.sqlite    by caller, route and key: a hash of the request, and the reply

A reply is on disk before it is sent and is stored for a day, without the secrets that are shown only once. Only
successful replies are stored: a failed request may be retried with the same key. The start of a request is on disk
before its work: after a crash in between, the outcome is unknown, and a retry with its key is answered so. The body of
an upload is not compared, since no two multipart bodies are alike; nor is its start stored, since the same video twice
is one reference.
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
RETENTION_S = 86_400.0
MAX_REPLIES = 10_000  # the newest
SESSION = "/api/v1/session"  # its reply contains a token, which is never stored
SECRET_FIELDS = ("secret", "token")  # of replies; a retry gets null
STARTED = 0  # in place of a status: no reply yet
KEY = re.compile(r"[\x21-\x7e]{1,255}")
SCHEMA = """
CREATE TABLE reply (
    n INTEGER PRIMARY KEY AUTOINCREMENT, caller TEXT NOT NULL, route TEXT NOT NULL, key TEXT NOT NULL,
    asked TEXT NOT NULL, status INTEGER NOT NULL, headers TEXT NOT NULL, body BLOB NOT NULL, at REAL NOT NULL,
    UNIQUE (caller, route, key)
) STRICT;
"""
# The OpenAPI parameter of every POST except the login.
PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,255}$"},
    "description": "A unique name of this request: a retry with it within a day is not executed again.",
}
NAMING = "caller = ?1 OR instr(route, ?1) OR instr(CAST(body AS TEXT), ?1)"
RequestId = tuple[str, str, str]  # caller, route, key


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply that was sent, or the mark of a request that was started."""

    digest: str  # SHA-256 of the request's body; empty for an upload
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Replies:
    """The stored replies of a data folder. Raises RepliesFailed on disk errors."""

    def __init__(self, data_dir: Path) -> None:
        self._file = SqliteStore(data_dir / FILE, (SCHEMA,), RepliesFailed)

    def find(self, request: RequestId) -> StoredReply | None:
        """The reply to this caller, route and key within the last day."""
        query = "SELECT asked, status, headers, body FROM reply WHERE (caller, route, key) = (?, ?, ?) AND at > ?"
        for digest, status, headers, body in self._file.rows(query, (*request, time.time() - RETENTION_S)):
            return StoredReply(digest, status, [(name, value) for name, value in json.loads(headers)], body)
        return None

    def start(self, request: RequestId, digest: str) -> None:
        """Marks the request as started; on disk when this returns."""
        self.store(request, StoredReply(digest, STARTED, [], b""))

    def forget(self, request: RequestId) -> None:
        """Deletes the reply or mark of this request."""
        with self._file.writing() as db:
            db.execute("DELETE FROM reply WHERE (caller, route, key) = (?, ?, ?)", request)

    def store(self, request: RequestId, reply: StoredReply) -> None:
        """Stores the reply; on disk when this returns."""
        with self._file.writing() as db:
            db.execute("DELETE FROM reply WHERE at <= ?", (time.time() - RETENTION_S,))
            db.execute(
                "INSERT OR REPLACE INTO reply (caller, route, key, asked, status, headers, body, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*request, reply.digest, reply.status, json.dumps(reply.headers), reply.body, time.time()),
            )
            db.execute("DELETE FROM reply WHERE n <= (SELECT max(n) FROM reply) - ?", (MAX_REPLIES,))

    def n_naming(self, name: str) -> int:
        """How many replies are to this caller, or contain this name or id."""
        rows = self._file.rows(f"SELECT count(*) FROM reply WHERE {NAMING}", (name,))  # noqa: S608 - our own text only
        return int(rows[0][0]) if rows else 0

    def erase_naming(self, name: str) -> None:
        """Deletes the replies to this caller, and those that contain this name or id."""
        with self._file.writing(erases=True) as db:
            db.execute(f"DELETE FROM reply WHERE {NAMING}", (name,))  # noqa: S608 - our own text only


class Idempotency:
    """Middleware inside `SecurityMiddleware`, which has authorized the caller."""

    def __init__(self, app: ASGIApp, replies: Replies) -> None:
        self._app, self._replies = app, replies
        self._running: set[RequestId] = set()

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
        if request in self._running:
            raise Problem(409, "The request with this Idempotency-Key is still in progress.", {"Retry-After": "1"})
        self._running.add(request)
        try:
            await self._run_once(request, scope, receive, send)
        finally:
            self._running.discard(request)

    async def _run_once(self, request: RequestId, scope: Scope, receive: Receive, send: Send) -> None:
        with _refuse_on_disk_error():
            stored = await asyncio.to_thread(self._replies.find, request)
        digest = ""
        if scope["path"] not in UPLOADS:
            body = await _read_all(receive)
            digest, receive = hashlib.sha256(body).hexdigest(), _replay(body, receive)
        if stored is None:
            await self._execute(request, digest, scope, receive, send)
        elif stored.digest != digest:
            raise Problem(422, "This Idempotency-Key was used for another request; use a new key for a new request.")
        elif stored.status == STARTED:
            raise Problem(
                409,
                "Copywatch stopped during this request, so it may or may not have been executed: check, and if it "
                "was not, send it with a new Idempotency-Key.",
            )
        else:
            headers = [*stored.headers, ("idempotent-replayed", "true")]
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            await send({"type": "http.response.start", "status": stored.status, "headers": raw})
            await send({"type": "http.response.body", "body": stored.body})

    async def _execute(self, request: RequestId, digest: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Executes the request, stores its reply, then sends it."""
        if digest:
            with _refuse_on_disk_error():
                await asyncio.to_thread(self._replies.start, request, digest)
        reply = _BufferedReply(send)
        try:
            await self._app(scope, receive, reply.add)
        except Exception:
            await self._settle(request, None)
            raise
        stored = reply.to_stored(digest)
        await self._settle(request, stored if 200 <= stored.status < 300 else None)
        await reply.send()

    async def _settle(self, request: RequestId, reply: StoredReply | None) -> None:
        """Stores the reply; without one, deletes the mark that the request was started."""
        try:
            if reply is not None:
                await asyncio.to_thread(self._replies.store, request, reply)
            else:
                await asyncio.to_thread(self._replies.forget, request)
        except RepliesFailed as error:
            logger.error("%s; a retry with the same Idempotency-Key cannot be answered from the stored reply", error)


@contextmanager
def _refuse_on_disk_error() -> Iterator[None]:
    """Raises Problem 503 if the disk fails before any work was done."""
    try:
        yield
    except RepliesFailed as error:
        logger.error("%s", error)
        raise Problem(503, "Replies cannot be stored, so the request was not executed; retry later.") from error


class _BufferedReply:
    """A route's reply, held back until it is stored; replies to a POST are small."""

    def __init__(self, send: Send) -> None:
        self._send, self._messages = send, list[Message]()

    async def add(self, message: Message) -> None:
        self._messages.append(message)

    def to_stored(self, digest: str) -> StoredReply:
        start = next(one for one in self._messages if one["type"] == "http.response.start")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        body = b"".join(one.get("body", b"") for one in self._messages if one["type"] == "http.response.body")
        body = _without_secrets(body)
        headers = [(name, str(len(body)) if name.lower() == "content-length" else value) for name, value in headers]
        return StoredReply(digest, start["status"], headers, body)

    async def send(self) -> None:
        for message in self._messages:
            await self._send(message)


def _without_secrets(body: bytes) -> bytes:
    """The body as it is stored: fields that are shown only once are null."""
    try:
        content = json.loads(body)
    except ValueError:
        return body
    if not isinstance(content, dict) or not any(content.get(name) for name in SECRET_FIELDS):
        return body
    return json.dumps({name: None if name in SECRET_FIELDS else value for name, value in content.items()}).encode()


async def _read_all(receive: Receive) -> bytes:
    """The whole body; `SecurityMiddleware` limits its length and time."""
    chunks = []
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was already read, and then what follows it."""
    left = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": left.pop()} if left else await receive()

    return replay
