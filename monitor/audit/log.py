"""The audit log on disk: who changed what, when and from where; sign-ins and refused requests.

    audit.sqlite    entry: the hash chain; person: names and addresses of entries, which can be erased; pending: changes
                    under way; head: number and hash of the newest entry

A change is recorded in two steps. `begin` writes it to `pending` before any work is done: if that fails, nothing may be
changed. `finish` moves it with its result to the chain. If the process ends in between, the next change of any process
finds the pending row and appends it with the result `unknown`. If the disk fails in between, the row stays, and the
same process appends the result with its next write. Every call opens the file; any thread of any process may write.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import apsw

from monitor.audit.chain import (
    ERASURE,
    FIRST_HASH,
    RETENTION,
    ChainCheck,
    Record,
    canonical,
    chain_hash,
    ranges_of,
    sha256,
    verify_chain,
)
from monitor.errors import AuditFailed
from monitor.ops.process_identity import is_gone, process_identity
from monitor.ops.sqlite_store import SqliteStore
from monitor.ops.timestamps import rfc3339
from reference_db.media.addresses import redact_text
from reference_db.text import printable

FILE = "audit.sqlite"
SCHEMA = """
CREATE TABLE entry (
    n INTEGER PRIMARY KEY, body TEXT NOT NULL, hash TEXT NOT NULL,
    at TEXT AS (body ->> 'at') VIRTUAL, action TEXT AS (body ->> 'action') VIRTUAL,
    result TEXT AS (body ->> 'result') VIRTUAL
) STRICT;
CREATE TABLE person (
    n INTEGER PRIMARY KEY, body TEXT NOT NULL,
    who TEXT AS (body ->> 'who') VIRTUAL, address TEXT AS (body ->> 'address') VIRTUAL,
    about TEXT AS (body ->> 'about') VIRTUAL
) STRICT;
CREATE TABLE concern (alert TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (alert, n)) STRICT, WITHOUT ROWID;
CREATE TABLE pending (
    id INTEGER PRIMARY KEY AUTOINCREMENT, process TEXT NOT NULL, started_at TEXT NOT NULL, body TEXT NOT NULL
) STRICT;
CREATE TABLE head (n INTEGER NOT NULL, hash TEXT NOT NULL, removed_to INTEGER NOT NULL) STRICT;
INSERT INTO head VALUES (0, '0000000000000000000000000000000000000000000000000000000000000000', 0);
CREATE TRIGGER entry_is_final BEFORE UPDATE ON entry
    BEGIN SELECT raise(ABORT, 'entries of the audit log are never changed'); END;
CREATE TRIGGER entry_stays BEFORE DELETE ON entry WHEN OLD.n > (SELECT removed_to FROM head)
    BEGIN SELECT raise(ABORT, 'entries of the audit log are deleted by retention only'); END;
