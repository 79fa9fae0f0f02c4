"""The outbox on disk: every alert that was told, what each sink has yet to take, and the state it all came from.

    alerts.sqlite    event: alerts as told, numbered in order; alert: the latest event of each; delivery: which sink
                     has taken which event, and which not; snapshot: each channel's thinking
    alerts.lock      held by the one process that writes

Alerts and the snapshot of the thinking that told them are written in one transaction: after a crash the thinking
knows what it said. An event is there once, whoever tells it again (alert id and seq), and is owed to each sink until
that sink has taken it. What was delivered stays for some days: it is the history that `History` reads, from any
process, while the monitor writes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import apsw

from monitor.alerting.alerts import ENDED, RETRACTED, Alert
from monitor.errors import ConfigError, OutboxFailed
from monitor.ops.timestamps import rfc3339
from reference_db.store.sqlite import connect, errors_as, transaction

logger = logging.getLogger(__name__)

FILE, LOCK = "alerts.sqlite", "alerts.lock"
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE event (
    n INTEGER PRIMARY KEY AUTOINCREMENT, alert_id TEXT NOT NULL, seq INTEGER NOT NULL, type TEXT NOT NULL,
    channel TEXT NOT NULL, reference TEXT NOT NULL, told_at TEXT NOT NULL, body TEXT NOT NULL, sha256 TEXT NOT NULL,
    UNIQUE (alert_id, seq)
) STRICT;
CREATE TABLE alert (
    id TEXT PRIMARY KEY, first_n INTEGER NOT NULL UNIQUE, last_n INTEGER NOT NULL, type TEXT NOT NULL,
    channel TEXT NOT NULL, reference TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE delivery (
    sink TEXT NOT NULL, n INTEGER NOT NULL, delivered_at TEXT, PRIMARY KEY (sink, n)
) STRICT, WITHOUT ROWID;
CREATE INDEX delivery_owed ON delivery (sink, n) WHERE delivered_at IS NULL;
CREATE TABLE snapshot (channel TEXT PRIMARY KEY, content BLOB NOT NULL, saved_at TEXT NOT NULL) STRICT;
PRAGMA user_version = 1;
"""


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
    """One alert event as it was told; `n` rises with each and is never used again."""

    n: int
    emitted_at: str  # RFC 3339 UTC
    alert: Alert

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"n": self.n, "emitted_at": self.emitted_at, **self.alert.as_dict()}


