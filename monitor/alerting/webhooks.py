"""Webhooks on disk: the endpoints, the queue of each, and the outcome of every delivery.

    webhooks.sqlite    endpoint: address, secret, event types; delivery: one message to one endpoint

A message that is in this file survives any crash and is retried until the endpoint accepts it or ten tries in three
days have failed. The file holds secrets in clear, which signing needs, so only its owner can read it. The command line
and a running monitor share it.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from monitor.alerting.alerts import ENDED, RETRACTED, STARTED, UPDATED, Alert
from monitor.errors import NoSuchWebhook, WebhookRefused, WebhooksFailed
from monitor.ops.change_signal import ChangeSignal
from monitor.ops.sqlite_store import SqliteStore
from monitor.ops.timestamps import rfc3339
from reference_db.media.addresses import redact_url

FILE = "webhooks.sqlite"
REVIEWED, PING = "alert.reviewed", "test.ping"
CHANNEL_DOWN, CHANNEL_UP = "channel.down", "channel.up"
TYPES = (STARTED, UPDATED, ENDED, RETRACTED, REVIEWED, CHANNEL_DOWN, CHANNEL_UP)
WAITING, DONE, FAILED = "waiting", "done", "failed"
MAX_ENDPOINTS = 100
MAX_BODY_BYTES = 20_000  # by the specification
MAX_LISTED = 20  # gaps and pauses in a body that would be too long with all of them
# Standard Webhooks' own schedule: ten tries in 75 hours and 35 minutes.
SCHEDULE_S = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
SCHEMA = """
CREATE TABLE IF NOT EXISTS endpoint (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, url TEXT NOT NULL, types TEXT NOT NULL,
    secret TEXT NOT NULL, enabled INTEGER NOT NULL, disabled_reason TEXT, created_at TEXT NOT NULL,
    taken_at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS delivery (
    n INTEGER PRIMARY KEY AUTOINCREMENT, endpoint TEXT NOT NULL, message TEXT NOT NULL, event TEXT NOT NULL, alert TEXT,
    body TEXT NOT NULL, state TEXT NOT NULL, tries INTEGER NOT NULL, last_status INTEGER, last_error TEXT,
    next_at REAL NOT NULL, created_at TEXT NOT NULL, UNIQUE (endpoint, message)
) STRICT;
CREATE INDEX IF NOT EXISTS delivery_due ON delivery (endpoint, next_at) WHERE state = 'waiting';
CREATE TABLE IF NOT EXISTS reached (what TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT;
"""
TWO_SECRETS = "ALTER TABLE endpoint ADD COLUMN old_secret TEXT; ALTER TABLE endpoint ADD COLUMN old_until REAL;"
STEPS = (SCHEMA, TWO_SECRETS)
ROTATION_S = 86_400.0  # messages carry the signature of a replaced secret for this long
DELIVERY = (
    "SELECT delivery.n, endpoint, message, event, alert, body, state, tries, last_status, last_error, next_at, "
    "delivery.created_at FROM delivery "
)
REVIEWED_BY = "body ->> '$.data.review.by' = ?"
DUE = (
    "WHERE endpoint = ?1 AND state = 'waiting' AND next_at <= ?2 "
    "AND n NOT IN (SELECT value FROM json_each(?3)) ORDER BY next_at, n LIMIT ?4"
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver of webhooks. Its secret is shown only when it is created."""

    id: str
    url: str
    types: tuple[str, ...]  # empty: all
    secret: str
    enabled: bool
    disabled_reason: str | None
    created_at: str
    old_secret: str | None = None
    old_until: float = 0.0  # Unix seconds

    def secrets(self, now: float) -> list[str]:
        """The secrets that sign a message now: two while one is being replaced."""
        return [self.secret] + ([self.old_secret] if self.old_secret is not None and now < self.old_until else [])

    def as_dict(self) -> dict[str, Any]:
        """Plain values without the secret; credentials in the address are redacted."""
        two = len(self.secrets(time.time())) > 1
        return {
            "id": self.id,
            "url": redact_url(self.url),
            "types": list(self.types),
            "enabled": self.enabled,
            "disabled_reason": self.disabled_reason,
            "created_at": self.created_at,
            "old_secret_until": rfc3339(datetime.fromtimestamp(self.old_until, UTC)) if two else None,
        }


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message to one endpoint."""

    n: int
    endpoint: str
    message: str  # its webhook-id: the same at every try
    event: str
    alert: str | None
    body: str
    state: str
    tries: int
    last_status: int | None
    last_error: str | None
    next_at: float  # Unix seconds
    created_at: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "id": self.n,
            "event": self.event,
            "alert": self.alert,
            "state": self.state,
            "tries": self.tries,
            "last_status": self.last_status,
            "last_error": self.last_error,
            "next_at": rfc3339(datetime.fromtimestamp(self.next_at, UTC)) if self.state == WAITING else None,
            "created_at": self.created_at,
        }


@dataclass(frozen=True, slots=True)
class Message:
    """A message for every endpoint that subscribes to its event type."""

    id: str
    event: str
    alert: str | None
    body: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """The outcome of one try: an HTTP status or an error; `wait_s` is the delay that the endpoint asked for."""

    status: int | None
    error: str | None
    wait_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def message_of(alert: Alert) -> Message:
    """The message for an alert event; its id is the same at every try, so that receivers recognise repeats."""
    return Message(f"msg_{alert.id}_{alert.seq}", alert.type, alert.id, body_of(alert.type, alert.as_dict()))


def body_of(event: str, data: Mapping[str, Any]) -> str:
    """The body by the specification; beyond 20 kB, long lists are shortened, with the number of entries left out."""
    content: dict[str, Any] = {"type": event, "timestamp": rfc3339(datetime.now(UTC)), "data": dict(data)}
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    if len(body.encode()) < MAX_BODY_BYTES:
        return body
    for name in ("gaps", "pauses"):
        entries = list(data.get(name, ()))
        n_left_out = max(0, len(entries) - MAX_LISTED)
        content["data"] = {**content["data"], name: entries[-MAX_LISTED:], f"{name}_left_out": n_left_out}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


class WebhookStore:
    """The webhooks of a data folder; safe in any thread and process. Raises WebhooksFailed if the disk fails."""

    def __init__(self, data_dir: Path, schedule_s: Sequence[float] = SCHEDULE_S) -> None:
        self.changed = ChangeSignal()  # this object queued something that may be due
        self._path = data_dir / FILE
        self._file = SqliteStore(self._path, STEPS, WebhooksFailed)
        self._schedule_s = schedule_s

    # --- endpoints ---------------------------------------------------------------------------------------------------

    def add(self, url: str, types: Collection[str] = ()) -> Endpoint:
        """Adds an endpoint; returns it with its secret. Raises WebhookRefused for an invalid address or event type."""
        check_url(url)
        unknown = sorted(set(types) - set(TYPES))
        if unknown:
            raise WebhookRefused(f"Unknown event type {unknown[0][:40]!r}; valid are {', '.join(TYPES)}.")
        id, secret = f"wh_{secrets.token_hex(8)}", _new_secret()
        with self._file.writing() as db:
            ((n_endpoints,),) = db.execute("SELECT count(*) FROM endpoint")
            if n_endpoints >= MAX_ENDPOINTS:
                raise WebhookRefused(f"The limit of {MAX_ENDPOINTS} webhooks is reached; remove one first.")
            chosen = json.dumps([one for one in TYPES if one in types])
            db.execute(
                "INSERT INTO endpoint (id, url, types, secret, enabled, created_at, taken_at) VALUES (?,?,?,?,1,?,?)",
                (id, url, chosen, secret, rfc3339(datetime.now(UTC)), time.time()),
            )
        return self.get(id)

    def all(self) -> list[Endpoint]:
        """All endpoints, oldest first."""
        return [_endpoint(row) for row in self._file.rows("SELECT * FROM endpoint ORDER BY n")]

    def get(self, id: str) -> Endpoint:
        """Raises NoSuchWebhook."""
        rows = self._file.rows("SELECT * FROM endpoint WHERE id = ?", (id,))
        if not rows:
            raise NoSuchWebhook(f"There is no webhook {id[:40]!a}; `copywatch webhooks list` lists all.")
        return _endpoint(rows[0])

    def remove(self, id: str) -> None:
        """Removes an endpoint and its deliveries. Raises NoSuchWebhook."""
        self.get(id)
        with self._file.writing() as db:
            db.execute("DELETE FROM endpoint WHERE id = ?", (id,))
            db.execute("DELETE FROM delivery WHERE endpoint = ?", (id,))

    def enable(self, id: str) -> Endpoint:
        """Enables an endpoint; its waiting deliveries are due at once. Raises NoSuchWebhook."""
        self.get(id)
        with self._file.writing() as db:
            now = time.time()
            db.execute("UPDATE endpoint SET enabled = 1, disabled_reason = NULL, taken_at = ? WHERE id = ?", (now, id))
            db.execute("UPDATE delivery SET next_at = ? WHERE endpoint = ? AND state = ?", (now, id, WAITING))
        self.changed.notify()
        return self.get(id)

    def rotate(self, id: str, *, at_once: bool = False) -> Endpoint:
        """Gives an endpoint a new secret; unless `at_once`, the old one also signs for a day. Raises NoSuchWebhook."""
        until = 0.0 if at_once else time.time() + ROTATION_S
        self.get(id)
        with self._file.writing() as db:
            update = "UPDATE endpoint SET old_secret = secret, old_until = ?, secret = ? WHERE id = ?"
            db.execute(update, (until, _new_secret(), id))
        return self.get(id)

    # --- deliveries --------------------------------------------------------------------------------------------------

    def enqueue(self, messages: Sequence[Message], position: tuple[str, int] | None = None) -> None:
        """Queues the messages for every enabled endpoint that subscribes to them, each once; returns when on disk.

        `position` is a name and a number to store in the same transaction: how far a list of sources was read.
        """
        if not self._path.exists():
            return
        with self._file.writing() as db:
            endpoints = [_endpoint(row) for row in db.execute("SELECT * FROM endpoint WHERE enabled = 1")]
            now, created_at = time.time(), rfc3339(datetime.now(UTC))
            rows = [
                (one.id, message.id, message.event, message.alert, message.body, now, created_at)
                for message in messages
                for one in endpoints
                if not one.types or message.event in one.types
            ]
            db.executemany(
                "INSERT OR IGNORE INTO delivery (endpoint, message, event, alert, body, state, tries, next_at, "
                "created_at) VALUES (?, ?, ?, ?, ?, 'waiting', 0, ?, ?)",
                rows,
            )
            if position is not None:
                db.execute("INSERT OR REPLACE INTO reached VALUES (?, ?)", position)
        self.changed.notify()

    def position(self, name: str) -> int | None:
        """The number stored last under this name."""
        rows = self._file.rows("SELECT n FROM reached WHERE what = ?", (name,))
        return int(rows[0][0]) if rows else None

    def outages(self) -> dict[str, int]:
        """By channel, the start of each reported outage in Unix seconds; stored as position `down CHANNEL`."""
        rows = self._file.rows("SELECT substr(what, 6), n FROM reached WHERE what GLOB 'down *' AND n > 0")
        return {channel: int(since) for channel, since in rows}

    def ping(self, id: str) -> Delivery:
        """A test message that the caller sends, once. Raises NoSuchWebhook."""
        self.get(id)
        message = f"msg_ping_{secrets.token_hex(8)}"
        body = body_of(PING, {"webhook": id})
        with self._file.writing() as db:
            db.execute(
                "INSERT INTO delivery (endpoint, message, event, body, state, tries, next_at, created_at) "
                "VALUES (?, ?, ?, ?, ?, 0, 0, ?)",
                (id, message, PING, body, FAILED, rfc3339(datetime.now(UTC))),
            )
            n = db.last_insert_rowid()
        return self.delivery(id, n)

    def due(self, now: float, busy: Mapping[str, Collection[int]], at_once: int) -> list[tuple[Endpoint, Delivery]]:
        """The deliveries to send now, oldest first: up to `at_once` per endpoint, one while it fails."""
        deliveries = []
        with self._file.reading() as db:
            if db is None:
                return []
            for endpoint in [_endpoint(row) for row in db.execute("SELECT * FROM endpoint WHERE enabled = 1")]:
                in_flight = busy.get(endpoint.id, ())
                failing = "SELECT 1 FROM delivery WHERE endpoint = ? AND state = 'waiting' AND tries > 0 LIMIT 1"
                room = (1 if list(db.execute(failing, (endpoint.id,))) else at_once) - len(in_flight)
                if room <= 0:
                    continue
                rows = db.execute(DELIVERY + DUE, (endpoint.id, now, json.dumps(list(in_flight)), room))
                deliveries += [(endpoint, Delivery(*row)) for row in rows]
        return deliveries

    def next_due(self, now: float) -> float | None:
        """The time of the next retry after `now`, in Unix seconds."""
        rows = self._file.rows("SELECT min(next_at) FROM delivery WHERE state = 'waiting' AND next_at > ?", (now,))
        return rows[0][0] if rows else None

    def record_attempt(self, delivery: Delivery, attempt: Attempt, jitter: float) -> Delivery:
        """Records the outcome of a try: done, to be retried later, or failed. 410 disables the endpoint."""
        now = time.time()
        tries = delivery.tries + 1
        with self._file.writing() as db:
            state, next_at, reason = WAITING, now, None
            if attempt.succeeded:
                state = DONE
                db.execute("UPDATE endpoint SET taken_at = ? WHERE id = ?", (now, delivery.endpoint))
            elif attempt.status == 410:
                state, reason = FAILED, "the endpoint answered 410 Gone"
            elif delivery.event == PING:
                state = FAILED
            elif tries >= len(self._schedule_s):
                state = FAILED
                rows = db.execute("SELECT taken_at FROM endpoint WHERE id = ?", (delivery.endpoint,))
                if any(now - taken_at >= sum(self._schedule_s) for (taken_at,) in rows):
                    reason = f"no delivery succeeded during {len(self._schedule_s)} tries of one message"
            else:
                next_at = now + max(self._schedule_s[tries] * jitter, attempt.wait_s)
            db.execute(
                "UPDATE delivery SET state = ?, tries = ?, last_status = ?, last_error = ?, next_at = ? WHERE n = ?",
                (state, tries, attempt.status, attempt.error, next_at, delivery.n),
            )
            if reason is not None:
                db.execute(
                    "UPDATE endpoint SET enabled = 0, disabled_reason = ? WHERE id = ?", (reason, delivery.endpoint)
                )
        return self.delivery(delivery.endpoint, delivery.n)

    def delivery(self, id: str, n: int) -> Delivery:
        """Raises NoSuchWebhook."""
        rows = self._file.rows(DELIVERY + "WHERE endpoint = ? AND n = ?", (id, n))
        if not rows:
            raise NoSuchWebhook(f"There is no delivery {n} of webhook {id[:40]!a}.")
        return Delivery(*rows[0])

    def deliveries(self, id: str, before: int | None = None, limit: int = 50) -> list[Delivery]:
        """The deliveries of an endpoint, newest first. Raises NoSuchWebhook."""
        self.get(id)
        where = "WHERE endpoint = ?1 AND (?2 IS NULL OR n < ?2) ORDER BY n DESC LIMIT ?3"
        return [Delivery(*row) for row in self._file.rows(DELIVERY + where, (id, before, limit))]

    def replay(self, id: str, n: int) -> Delivery:
        """Queues a delivery again whatever its outcome, with the same webhook-id. Raises NoSuchWebhook."""
        self.delivery(id, n)
        with self._file.writing() as db:
            db.execute("UPDATE delivery SET state = ?, tries = 0, next_at = ? WHERE n = ?", (WAITING, time.time(), n))
        self.changed.notify()
        return self.delivery(id, n)

    def n_waiting(self) -> int:
        """How many deliveries wait, over all endpoints."""
        rows = self._file.rows("SELECT count(*) FROM delivery WHERE state = 'waiting'")
        return int(rows[0][0]) if rows else 0

    def purge(self, days: float) -> None:
        """Deletes deliveries that succeeded or failed longer ago."""
        if self._path.exists():
            oldest = rfc3339(datetime.fromtimestamp(time.time() - 86_400 * days, UTC))
            with self._file.writing() as db:
                db.execute("DELETE FROM delivery WHERE state != 'waiting' AND created_at < ?", (oldest,))

    # --- erasure -----------------------------------------------------------------------------------------------------

    def n_about(self, alert_id: str) -> int:
        """How many deliveries carry an event of this alert."""
        return self._count("alert = ?", alert_id)

    def erase_alert(self, alert_id: str) -> None:
        """Deletes all deliveries about an alert, sent or not."""
        self._erase("alert = ?", alert_id)

    def n_reviewed_by(self, name: str) -> int:
        """How many deliveries carry a review by this person."""
        return self._count(REVIEWED_BY, name)

    def erase_reviewer(self, name: str) -> None:
        """Deletes all deliveries that carry a review by this person, sent or not."""
        self._erase(REVIEWED_BY, name)

    def _count(self, where: str, value: str) -> int:
        rows = self._file.rows(f"SELECT count(*) FROM delivery WHERE {where}", (value,))  # noqa: S608 - our own text only
        return int(rows[0][0]) if rows else 0

    def _erase(self, where: str, value: str) -> None:
        with self._file.writing(erases=True) as db:
            db.execute(f"DELETE FROM delivery WHERE {where}", (value,))  # noqa: S608 - our own text only


class WebhookSink:
    """Queues each alert event for the endpoints; `WebhookSender` delivers it at each endpoint's own pace."""

    def __init__(self, webhooks: WebhookStore) -> None:
        self._webhooks = webhooks

    def send(self, alerts: list[Alert]) -> None:
        self._webhooks.enqueue([message_of(alert) for alert in alerts])


def check_url(url: str) -> None:
    """Raises WebhookRefused for an invalid address."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or len(url) > 2000 or any(ord(c) < 33 or ord(c) == 127 for c in url):
        raise WebhookRefused("A webhook address must be http:// or https:// with a host and without spaces.")


def _endpoint(row: Sequence[Any]) -> Endpoint:
    _, id, url, types, secret, enabled, disabled_reason, created_at, _, old_secret, old_until = row
    names = tuple(json.loads(types))
    return Endpoint(id, url, names, secret, bool(enabled), disabled_reason, created_at, old_secret, old_until or 0.0)


def _new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