"""
RECORD = "SELECT entry.n, entry.body, person.body, hash FROM entry LEFT JOIN person ON person.n = entry.n "
DONE, FAILED, REFUSED, UNKNOWN = "done", "failed", "refused", "unknown"
MAX_TEXT = 200  # characters of one value
BUSY_TIMEOUT_MS = 30_000  # SQLite's waiting is unfair: on a slow disk one of several writers may wait for seconds
LOST_AFTER = timedelta(days=1)  # a pending change of a process that cannot be seen from here
PAGE = 1000  # records read at once
PERSONAL = "SELECT n FROM person WHERE who = ?1 OR about = ?1 OR address = ?1 ORDER BY n"
SECRET = re.compile(r"\b(cw|whsec)_[A-Za-z0-9_+/=-]{8,}")
Value = str | int | bool | None


@dataclass(frozen=True, slots=True)
class Actor:
    """The person or program that made a change: a token's name or a user of the system, and its address."""

    who: str | None
    address: str | None
    via: Literal["api", "dashboard", "cli", "monitor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an entry says, before it has a number and a time."""

    action: str  # as the command line calls it: `licences add`
    actor: Actor
    result: str = DONE
    status: int | None = None  # of HTTP
    object: str | None = None  # its id or name, unless that is a person's
    about: str | None = None  # the person it is about: a token's name, a reviewer
    alerts: tuple[str, ...] = ()  # that it concerns
    details: Mapping[str, Value] = field(default_factory=dict)
    erased: str = ""  # numbers of the entries whose personal data are erased


class AuditLog:
    """The audit log of a data folder. Raises AuditFailed where the disk or SQLite fails."""

    def __init__(self, data_dir: Path) -> None:
        self._file = SqliteStore(data_dir / FILE, (SCHEMA,), AuditFailed, busy_timeout_ms=BUSY_TIMEOUT_MS)
        self._lock = threading.Lock()
        self._unfinished: dict[int, Change] = {}  # results that could not be written

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(self, change: Change) -> None:
        """Adds an entry; on disk when this returns."""
        with self._writing() as db:
            _append(db, change)

    def begin(self, change: Change) -> int:
        """Records a change before it is made; on disk when this returns. The result is the argument of `finish`."""
        with self._writing() as db:
            _recover(db)
            return _insert_pending(db, change)

    def finish(self, pending: int, change: Change) -> None:
        """Appends a change that was started, with its result. If this fails, the next write tries again."""
        self._unfinished[pending] = change
        with self._writing():
            pass

    def discard(self, pending: int) -> None:
        """Removes a pending change that was not made."""
        with self._writing() as db:
            db.execute("DELETE FROM pending WHERE id = ?", (pending,))

    def recover(self) -> None:
        """Appends the changes of processes that ended before they recorded the result."""
        if self._file.rows("SELECT 1 FROM pending LIMIT 1"):
            with self._writing() as db:
                _recover(db)

    def apply_retention(self, keep: timedelta, now: datetime | None = None) -> int:
        """Deletes entries older than this, and appends an entry that lets the rest be verified; returns how many."""
        with self._writing(erases=True) as db:
            removed_to = _expired_to(db, keep, now or datetime.now(UTC))
            ((first,),) = db.execute("SELECT min(n) FROM entry")
            if removed_to is None or first is None:
                return 0
            ((hash,),) = db.execute("SELECT hash FROM entry WHERE n = ?", (removed_to,))
            n_removed = removed_to - first + 1
            details = {"removed": n_removed, "removed_to": removed_to, "hash": hash}
            _append(db, Change(action=RETENTION, actor=Actor(None, None, "monitor"), details=details))
            db.execute("UPDATE head SET removed_to = ?", (removed_to,))
            for table in ("entry", "person", "concern"):
                db.execute(f"DELETE FROM {table} WHERE n <= ?", (removed_to,))  # noqa: S608 - our own text only
            return int(n_removed)

    def erase(self, name: str, actor: Actor) -> int:
        """Erases the personal data of all entries by or about this name or address; returns how many."""
        with self._writing(erases=True) as db:
            numbers = [n for (n,) in db.execute(PERSONAL, (_clean(name),))]
            if numbers:
                _append(db, Change(action=ERASURE, actor=actor, erased=ranges_of(numbers)))
                db.executemany("DELETE FROM person WHERE n = ?", [(n,) for n in numbers])
        return len(numbers)

    # --- reading -----------------------------------------------------------------------------------------------------

    def entries(
        self,
        *,
        before: int | None = None,
        limit: int = 100,
        who: str | None = None,
        action: str | None = None,
        result: str | None = None,
        since: str | None = None,
        until: str | None = None,
    ) -> list[Record]:
        """Entries that match all filters, newest first; pass the last number as `before` for the next page.

        `action` is the whole action or its first word; `since` and `until` are RFC 3339 in UTC.
        """
        where = (
            "WHERE (?1 IS NULL OR entry.n < ?1) AND (?2 IS NULL OR who = ?2 OR about = ?2) "
            "AND (?3 IS NULL OR action = ?3 OR action LIKE ?3 || ' %') AND (?4 IS NULL OR result = ?4) "
            "AND (?5 IS NULL OR at >= ?5) AND (?6 IS NULL OR at < ?6) ORDER BY entry.n DESC LIMIT ?7"
        )
        return self._select(where, (before, who, action, result, since, until, limit))

    def of_alert(self, alert_id: str) -> list[Record]:
        """The entries that concern an alert, oldest first."""
        return self._select("WHERE entry.n IN (SELECT n FROM concern WHERE alert = ?) ORDER BY entry.n", (alert_id,))

    def records(self, after: int = 0) -> Iterator[Record]:
        """All entries, oldest first, read in pages; entries added meanwhile are included."""
        while page := self._select("WHERE entry.n > ? ORDER BY entry.n LIMIT ?", (after, PAGE)):
            yield from page
            after = page[-1].n

    def verify(self) -> ChainCheck:
        """Checks the whole chain, and that the newest entry is the one that was written last."""
        with self._file.reading() as db:
            if db is None:
                return ChainCheck()
            found = verify_chain(Record(*row) for row in db.execute(RECORD + "ORDER BY entry.n"))
            ((n, hash, removed_to),) = db.execute("SELECT n, hash, removed_to FROM head")
        last = found.last if found.last is not None else removed_to
        if n > last:
            found.faults.append(f"entries {last + 1} to {n} are missing at the end")
        elif (n, hash) != (last, found.last_hash):
            found.faults.append(f"entry {last} is not the one that was written last")
        return found

    def head(self) -> tuple[int, str]:
        """Number and hash of the newest entry."""
        rows = self._file.rows("SELECT n, hash FROM head")
        return (int(rows[0][0]), str(rows[0][1])) if rows else (0, FIRST_HASH)

    def hash_of(self, n: int) -> str | None:
        """The hash of an entry; None if it was deleted, or never written."""
        rows = self._file.rows("SELECT hash FROM entry WHERE n = ?", (n,))
        return str(rows[0][0]) if rows else None

    def n_personal(self, name: str) -> int:
        """How many entries are by or about this name or address."""
        return len(self._file.rows(PERSONAL, (_clean(name),)))

    def n_expired(self, keep: timedelta) -> int:
        """How many entries `apply_retention` would delete."""
        with self._file.reading() as db:
            removed_to = None if db is None else _expired_to(db, keep, datetime.now(UTC))
            if db is None or removed_to is None:
                return 0
            ((n,),) = db.execute("SELECT count(*) FROM entry WHERE n <= ?", (removed_to,))
            return int(n)

    def _select(self, where: str, values: tuple[Any, ...]) -> list[Record]:
        return [Record(*row) for row in self._file.rows(RECORD + where, values)]

    @contextmanager
    def _writing(self, *, erases: bool = False) -> Iterator[apsw.Connection]:
        """One transaction, which first appends the results that wait; one thread at a time."""
        with self._lock:
            unfinished = dict(self._unfinished)
            with self._file.writing(erases=erases) as db:
                for pending, change in unfinished.items():
                    db.execute("DELETE FROM pending WHERE id = ?", (pending,))
                    _append(db, change)
                yield db
            for pending in unfinished:
                del self._unfinished[pending]


def _append(db: apsw.Connection, change: Change) -> None:
    ((last_n, last_hash),) = db.execute("SELECT n, hash FROM head")
    n, actor = last_n + 1, change.actor
    person = None
    if actor.who is not None or actor.address is not None or change.about is not None:
        names = {"who": actor.who, "address": actor.address, "about": change.about}
        person = canonical({"salt": secrets.token_hex(16)} | {key: _clean(value) for key, value in names.items()})
    details = {key: _clean(value) for key, value in change.details.items()}
    body = canonical(
        {
            "n": n,
            "at": rfc3339(datetime.now(UTC), "milliseconds"),
            "action": _clean(change.action),
            "via": actor.via,
            "result": change.result,
            "status": change.status,
            "object": _clean(change.object),
            "alerts": list(change.alerts),
            "details": details | ({"erased": change.erased} if change.erased else {}),
            "person": None if person is None else sha256(person),
        }
    )
    hash = chain_hash(last_hash, body)
    db.execute("INSERT INTO entry (n, body, hash) VALUES (?, ?, ?)", (n, body, hash))
    if person is not None:
        db.execute("INSERT INTO person (n, body) VALUES (?, ?)", (n, person))
    db.executemany("INSERT OR IGNORE INTO concern VALUES (?, ?)", [(alert, n) for alert in change.alerts])
    db.execute("UPDATE head SET n = ?, hash = ?", (n, hash))


def _insert_pending(db: apsw.Connection, change: Change) -> int:
    values = asdict(change) | {"details": dict(change.details)}
    row = (process_identity(), rfc3339(datetime.now(UTC), "milliseconds"), json.dumps(values))
    db.execute("INSERT INTO pending (process, started_at, body) VALUES (?, ?, ?)", row)
    return db.last_insert_rowid()


def _recover(db: apsw.Connection) -> None:
    """Appends the pending changes of processes that have ended; of those that cannot be seen, after a day."""
    oldest = rfc3339(datetime.now(UTC) - LOST_AFTER, "milliseconds")
    rows = list(db.execute("SELECT id, process, started_at, body FROM pending ORDER BY id"))
    for id, process, started_at, body in rows:
        gone = is_gone(process)
        if gone or (gone is None and started_at < oldest):
            values = json.loads(body)
            values |= {"actor": Actor(**values["actor"]), "alerts": tuple(values["alerts"])}
            details = {**values["details"], "started_at": started_at}
            db.execute("DELETE FROM pending WHERE id = ?", (id,))
            _append(db, replace(Change(**values), result=UNKNOWN, details=details))


def _expired_to(db: apsw.Connection, keep: timedelta, now: datetime) -> int | None:
    """The last of the oldest entries that are all older than `keep`; None if there is none."""
    oldest = rfc3339(now - keep, "milliseconds")
    ((first_to_stay,),) = db.execute("SELECT min(n) FROM entry WHERE at >= ?", (oldest,))
    ((last,),) = db.execute("SELECT max(n) FROM entry WHERE ?1 IS NULL OR n < ?1", (first_to_stay,))
    return None if last is None else int(last)


def _clean(value: Any) -> Any:
    """The value without secrets and control characters; a text is cut to a length that fits a table."""
    if not isinstance(value, str):
        return value
    hidden = SECRET.sub(r"\1_***", redact_text(value))
    return printable(hidden)[:MAX_TEXT]
