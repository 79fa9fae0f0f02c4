"""The hash chain of the audit log: how an entry is hashed, and how a chain is verified.

An entry is canonical JSON. Its hash covers the hash of the entry before it, so a changed, removed or moved entry breaks
the chain. Personal data (names and addresses) are stored beside the entry, which contains only their salted hash: they
can be erased later and the chain stays valid. Two kinds of entries explain what is missing: `audit retention` holds the
number and the hash of the last entry that was deleted for its age, `purge person` the numbers of the entries whose
personal data were erased. Nothing here reads a clock or a disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_HASH = "0" * 64  # in place of the hash before entry 1
RETENTION, ERASURE = "audit retention", "purge person"
MAX_FAULTS = 50  # that are listed


@dataclass(frozen=True, slots=True)
class Record:
    """One entry as stored."""

    n: int
    body: str  # canonical JSON; what is hashed
    person: str | None  # canonical JSON with a salt; None if there is none, or if it was erased
    hash: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a reader, personal data included."""
        values = json.loads(self.body)
        committed = values.pop("person")
        person = {"who": "copywatch"} if committed is None else json.loads(self.person or "{}")
        names = {name: person.get(name) for name in ("who", "address", "about")}
        return {**values, **names, "erased": committed is not None and self.person is None, "hash": self.hash}

    def as_line(self) -> str:
        """A line of the export, from which the chain can be verified elsewhere."""
        person = None if self.person is None else json.loads(self.person)
        return canonical({"entry": json.loads(self.body), "person": person, "hash": self.hash})


def record_of(line: str) -> Record:
    """The record of a line that `as_line` wrote. Raises ValueError."""
    values = json.loads(line)
    try:
        person = None if values["person"] is None else canonical(values["person"])
        return Record(int(values["entry"]["n"]), canonical(values["entry"]), person, str(values["hash"]))
    except (KeyError, TypeError) as error:
        raise ValueError("not a line of an exported audit log") from error


def canonical(value: Mapping[str, Any]) -> str:
    """JSON in which equal values are equal texts; numbers are whole."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def chain_hash(previous: str, body: str) -> str:
    """The hash of an entry that follows the one with the hash `previous`."""
    return sha256(f"{previous}\n{body}")


def ranges_of(numbers: Iterable[int]) -> str:
    """Rising numbers as text: `1-3,7`."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def numbers_of(ranges: str) -> Iterable[int]:
    """The numbers of `ranges_of`."""
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@dataclass(slots=True)
class ChainCheck:
    """The result of verifying a chain."""

    n_entries: int = 0
    first: int | None = None
    last: int | None = None
    last_hash: str = FIRST_HASH
    n_erased: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "whole": self.is_whole,
            "entries": self.n_entries,
            "first": self.first,
            "last": self.last,
            "last_hash": self.last_hash,
            "erased": self.n_erased,
            "faults": self.faults[:MAX_FAULTS],
        }


def verify_chain(records: Iterable[Record], *, is_part: bool = False) -> ChainCheck:
    """Checks the records in their order. A part of a log may begin at any entry, a log only where retention cut it."""
    found = ChainCheck()
    first: Record | None = None
    cut: Mapping[str, Any] = {}  # what the newest retention entry says
    missing: set[int] = set()  # entries without the personal data that they commit to
    erased: set[int] = set()  # entries whose personal data were erased on request
    for record in records:
        try:
            values = json.loads(record.body)
            is_placed = values["n"] == record.n
        except (ValueError, KeyError, TypeError):
            values, is_placed = {}, False
        if not is_placed:
            found.faults.append(f"entry {record.n} is not the one that was written there")
        elif found.last is None:
            first = record
        elif record.n <= found.last:
            found.faults.append(f"entry {record.n} follows entry {found.last}")
        elif record.n > found.last + 1:
            found.faults.append(f"entries {found.last + 1} to {record.n - 1} are missing")
        elif record.hash != chain_hash(found.last_hash, record.body):
            found.faults.append(f"entry {record.n} was changed, or the one before it")
        if values.get("action") == RETENTION:
            cut = values.get("details", {})
        elif values.get("action") == ERASURE:
            erased.update(numbers_of(str(values.get("details", {}).get("erased", ""))))
        commitment = values.get("person")
        if record.person is not None and sha256(record.person) != commitment:
            found.faults.append(f"the personal data of entry {record.n} were changed")
        elif record.person is None and commitment is not None:
            missing.add(record.n)
        found.n_entries += 1
        found.first = record.n if found.first is None else found.first
        found.last, found.last_hash = record.n, record.hash
    found.n_erased = len(missing)
    if missing - erased:
        found.faults.append(f"the personal data of entries {ranges_of(sorted(missing - erased))} are missing")
    if first is not None and not (is_part and first.n > 1):
        found.faults += _start_faults(first, cut)
    return found


def _start_faults(first: Record, cut: Mapping[str, Any]) -> list[str]:
    """What is wrong with the first entry: it is entry 1, or the one after the last that retention deleted."""
    if first.n == 1 and not cut:
        previous = FIRST_HASH
    elif cut.get("removed_to") == first.n - 1:
        previous = str(cut.get("hash"))
    else:
        return [f"the entries before entry {first.n} are missing, and no retention entry says why"]
    return [] if first.hash == chain_hash(previous, first.body) else [f"entry {first.n} was changed"]