class Outbox:
    """The writer's end; one process at a time, in one thread at a time.

    Where the disk fails, OutboxFailed is raised and nothing was written; the next call opens the file again and
    verifies it first, since a failed fsync says nothing about what it left.
    """

    def __init__(self, data_dir: Path, sinks: Collection[str], lock: int) -> None:
        self.data_dir = data_dir
        self._sinks = tuple(sinks)
        self._lock: int | None = lock
        self._connection: apsw.Connection | None = None

    @classmethod
    def open(cls, data_dir: Path, sinks: Collection[str]) -> Self:
        """The outbox in `data_dir` for these sinks; ConfigError where another monitor has it.

        A file that is damaged is put aside by name: what it held is lost to the monitor, which goes on without.
        """
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            lock = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{data_dir} cannot be written ({error.strerror}); set data_dir elsewhere.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"Another monitor is running on {data_dir}; stop it first, or set another data_dir."
            ) from None
        return cls(data_dir, sinks, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file."""
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, entries: Sequence[OutboxEntry], delivered: Mapping[str, Collection[int]] | None = None) -> None:
        """All of the entries, and which events each sink has taken, in one transaction; on disk when it returns."""
        now = _now()
        with self._store() as db, transaction(db):
            for entry in entries:
                for alert in entry.alerts:
                    self._tell(db, alert, now, entry.delivered.get((alert.id, alert.seq), ()))
                if entry.snapshot is not None:
                    db.execute("INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?)", (entry.channel, entry.snapshot, now))
                elif entry.drop_snapshot:
                    db.execute("DELETE FROM snapshot WHERE channel = ?", (entry.channel,))
            for sink, numbers in (delivered or {}).items():
                rows = [(now, sink, n) for n in numbers]
                db.executemany("UPDATE delivery SET delivered_at = ? WHERE sink = ? AND n = ?", rows)

    def pending(self, sink: str, after: int, limit: int) -> list[Event]:
        """The oldest events with a number above `after` that this sink has not taken."""
        with self._store() as db:
            rows = db.execute(
                "SELECT event.n, told_at, body, sha256 FROM delivery JOIN event USING (n) "
                "WHERE sink = ? AND delivered_at IS NULL AND n > ? ORDER BY n LIMIT ?",
                (sink, after, limit),
            )
            return _events(rows)

    def n_pending(self) -> dict[str, int]:
        """How many events each sink has not taken."""
        with self._store() as db:
            counted = dict(db.execute("SELECT sink, count(*) FROM delivery WHERE delivered_at IS NULL GROUP BY sink"))
        return {sink: counted.get(sink, 0) for sink in self._sinks}

    def snapshots(self) -> dict[str, bytes]:
        """The kept state of each channel."""
        with self._store() as db:
            return dict(db.execute("SELECT channel, content FROM snapshot"))

    def open_alerts(self) -> list[Alert]:
        """Every alert whose end was never told, as it was told last."""
        with self._store() as db:
            rows = db.execute(
                "SELECT n, told_at, body, sha256 FROM alert JOIN event ON n = last_n "
                "WHERE alert.type NOT IN (?, ?) ORDER BY n",
                (ENDED, RETRACTED),
            )
            return [event.alert for event in _events(rows)]

    def purge(self, keep: timedelta) -> int:
        """Forgets alerts that ended longer ago than `keep`, taken or not; how many events that were."""
        oldest = rfc3339(datetime.now(UTC) - keep, "milliseconds")
        with self._store() as db, transaction(db):
            gone = "SELECT alert.id FROM alert JOIN event ON n = last_n WHERE alert.type IN (?1, ?2) AND told_at < ?3"
            values = (ENDED, RETRACTED, oldest)
            db.execute("CREATE TEMP TABLE IF NOT EXISTS gone (id TEXT PRIMARY KEY) STRICT")
            db.execute("DELETE FROM gone")
            db.execute("INSERT INTO gone " + gone, values)
            db.execute("DELETE FROM delivery WHERE n IN (SELECT n FROM event WHERE alert_id IN (SELECT id FROM gone))")
            db.execute("DELETE FROM event WHERE alert_id IN (SELECT id FROM gone)")
            n_gone = int(db.changes())
            db.execute("DELETE FROM alert WHERE id IN (SELECT id FROM gone)")
        return n_gone

    def _tell(self, db: apsw.Connection, alert: Alert, now: str, taken: Collection[str]) -> None:
        if list(db.execute("SELECT n FROM event WHERE alert_id = ? AND seq = ?", (alert.id, alert.seq))):
            return  # told before
        body = json.dumps(alert.as_dict(), ensure_ascii=False)
        db.execute(
            "INSERT INTO event (alert_id, seq, type, channel, reference, told_at, body, sha256) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (alert.id, alert.seq, alert.type, alert.channel, alert.reference, now, body, _hash(body)),
        )
        n = db.last_insert_rowid()
        db.execute(
            "INSERT INTO alert VALUES (?1, ?2, ?2, ?3, ?4, ?5) ON CONFLICT DO UPDATE SET last_n = ?2, type = ?3",
            (alert.id, n, alert.type, alert.channel, alert.reference),
        )
        rows = [(sink, n, now if sink in taken else None) for sink in self._sinks]
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
        if path.exists() and (complaint := _damage(path)):
            self._put_aside(path, complaint)
        db = connect(path, "create")
        try:
            # What a failed fsync left in the log may be in memory only: it is written anew, into the file itself.
            db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            version = db.pragma("user_version")
            if version > SCHEMA_VERSION:
                raise ConfigError(f"{path} was made by a newer Copywatch (format {version}); use that version.")
            with transaction(db):
                if not version:
                    db.execute(SCHEMA)
                # A sink that is no longer configured is owed nothing.
                db.execute(
                    "DELETE FROM delivery WHERE delivered_at IS NULL AND sink NOT IN (SELECT value FROM json_each(?))",
                    (json.dumps(self._sinks),),
                )
        except BaseException:
            db.close()
            raise
        self._connection = db

    @staticmethod
    def _put_aside(path: Path, complaint: str) -> None:
        aside = f"damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        for ending in ("", "-wal", "-shm"):
            part = path.with_name(path.name + ending)
            if part.exists():
                part.rename(path.with_name(f"{path.name}{ending}.{aside}"))
        logger.error("%s is damaged (%s): put aside as %s.%s, begun anew", path, complaint, path.name, aside)

    def _disconnect(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except apsw.Error:
                logger.warning("%s could not be closed cleanly", self.data_dir / FILE)
            self._connection = None


class History:
    """What was told, for readers in any process; each call opens the file for itself."""

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
        """Events with a number above `after`, oldest first: the last one's number is where to go on."""
        return self._select(
            "SELECT n, told_at, body, sha256 FROM event WHERE n > ?1 AND (?2 IS NULL OR channel = ?2) "
            "AND (?3 IS NULL OR reference = ?3) AND (?4 IS NULL OR type = ?4) ORDER BY n LIMIT ?5",
            (after, channel, reference, type, limit),
        )

    def newest(self) -> int:
        """The number of the newest event, 0 where there is none."""
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
        status: Literal["open", "ended", "retracted"] | None = None,
        licensed: bool | None = None,
        min_score: float | None = None,
        since: str | None = None,
        until: str | None = None,
    ) -> list[tuple[int, Event]]:
        """Each alert's latest event and the number of its first, the newest alert first.

        The first's number is the cursor: it orders the list, never changes, and `before` it comes the next page.
        `since` and `until` (RFC 3339) bound when the copy began, or was first told where the channel has no clock.
        """
        more = (owner, status, licensed, min_score, since, until, ENDED, RETRACTED)
        rows = self._rows(
            "SELECT first_n, event.n, event.told_at, event.body, event.sha256 "
            "FROM alert JOIN event ON event.n = last_n JOIN event AS first ON first.n = first_n "
            "WHERE (?1 IS NULL OR first_n < ?1) AND (?2 IS NULL OR alert.channel = ?2) "
            "AND (?3 IS NULL OR alert.reference = ?3) AND (?4 IS NULL OR alert.type = ?4) "
            "AND (?6 IS NULL OR event.body ->> 'owner' = ?6) "
            "AND (?7 IS NULL OR ?7 = iif(alert.type IN (?12, ?13), substr(alert.type, 7), 'open')) "
            "AND (?8 IS NULL OR ?8 = (event.body ->> 'licence' IS NOT NULL)) "
            "AND (?9 IS NULL OR event.body ->> 'score' >= ?9) "
            "AND (?10 IS NULL OR unixepoch(coalesce(event.body ->> 'started_at', first.told_at), 'subsec') "
            ">= unixepoch(?10, 'subsec')) "
            "AND (?11 IS NULL OR unixepoch(coalesce(event.body ->> 'started_at', first.told_at), 'subsec') "
            "< unixepoch(?11, 'subsec')) ORDER BY first_n DESC LIMIT ?5",
            (before, channel, reference, type, limit, *more),
        )
        return [(first_n, event) for first_n, *row in rows for event in _events([tuple(row)])]

    def open_alerts(self) -> list[Alert]:
        """Every alert whose end was not told yet, the oldest first."""
        found = self._select(
            "SELECT n, told_at, body, sha256 FROM alert JOIN event ON n = last_n "
            "WHERE alert.type NOT IN (?, ?) ORDER BY n",
            (ENDED, RETRACTED),
        )
        return [event.alert for event in found]

    def alert(self, alert_id: str) -> list[Event]:
        """All that was told of one alert, oldest first; nothing where there is no such alert."""
        return self._select("SELECT n, told_at, body, sha256 FROM event WHERE alert_id = ? ORDER BY n", (alert_id,))

    def _select(self, sql: str, values: tuple[Any, ...]) -> list[Event]:
        return _events(self._rows(sql, values))

    def _rows(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if not self._path.exists():
            return []
        with errors_as(OutboxFailed, f"{self._path} cannot be read"), closing(connect(self._path, "read")) as db:
            return list(db.execute(sql, values)) if db.pragma("user_version") else []
        raise AssertionError  # both pass every error on


def _damage(path: Path) -> str | None:
    """What is wrong with the file, if anything is."""
    try:
        with closing(connect(path, "write")) as db:
            found = [str(row[0]) for row in db.execute("PRAGMA quick_check(1)")]
    except (apsw.CorruptError, apsw.NotADBError) as error:
        return str(error)
    return None if found == ["ok"] else found[0]


def _events(rows: Any) -> list[Event]:
    events = []
    for n, told_at, body, sha256 in rows:
        if _hash(body) != sha256:
            logger.error("event %d was damaged on disk and is left out", n)
            continue
        events.append(Event(n, told_at, Alert.from_dict(json.loads(body))))
    return events


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _now() -> str:
    return rfc3339(datetime.now(UTC), "milliseconds")
