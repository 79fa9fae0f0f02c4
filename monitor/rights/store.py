"""The desk on disk: licences, exclusions and reviews in `desk.sqlite`, written by any process at any time.

The command line and a running monitor share it. Each call opens the file for itself and each change is on disk when
it returns; a counter rises with every change, so that a monitor sees cheaply that there is one. What a reviewer said
is never overwritten: the newest review of an alert counts, and the older ones stay.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw

from monitor.config.settings import CHANNEL_NAME
from monitor.errors import InvalidRights, RightsNotFound, RightsStoreFailed
from monitor.ops.sqlite_store import SqliteStore
from monitor.rights.rules import ANY_CHANNEL, DECISIONS, Exclusion, Licence, Review, Rules
from reference_db.store.catalog import ReferenceId

FILE = "desk.sqlite"
MAX_WORDS = 1000  # characters of a note, a name or an owner
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
UNSHOWABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # what a terminal or a log could not show as it is
REVIEW = "SELECT n, alert_id, decision, by, at, note FROM review "
LATEST = """
SELECT n, alert_id, decision, by, at, note FROM review WHERE n IN (
    SELECT max(n) FROM review WHERE ?1 IS NULL OR alert_id IN (SELECT value FROM json_each(?1)) GROUP BY alert_id
)
"""


class RightsStore:
    """The desk of one data folder; safe in any thread and process.

    DeskRefused says what is wrong with what was asked, NotOnDesk that there is no such thing, DeskFailed that the disk
    did not do it; each leaves everything as it was.
    """

    def __init__(self, data_dir: Path) -> None:
        self._file = SqliteStore(data_dir / FILE, (SCHEMA,), RightsStoreFailed)

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
        """The licence, with its id. Times are aware; a reference need not be registered yet."""
        if reference is None and owner is None and tag is None:
            raise InvalidRights("A licence is for something: name a reference, an owner or a tag.")
        for what, words in (("reference", reference), ("owner", owner), ("tag", tag), ("note", note)):
            _check_words(what, words)
        if tag is not None and not TAG.fullmatch(tag):
            raise InvalidRights(f"A tag is key=value, got {tag[:40]!r}.")
        if not CHANNEL.fullmatch(channel):
            raise InvalidRights(f"A channel is a name or * for all, got {channel[:40]!r}.")
        for what, moment in (("from", from_), ("until", until)):
            if moment is not None and moment.tzinfo is None:
                raise InvalidRights(f"The time `{what}` has no zone: write it as 2026-11-16T20:00:00Z.")
        if from_ is not None and until is not None and until <= from_:
            raise InvalidRights("A licence ends after it begins: `until` must be later than `from`.")
        values = (reference, owner, tag, channel, _stored(from_), _stored(until), note, _stored(_now()))
        with self._writing() as db:
            db.execute(
                "INSERT INTO licence (reference, owner, tag, channel, from_, until, note, added_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            return _licence((db.last_insert_rowid(), *values))

    def licences(self) -> list[Licence]:
        """All of them, the oldest first."""
        return [_licence(row) for row in self._file.rows("SELECT * FROM licence ORDER BY n")]

    def licence(self, id: str) -> Licence:
        """Raises NotOnDesk."""
        for licence in self.licences():
            if licence.id == id:
                return licence
        raise RightsNotFound(f"There is no licence {id[:40]!r}; `copywatch licences list` shows those there are.")

    def remove_licence(self, id: str) -> None:
        """What was told as licensed stays so; what is told from now on is not."""
        number = LICENCE_ID.fullmatch(id)
        if number is None or not self._delete("DELETE FROM licence WHERE n = ?", (int(number[1]),)):
            self.licence(id)

    # --- exclusions --------------------------------------------------------------------------------------------------

    def exclude(self, reference: str, start_s: float, end_s: float, note: str = "") -> Exclusion:
        """Keeps the span start_s <= t < end_s of a reference from alerting."""
        _check_words("reference", reference)
        _check_words("note", note)
        if not (math.isfinite(start_s) and math.isfinite(end_s) and 0 <= start_s < end_s):
            raise InvalidRights(
                f"A span begins at 0 s or later and ends after it begins, got {start_s:g} to {end_s:g}."
            )
        values = (reference, float(start_s), float(end_s), note, _stored(_now()))
        with self._writing() as db:
            db.execute("INSERT INTO exclusion (reference, start_s, end_s, note, added_at) VALUES (?,?,?,?,?)", values)
            return _exclusion((db.last_insert_rowid(), *values))

    def exclusions(self, reference: str | None = None) -> list[Exclusion]:
        """All of them, or those of one reference, in order of reference and span."""
        rows = self._file.rows(
            "SELECT * FROM exclusion WHERE ?1 IS NULL OR reference = ?1 ORDER BY reference, start_s, id", (reference,)
        )
        return [_exclusion(row) for row in rows]

    def remove_exclusion(self, reference: str, id: int) -> None:
        """Lets the span alert again."""
        found = -(2**63) <= id < 2**63
        if not found or not self._delete("DELETE FROM exclusion WHERE reference = ? AND id = ?", (reference, id)):
            raise RightsNotFound(
                f"The reference {reference[:40]!r} has no exclusion {id}; `copywatch refs exclusions` shows them."
            )

    # --- reviews -----------------------------------------------------------------------------------------------------

    def review(self, alert_id: str, decision: str, by: str, note: str = "") -> Review:
        """Keeps what somebody said of an alert; a running monitor acts on it, else the next one does."""
        (kept,) = self.review_all([alert_id], decision, by, note)
        return kept

    def review_all(self, alert_ids: Sequence[str], decision: str, by: str, note: str = "") -> list[Review]:
        """The same of several alerts at once: all of it is kept, or nothing."""
        if decision not in DECISIONS:
            raise InvalidRights(f"A review is one of {', '.join(DECISIONS)}, got {decision[:40]!r}.")
        for alert_id in alert_ids:
            if not ALERT_ID.fullmatch(alert_id):
                raise InvalidRights(f"An alert's id is 24 hexadecimal digits, got {alert_id[:40]!r}.")
        _check_words("name", by)
        _check_words("note", note)
        if not by.strip():
            raise InvalidRights("A review has somebody's name: give it with --by.")
        kept = []
        with self._writing() as db:
            for alert_id in alert_ids:
                values = (alert_id, decision, by, _stored(_now()), note)
                db.execute("INSERT INTO review (alert_id, decision, by, at, note) VALUES (?, ?, ?, ?, ?)", values)
                kept.append(_review((db.last_insert_rowid(), *values)))
        return kept

    def reviews(self, alert_id: str | None = None, *, after: int = 0, limit: int = 10_000) -> list[Review]:
        """What was said, of one alert or of all, oldest first; `after` a review's `n` comes the next page."""
        rows = self._file.rows(
            REVIEW + "WHERE n > ?1 AND (?2 IS NULL OR alert_id = ?2) ORDER BY n LIMIT ?3", (after, alert_id, limit)
        )
        return [_review(row) for row in rows]

    def latest_reviews(self, alert_ids: Sequence[str] | None = None) -> dict[str, Review]:
        """The review that counts of each alert that has one; of these alerts only, where they are named."""
        wanted = None if alert_ids is None else json.dumps(list(alert_ids))
        rows = self._file.rows(LATEST, (wanted,))
        return {review.alert_id: review for review in map(_review, rows)}

    def newest_review(self) -> int:
        """The number of the newest review, 0 where there is none."""
        rows = self._file.rows("SELECT coalesce(max(n), 0) FROM review")
        return int(rows[0][0]) if rows else 0

    def unapplied_reviews(self) -> list[Review]:
        """Reviews that no monitor has acted on yet, oldest first."""
        return [_review(row) for row in self._file.rows(REVIEW + "WHERE settled = 0 ORDER BY n")]

    def mark_applied(self, numbers: Sequence[int]) -> None:
        """Notes that these reviews were acted on."""
        with self._writing(changes=False) as db:
            db.executemany("UPDATE review SET settled = 1 WHERE n = ?", [(n,) for n in numbers])

    # --- for a monitor -----------------------------------------------------------------------------------------------

    def revision(self) -> int:
        """A number that rises with every change; 0 while there is no desk."""
        rows = self._file.rows("SELECT n FROM change")
        return int(rows[0][0]) if rows else 0

    def rules(self) -> Rules:
        """All that is decided, as of one moment."""
        with self._file.reading() as db:
            if db is None:
                return Rules()
            licences = [_licence(row) for row in db.execute("SELECT * FROM licence ORDER BY n")]
            spans: dict[ReferenceId, list[tuple[float, float]]] = {}
            for reference, start_s, end_s in db.execute("SELECT reference, start_s, end_s FROM exclusion ORDER BY id"):
                spans.setdefault(ReferenceId(reference), []).append((start_s, end_s))
            verdicts = {review.alert_id: review.decision for review in map(_review, db.execute(LATEST, (None,)))}
        return Rules(licences, spans, verdicts)

    # --- the file ----------------------------------------------------------------------------------------------------

    def _delete(self, sql: str, values: tuple[Any, ...]) -> bool:
        with self._writing() as db:
            db.execute(sql, values)
            return bool(db.changes())

    @contextmanager
    def _writing(self, *, changes: bool = True) -> Iterator[apsw.Connection]:
        """One transaction, after which monitors see that there is a change."""
        with self._file.writing() as db:
            yield db
            if changes:
                db.execute("UPDATE change SET n = n + 1")


def _licence(row: Sequence[Any]) -> Licence:
    n, reference, owner, tag, channel, from_, until, note, added_at = row
    return Licence(f"L{n}", reference, owner, tag, channel, _read(from_), _read(until), note, _moment(added_at))


def _exclusion(row: Sequence[Any]) -> Exclusion:
    id, reference, start_s, end_s, note, added_at = row
    return Exclusion(id, reference, start_s, end_s, note, _moment(added_at))


def _review(row: Sequence[Any]) -> Review:
    n, alert_id, decision, by, at, note = row
    return Review(n, alert_id, decision, by, _moment(at), note)


def _check_words(what: str, words: str | None) -> None:
    if words is not None and (len(words) > MAX_WORDS or UNSHOWABLE.search(words)):
        raise InvalidRights(f"The {what} {words[:40]!a} cannot be kept: up to {MAX_WORDS} printable characters can.")


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _stored(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _read(text: str | None) -> datetime | None:
    return None if text is None else _moment(text)
