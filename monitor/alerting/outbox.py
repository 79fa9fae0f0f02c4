"""The outbox on disk: every alert event, which sinks have it, and the newest snapshot of each channel.

    alerts.sqlite    event: alert events, numbered in order; alert: first and last event of each alert; delivery: which
                     sink has which event; snapshot: each channel's state

Alert events and the snapshot taken after them are written in one transaction, so a restored channel knows what it
emitted. An event is stored once, however often it is written (by alert id and seq), and is pending for each sink until
that sink has it. Delivered events stay for some days: they are the history that `History` reads, from any process,
while the monitor writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import apsw

from monitor.alerting.alerts import ENDED, RETRACTED, Alert
from monitor.errors import ConfigError, OutboxFailed
from monitor.ops.data_dir_lock import lock_for_upgrade, take_lock
from monitor.ops.timestamps import rfc3339
from reference_db.store.disk import create_private_folder
from reference_db.store.sqlite import connect, errors_as, transaction

AlertStatus: TypeAlias = Literal["open", "ended", "retracted", "valid"]  # valid: not retracted

logger = logging.getLogger(__name__)

FILE = "alerts.sqlite"
SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE event (
    n INTEGER PRIMARY KEY AUTOINCREMENT, alert_id TEXT NOT NULL, seq INTEGER NOT NULL, type TEXT NOT NULL,
    channel TEXT NOT NULL, reference TEXT NOT NULL, emitted_at TEXT NOT NULL, body TEXT NOT NULL, sha256 TEXT NOT NULL,
    UNIQUE (alert_id, seq)
) STRICT;
CREATE TABLE alert (
    id TEXT PRIMARY KEY, first_n INTEGER NOT NULL UNIQUE, last_n INTEGER NOT NULL, type TEXT NOT NULL,
    channel TEXT NOT NULL, reference TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE delivery (
    sink TEXT NOT NULL, n INTEGER NOT NULL, delivered_at TEXT, PRIMARY KEY (sink, n)
) STRICT, WITHOUT ROWID;
CREATE INDEX delivery_pending ON delivery (sink, n) WHERE delivered_at IS NULL;
CREATE TABLE snapshot (channel TEXT PRIMARY KEY, content BLOB NOT NULL, saved_at TEXT NOT NULL) STRICT;
PRAGMA user_version = 2;
"""
UPGRADE = """
ALTER TABLE event RENAME COLUMN told_at TO emitted_at;
DROP INDEX delivery_owed;
CREATE INDEX delivery_pending ON delivery (sink, n) WHERE delivered_at IS NULL;
PRAGMA user_version = 2;
"""  # from version 1, of Copywatch 0.1


@dataclass(frozen=True, slots=True, eq=False)
class OutboxEntry:
    """Alerts of one channel and the snapshot taken after them; `drop_snapshot` deletes the stored snapshot."""

    channel: str
    alerts: Sequence[Alert] = ()
    snapshot: bytes | None = None
    drop_snapshot: bool = False
    delivered: Mapping[tuple[str, int], Collection[str]] = field(default_factory=dict)  # by id and seq: sinks


@dataclass(frozen=True, slots=True)
class Event:
    """One alert event as emitted; its number `n` rises with each and is never reused."""

    n: int
    emitted_at: str  # RFC 3339 UTC
    alert: Alert

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"n": self.n, "emitted_at": self.emitted_at, **self.alert.as_dict()}


