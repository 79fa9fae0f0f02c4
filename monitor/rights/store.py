"""Rights on disk: licences, exclusions and reviews in `rights.sqlite`, written by any process at any time.

The command line and a running monitor share the file. Each call opens it, and every change is on disk when the call
returns. A revision number rises with every change, so that another process sees cheaply that there was one; within one
process `RightsStore.changed` signals it at once. Reviews are never overwritten: the newest review of an alert counts,
and older ones stay on record.

Version 0.1 called the file `desk.sqlite`. It is renamed when it is first opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw

from monitor.config.settings import CHANNEL_NAME
from monitor.errors import InvalidRights, RightsNotFound, RightsStoreFailed
from monitor.ops.change_signal import ChangeSignal
from monitor.ops.data_dir_lock import lock_for_upgrade
from monitor.ops.sqlite_store import SqliteStore
from monitor.rights.rules import ANY_CHANNEL, DECISIONS, Exclusion, Licence, Review, Rules
from reference_db.store.catalog import ReferenceId
from reference_db.store.disk import sync_directory
from reference_db.store.sqlite import connect, errors_as
from reference_db.text import is_printable

FILE, FORMER_FILE = "rights.sqlite", "desk.sqlite"
ERASED = "(erased)"  # in place of the name of a reviewer
MAX_ROWS = 100_000  # licences, exclusions: each rule is checked at each alert, and held in memory
MAX_TEXT = 1000  # characters of a note, a name or an owner
SCHEMA = """
CREATE TABLE licence (
    n INTEGER PRIMARY KEY AUTOINCREMENT, reference TEXT, owner TEXT, tag TEXT, channel TEXT NOT NULL,
    from_ TEXT, until TEXT, note TEXT NOT NULL, added_at TEXT NOT NULL
) STRICT;
CREATE TABLE exclusion (
    id INTEGER PRIMARY KEY AUTOINCREMENT, reference TEXT NOT NULL, start_s REAL NOT NULL, end_s REAL NOT NULL,
    note TEXT NOT NULL, added_at TEXT NOT NULL
) STRICT;
CREATE TABLE review (
    n INTEGER PRIMARY KEY AUTOINCREMENT, alert_id TEXT NOT NULL, decision TEXT NOT NULL, by TEXT NOT NULL,
    at TEXT NOT NULL, note TEXT NOT NULL, settled INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX review_of_alert ON review (alert_id, n);
CREATE INDEX review_unsettled ON review (n) WHERE settled = 0;
CREATE TABLE change (n INTEGER NOT NULL) STRICT;
INSERT INTO change VALUES (1);
"""
LICENCE_ID = re.compile(r"L([1-9][0-9]{0,17})")
ALERT_ID = re.compile(r"[0-9a-f]{24}")
TAG = re.compile(r"[^=]+=.*", re.S)
CHANNEL = re.compile(rf"\*|{CHANNEL_NAME}")
REVIEW = "SELECT n, alert_id, decision, by, at, note FROM review "
LATEST = """
SELECT n, alert_id, decision, by, at, note FROM review WHERE n IN (
    SELECT max(n) FROM review WHERE ?1 IS NULL OR alert_id IN (SELECT value FROM json_each(?1)) GROUP BY alert_id
)
"""


class RightsStore:
    """The rights of one data folder; safe in any thread and process.

    Raises InvalidRights for an invalid request, RightsNotFound for an unknown licence or exclusion, RightsStoreFailed
    where the disk fails, and ConfigError for a file that a newer version wrote or an older monitor still uses. Each
    leaves everything as it was.
    """

    def __init__(self, data_dir: Path) -> None:
        self.changed = ChangeSignal()  # of changes by this object
        self._data_dir = data_dir
        self._store = SqliteStore(data_dir / FILE, (SCHEMA,), RightsStoreFailed)

    # --- licences ----------------------------------------------------------------------------------------------------

    def add_licence(
        self,
        *,
        reference: str | None = None,
        owner: str | None = None,
        tag: str | None = None,
        channel: str = ANY_CHANNEL,
        from_: datetime | None = None,
        until: datetime | None = None,
        note: str = "",
    ) -> Licence:
        """Adds a licence; returns it with its id. Times are aware; the reference need not be registered yet."""
        if reference is None and owner is None and tag is None:
            raise InvalidRights("A licence needs a subject: name a reference, an owner or a tag.")
        for name, text in (("reference", reference), ("owner", owner), ("tag", tag), ("note", note)):
            _check_text(name, text)
        if tag is not None and not TAG.fullmatch(tag):
            raise InvalidRights(f"A tag is key=value, got {tag[:40]!r}.")
        if not CHANNEL.fullmatch(channel):
            raise InvalidRights(f"A channel is a name or * for all, got {channel[:40]!r}.")
        for name, moment in (("from", from_), ("until", until)):
            if moment is not None and moment.tzinfo is None:
                raise InvalidRights(f"The time `{name}` has no time zone; write it as 2026-11-16T20:00:00Z.")
        if from_ is not None and until is not None and until <= from_:
            raise InvalidRights("A licence must end after it begins: `until` must be later than `from`.")
        values = (reference, owner, tag, channel, _to_text(from_), _to_text(until), note, _to_text(_now()))
        with self._writing() as db:
            _check_room(db, "SELECT count(*) FROM licence", "licences")
            db.execute(
                "INSERT INTO licence (reference, owner, tag, channel, from_, until, note, added_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            return _licence((db.last_insert_rowid(), *values))

    def licences(self) -> list[Licence]:
        """All licences, oldest first."""
        return [_licence(row) for row in self._file().rows("SELECT * FROM licence ORDER BY n")]

    def licence(self, id: str) -> Licence:
        """Raises RightsNotFound."""
        for licence in self.licences():
            if licence.id == id:
                return licence
        raise RightsNotFound(f"There is no licence {id[:40]!r}; `copywatch licences list` lists all.")

    def remove_licence(self, id: str) -> None:
        """Events already emitted stay licensed; later ones are not. Raises RightsNotFound."""
        number = LICENCE_ID.fullmatch(id)
        if number is None or not self._delete("DELETE FROM licence WHERE n = ?", (int(number[1]),)):
            self.licence(id)

    # --- exclusions --------------------------------------------------------------------------------------------------

    def exclude(self, reference: str, start_s: float, end_s: float, note: str = "") -> Exclusion:
        """Excludes the span start_s <= t < end_s of a reference from alerting."""
        _check_text("reference", reference)
        _check_text("note", note)
        if not (math.isfinite(start_s) and math.isfinite(end_s) and 0 <= start_s < end_s):
            raise InvalidRights(
                f"A span must start at 0 s or later and end after its start, got {start_s:g} to {end_s:g}."
            )
        values = (reference, float(start_s), float(end_s), note, _to_text(_now()))
        with self._writing() as db:
            _check_room(db, "SELECT count(*) FROM exclusion", "exclusions")
            db.execute("INSERT INTO exclusion (reference, start_s, end_s, note, added_at) VALUES (?,?,?,?,?)", values)
            return _exclusion((db.last_insert_rowid(), *values))

    def exclusions(self, reference: str | None = None) -> list[Exclusion]:
        """All exclusions, or those of one reference, in order of reference and span."""
        rows = self._file().rows(
            "SELECT * FROM exclusion WHERE ?1 IS NULL OR reference = ?1 ORDER BY reference, start_s, id", (reference,)
        )
        return [_exclusion(row) for row in rows]

    def remove_exclusion(self, reference: str, id: int) -> None:
        """Lets the span alert again. Raises RightsNotFound."""
        found = -(2**63) <= id < 2**63
        if not found or not self._delete("DELETE FROM exclusion WHERE reference = ? AND id = ?", (reference, id)):
            raise RightsNotFound(
                f"The reference {reference[:40]!r} has no exclusion {id}; `copywatch refs exclusions` lists them."
            )

    # --- reviews -----------------------------------------------------------------------------------------------------

    def review(self, alert_id: str, decision: str, by: str, note: str = "") -> Review:
        """Stores a review of an alert; the running monitor applies it, or the next one to start does."""
        (review,) = self.review_all([alert_id], decision, by, note)
        return review

    def review_all(self, alert_ids: Sequence[str], decision: str, by: str, note: str = "") -> list[Review]:
        """Stores the same review of several alerts: all of them or none."""
        if decision not in DECISIONS:
            raise InvalidRights(f"A review is one of {', '.join(DECISIONS)}, got {decision[:40]!r}.")
        for alert_id in alert_ids:
            if not ALERT_ID.fullmatch(alert_id):
                raise InvalidRights(f"An alert's id is 24 hexadecimal digits, got {alert_id[:40]!r}.")
        _check_text("name", by)
        _check_text("note", note)
        if not by.strip():
            raise InvalidRights("A review needs the name of the reviewer; give it with --by.")
        reviews = []
        with self._writing() as db:
            for alert_id in alert_ids:
                values = (alert_id, decision, by, _to_text(_now()), note)
                db.execute("INSERT INTO review (alert_id, decision, by, at, note) VALUES (?, ?, ?, ?, ?)", values)
                reviews.append(_review((db.last_insert_rowid(), *values)))
        return reviews

    def reviews(self, alert_id: str | None = None, *, after: int = 0, limit: int = 10_000) -> list[Review]:
        """The reviews of one alert or of all, oldest first; pass the last `n` as `after` for the next page."""
        rows = self._file().rows(
            REVIEW + "WHERE n > ?1 AND (?2 IS NULL OR alert_id = ?2) ORDER BY n LIMIT ?3", (after, alert_id, limit)
        )
        return [_review(row) for row in rows]

    def latest_reviews(self, alert_ids: Sequence[str] | None = None) -> dict[str, Review]:
        """The newest review of each alert that has one, or of each of these alerts."""
        wanted = None if alert_ids is None else json.dumps(list(alert_ids))
        rows = self._file().rows(LATEST, (wanted,))
        return {review.alert_id: review for review in map(_review, rows)}

    def newest_review(self) -> int:
        """The number of the newest review, or 0."""
        rows = self._file().rows("SELECT coalesce(max(n), 0) FROM review")
        return int(rows[0][0]) if rows else 0

    def unapplied_reviews(self) -> list[Review]:
        """Reviews that no monitor has applied yet, oldest first."""
        return [_review(row) for row in self._file().rows(REVIEW + "WHERE settled = 0 ORDER BY n")]

    def mark_applied(self, numbers: Sequence[int]) -> None:
        """Records that these reviews have been applied."""
        with self._writing(is_change=False) as db:
            db.executemany("UPDATE review SET settled = 1 WHERE n = ?", [(n,) for n in numbers])

    # --- retention and erasure ---------------------------------------------------------------------------------------

    def reviewed_before(self, moment: datetime) -> list[str]:
        """The alerts whose newest review is older."""
        rows = self._file().rows(
            "SELECT alert_id FROM review GROUP BY alert_id HAVING max(at) < ?", (_to_text(moment),)
        )
        return [str(alert_id) for (alert_id,) in rows]

    def remove_reviews(self, alert_ids: Sequence[str]) -> None:
        """Deletes all reviews of these alerts."""
        with self._writing(erases=True) as db:
            db.executemany("DELETE FROM review WHERE alert_id = ?", [(id,) for id in alert_ids])

    def n_reviews_by(self, name: str) -> int:
        """How many reviews have this reviewer."""
        rows = self._file().rows("SELECT count(*) FROM review WHERE by = ?", (name,))
        return int(rows[0][0]) if rows else 0

    def erase_reviewer(self, name: str) -> None:
        """Replaces the name in all reviews, and deletes their notes; the decisions stay."""
        with self._writing(erases=True) as db:
            db.execute("UPDATE review SET by = ?, note = '' WHERE by = ?", (ERASED, name))

    # --- for a monitor -----------------------------------------------------------------------------------------------

    def revision(self) -> int:
        """A number that rises with every change; 0 while there is no file."""
        rows = self._file().rows("SELECT n FROM change")
        return int(rows[0][0]) if rows else 0

    def rules(self) -> Rules:
        """All licences, exclusions and newest reviews, read in one transaction."""
        with self._file().reading() as db:
            if db is None:
                return Rules()
            licences = [_licence(row) for row in db.execute("SELECT * FROM licence ORDER BY n")]
            spans: dict[ReferenceId, list[tuple[float, float]]] = {}
            for reference, start_s, end_s in db.execute("SELECT reference, start_s, end_s FROM exclusion ORDER BY id"):
                spans.setdefault(ReferenceId(reference), []).append((start_s, end_s))
            verdicts = {review.alert_id: review.decision for review in map(_review, db.execute(LATEST, (None,)))}
        return Rules(licences, spans, verdicts)

    # --- the file ----------------------------------------------------------------------------------------------------

    def _file(self) -> SqliteStore:
        path, former = self._data_dir / FILE, self._data_dir / FORMER_FILE
        if not path.exists() and former.exists():
            with (
                errors_as(RightsStoreFailed, f"{former} cannot be renamed to {path.name}"),
                lock_for_upgrade(self._data_dir, path.exists) as is_needed,
            ):
                if is_needed:
                    _rename(former, path)
        return self._store

    def _delete(self, sql: str, values: tuple[Any, ...]) -> bool:
        with self._writing() as db:
            db.execute(sql, values)
            return bool(db.changes())

    @contextmanager
    def _writing(self, *, is_change: bool = True, erases: bool = False) -> Iterator[apsw.Connection]:
        """One transaction; unless it is no change of the rights, it raises the revision and signals."""
        with self._file().writing(erases=erases) as db:
            yield db
            if is_change:
                db.execute("UPDATE change SET n = n + 1")
        if is_change:
            self.changed.notify()


def _rename(former: Path, path: Path) -> None:
    """Renames a SQLite file whole: a crash at any point leaves either the former file or the new one, complete.

    Its write-ahead log is merged and deleted first. The rename happens under SQLite's exclusive lock, so that no
    process of an older version is within a transaction.
    """
    with closing(connect(former, "write")) as db:
        db.pragma("journal_mode", "delete")
        db.execute("BEGIN EXCLUSIVE")
        if db.pragma("journal_mode") != "delete":
            raise apsw.BusyError("another process uses it")
        former.rename(path)
        sync_directory(path.parent)
        db.execute("ROLLBACK")


def _licence(row: Sequence[Any]) -> Licence:
    n, reference, owner, tag, channel, from_, until, note, added_at = row
    return Licence(
        f"L{n}", reference, owner, tag, channel, _time_or_none(from_), _time_or_none(until), note, _time(added_at)
    )


def _exclusion(row: Sequence[Any]) -> Exclusion:
    id, reference, start_s, end_s, note, added_at = row
    return Exclusion(id, reference, start_s, end_s, note, _time(added_at))


def _review(row: Sequence[Any]) -> Review:
    n, alert_id, decision, by, at, note = row
    return Review(n, alert_id, decision, by, _time(at), note)


def _check_room(db: apsw.Connection, count: str, name: str) -> None:
    ((n_rows,),) = db.execute(count)
    if n_rows >= MAX_ROWS:
        raise InvalidRights(f"The limit of {MAX_ROWS} {name} is reached; remove some first.")


def _check_text(name: str, text: str | None) -> None:
    if text is not None and (len(text) > MAX_TEXT or not is_printable(text)):
        raise InvalidRights(f"The {name} {text[:40]!a} is invalid: at most {MAX_TEXT} printable characters.")


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _to_text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _time_or_none(text: str | None) -> datetime | None:
    return None if text is None else _time(text)