class Outbox:
    """The writing side: one process, and one thread at a time.

    If the disk fails, OutboxFailed is raised and nothing is written; the next call opens the file again and verifies it
    first, since a failed fsync leaves the file in an unknown state.
    """

    def __init__(self, data_dir: Path, sinks: Collection[str], lock: int) -> None:
        self.data_dir = data_dir
        self._sinks = tuple(sinks)
        self._lock: int | None = lock
        self._connection: apsw.Connection | None = None

    @classmethod
    def open(cls, data_dir: Path, sinks: Collection[str]) -> Self:
        """The outbox in `data_dir` for these sinks. Raises ConfigError if another monitor has it.

        A damaged file is renamed and replaced by an empty one; the monitor continues without its content.
        """
        try:
            create_private_folder(data_dir)
            lock = take_lock(data_dir)
        except OSError as error:
            raise ConfigError(f"{data_dir} cannot be written ({error.strerror}); set data_dir elsewhere.") from error
        if lock is None:
            raise ConfigError(f"Another monitor is running on {data_dir}; stop it first, or set another data_dir.")
        return cls(data_dir, sinks, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file and releases the lock."""
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, entries: Sequence[OutboxEntry], delivered: Mapping[str, Collection[int]] | None = None) -> None:
        """Writes the entries and the numbers of events that each sink has, in one transaction; returns when on disk."""
        now = _now()
        with self._store() as db, transaction(db):
            for entry in entries:
                for alert in entry.alerts:
                    self._insert(db, alert, now, entry.delivered.get((alert.id, alert.seq), ()))
                if entry.snapshot is not None:
                    db.execute("INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?)", (entry.channel, entry.snapshot, now))
                elif entry.drop_snapshot:
                    db.execute("DELETE FROM snapshot WHERE channel = ?", (entry.channel,))
            for sink, numbers in (delivered or {}).items():
                rows = [(now, sink, n) for n in numbers]
                db.executemany("UPDATE delivery SET delivered_at = ? WHERE sink = ? AND n = ?", rows)

    def pending(self, sink: str, after: int, limit: int) -> list[Event]:
        """The oldest events with a number above `after` that this sink does not have."""
        with self._store() as db:
            rows = db.execute(
                "SELECT event.n, emitted_at, body, sha256 FROM delivery JOIN event USING (n) "
                "WHERE sink = ? AND delivered_at IS NULL AND n > ? ORDER BY n LIMIT ?",
                (sink, after, limit),
            )
            return _events(rows)

    def n_pending(self) -> dict[str, int]:
        """How many events each sink does not have."""
        with self._store() as db:
            counted = dict(db.execute("SELECT sink, count(*) FROM delivery WHERE delivered_at IS NULL GROUP BY sink"))
        return {sink: counted.get(sink, 0) for sink in self._sinks}

    def snapshots(self) -> dict[str, bytes]:
        """The snapshot of each channel."""
        with self._store() as db:
            return dict(db.execute("SELECT channel, content FROM snapshot"))

    def open_alerts(self) -> list[Alert]:
        """The last event of every alert that has neither ended nor been retracted."""
        with self._store() as db:
            rows = db.execute(
                "SELECT n, emitted_at, body, sha256 FROM alert JOIN event ON n = last_n "
                "WHERE alert.type NOT IN (?, ?) ORDER BY n",
                (ENDED, RETRACTED),
            )
            return [event.alert for event in _events(rows)]

    def purge(self, retention: timedelta) -> int:
        """Deletes alerts that ended longer ago than this, delivered or not; returns the number of events."""
        oldest = rfc3339(datetime.now(UTC) - retention, "milliseconds")
        with self._store() as db, transaction(db):
            db.execute("CREATE TEMP TABLE IF NOT EXISTS expired (id TEXT PRIMARY KEY) STRICT")
            db.execute("DELETE FROM expired")
            db.execute(
                "INSERT INTO expired SELECT alert.id FROM alert JOIN event ON n = last_n "
                "WHERE alert.type IN (?, ?) AND emitted_at < ?",
                (ENDED, RETRACTED, oldest),
            )
            db.execute(
                "DELETE FROM delivery WHERE n IN (SELECT n FROM event WHERE alert_id IN (SELECT id FROM expired))"
            )
            db.execute("DELETE FROM event WHERE alert_id IN (SELECT id FROM expired)")
            n_events = int(db.changes())
            db.execute("DELETE FROM alert WHERE id IN (SELECT id FROM expired)")
        return n_events

    def _insert(self, db: apsw.Connection, alert: Alert, now: str, delivered: Collection[str]) -> None:
        if list(db.execute("SELECT n FROM event WHERE alert_id = ? AND seq = ?", (alert.id, alert.seq))):
            return  # stored before
        body = json.dumps(alert.as_dict(), ensure_ascii=False)
        db.execute(
            "INSERT INTO event (alert_id, seq, type, channel, reference, emitted_at, body, sha256) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (alert.id, alert.seq, alert.type, alert.channel, alert.reference, now, body, _hash(body)),
        )
        n = db.last_insert_rowid()
        db.execute(
            "INSERT INTO alert VALUES (?1, ?2, ?2, ?3, ?4, ?5) ON CONFLICT DO UPDATE SET last_n = ?2, type = ?3, "
            "reference = ?5",  # an alert may name another version of its film later
            (alert.id, n, alert.type, alert.channel, alert.reference),
        )
        rows = [(sink, n, now if sink in delivered else None) for sink in self._sinks]
        db.executemany("INSERT INTO delivery VALUES (?, ?, ?)", rows)

    @contextmanager
    def _store(self) -> Iterator[apsw.Connection]:
        try:
            with errors_as(OutboxFailed, f"{self.data_dir / FILE} cannot be written"):
                if self._connection is None:
                    self._connect()
                assert self._connection is not None
                yield self._connection
        except OutboxFailed:
            self._disconnect()
            raise

    def _connect(self) -> None:
        path = self.data_dir / FILE
        if path.exists() and (damage := _damage(path)):
            self._move_aside(path, damage)
        db = connect(path, "create")
        try:
            # After a failed fsync the log may be complete in memory only: this writes it again, into the file itself.
            db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            version = db.pragma("user_version")
            if version > SCHEMA_VERSION:
                raise ConfigError(f"{path} was made by a newer Copywatch (format {version}); use that version.")
            with transaction(db):
                if version < SCHEMA_VERSION:
                    db.execute(UPGRADE if version else SCHEMA)
                # A sink that is no longer configured gets nothing.
                db.execute(
                    "DELETE FROM delivery WHERE delivered_at IS NULL AND sink NOT IN (SELECT value FROM json_each(?))",
                    (json.dumps(self._sinks),),
                )
        except BaseException:
            db.close()
            raise
        self._connection = db

    @staticmethod
    def _move_aside(path: Path, damage: str) -> None:
        suffix = f"damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        for ending in ("", "-wal", "-shm"):
            part = path.with_name(path.name + ending)
            if part.exists():
                part.rename(path.with_name(f"{path.name}{ending}.{suffix}"))
        logger.error("%s is damaged (%s); moved it to %s.%s and created a new one", path, damage, path.name, suffix)

    def _disconnect(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except apsw.Error:
                logger.warning("%s could not be closed cleanly", self.data_dir / FILE)
            self._connection = None


class History:
    """All alert events, for readers in any process; each call opens the file."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE

    def events(
        self,
        *,
        after: int = 0,
        limit: int = 100,
        channel: str | None = None,
        reference: str | None = None,
        type: str | None = None,
    ) -> list[Event]:
        """Events with a number above `after`, oldest first; the last number is the cursor of the next page."""
        return self._select(
            "SELECT n, emitted_at, body, sha256 FROM event WHERE n > ?1 AND (?2 IS NULL OR channel = ?2) "
            "AND (?3 IS NULL OR reference = ?3) AND (?4 IS NULL OR type = ?4) ORDER BY n LIMIT ?5",
            (after, channel, reference, type, limit),
        )

    def newest(self) -> int:
        """The number of the newest event, or 0."""
        rows = self._rows("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'event'", ())
        return int(rows[0][0]) if rows else 0

    def alerts(
        self,
        *,
        before: int | None = None,
        limit: int = 100,
        channel: str | None = None,
        reference: str | None = None,
        type: str | None = None,
        owner: str | None = None,
        status: AlertStatus | None = None,
        licensed: bool | None = None,
        min_confidence: float | None = None,
        since: str | None = None,
        until: str | None = None,
    ) -> list[tuple[int, Event]]:
        """The number of each alert's first event and its last event, newest alert first.

        The first event's number orders the list and never changes; pass the last one as `before` for the next page.
        `since` and `until` (RFC 3339) bound the start of the copy, or its first event if the channel has no clock.
        """
        more = (owner, status, licensed, min_confidence, since, until, ENDED, RETRACTED)
        rows = self._rows(
            "SELECT first_n, event.n, event.emitted_at, event.body, event.sha256 "
            "FROM alert JOIN event ON event.n = last_n JOIN event AS first ON first.n = first_n "
            "WHERE (?1 IS NULL OR first_n < ?1) AND (?2 IS NULL OR alert.channel = ?2) "
            "AND (?3 IS NULL OR alert.reference = ?3) AND (?4 IS NULL OR alert.type = ?4) "
            "AND (?6 IS NULL OR event.body ->> 'owner' = ?6) "
            "AND (?7 IS NULL OR ?7 = iif(alert.type IN (?12, ?13), substr(alert.type, 7), 'open') "
            "OR (?7 = 'valid' AND alert.type <> ?13)) "
            "AND (?8 IS NULL OR ?8 = (event.body ->> 'licence' IS NOT NULL)) "
            "AND (?9 IS NULL OR event.body ->> 'confidence' >= ?9) "
            "AND (?10 IS NULL OR unixepoch(coalesce(event.body ->> 'started_at', first.emitted_at), 'subsec') "
            ">= unixepoch(?10, 'subsec')) "
            "AND (?11 IS NULL OR unixepoch(coalesce(event.body ->> 'started_at', first.emitted_at), 'subsec') "
            "< unixepoch(?11, 'subsec')) ORDER BY first_n DESC LIMIT ?5",
            (before, channel, reference, type, limit, *more),
        )
        return [(first_n, event) for first_n, *row in rows for event in _events([tuple(row)])]

    def open_alerts(self) -> list[Alert]:
        """The last event of every alert that has neither ended nor been retracted, oldest first."""
        found = self._select(
            "SELECT n, emitted_at, body, sha256 FROM alert JOIN event ON n = last_n "
            "WHERE alert.type NOT IN (?, ?) ORDER BY n",
            (ENDED, RETRACTED),
        )
        return [event.alert for event in found]

    def existing(self, alert_ids: Sequence[str]) -> set[str]:
        """Those of the alerts that are stored."""
        rows = self._rows("SELECT id FROM alert WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(alert_ids),))
        return {str(id) for (id,) in rows}

    def alert(self, alert_id: str) -> list[Event]:
        """All events of one alert, oldest first; empty if there is no such alert."""
        return self._select("SELECT n, emitted_at, body, sha256 FROM event WHERE alert_id = ? ORDER BY n", (alert_id,))

    def _select(self, sql: str, values: tuple[Any, ...]) -> list[Event]:
        return _events(self._rows(sql, values))

    def _rows(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if not self._path.exists():
            return []
        with errors_as(OutboxFailed, f"{self._path} cannot be read"):
            with closing(connect(self._path, "read")) as db:
                version = int(db.pragma("user_version"))
                if version == 0 or version >= SCHEMA_VERSION:
                    return list(db.execute(sql, values)) if version else []
            self._upgrade()
        return self._rows(sql, values)

    def _version(self) -> int:
        with closing(connect(self._path, "read")) as db:
            return int(db.pragma("user_version"))

    def _upgrade(self) -> None:
        """Upgrades the file of an older version, unless the monitor that starts on it does so."""
        with lock_for_upgrade(self._path.parent, lambda: self._version() == SCHEMA_VERSION) as is_needed:
            if is_needed:
                with closing(connect(self._path, "write")) as db, transaction(db):
                    db.execute(UPGRADE)


def erase_alert(data_dir: Path, alert_id: str) -> None:
    """Deletes all events of an alert that is over, delivered or not, and overwrites their bytes; from any process."""
    path = data_dir / FILE
    if not History(data_dir).alert(alert_id):  # upgrades an older file
        return
    with errors_as(OutboxFailed, f"{path} cannot be written"), closing(connect(path, "write")) as db:
        db.pragma("secure_delete", True)
        with transaction(db, immediate=True):
            db.execute("DELETE FROM delivery WHERE n IN (SELECT n FROM event WHERE alert_id = ?)", (alert_id,))
            db.execute("DELETE FROM event WHERE alert_id = ?", (alert_id,))
            db.execute("DELETE FROM alert WHERE id = ?", (alert_id,))
        with suppress(apsw.BusyError):
            db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


def _damage(path: Path) -> str | None:
    """The damage of the file, if there is any."""
    try:
        with closing(connect(path, "write")) as db:
            found = [str(row[0]) for row in db.execute("PRAGMA quick_check(1)")]
    except (apsw.CorruptError, apsw.NotADBError) as error:
        return str(error)
    return None if found == ["ok"] else found[0]


def _events(rows: Any) -> list[Event]:
    events = []
    for n, emitted_at, body, sha256 in rows:
        if _hash(body) != sha256:
            logger.error("skipped event %d: it was damaged on disk", n)
            continue
        events.append(Event(n, emitted_at, Alert.from_dict(json.loads(body))))
    return events


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _now() -> str:
    return rfc3339(datetime.now(UTC), "milliseconds")
