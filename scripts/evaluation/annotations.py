"""The label files of VCDB and FIVR-200k-PVCD: pairs of videos, and the sections that they share.

VCDB comes as TransVCL's two files: a CSV of pairs (query_id,reference_id) and a JSON object that gives for
"<query>-<reference>" a list of [query start, reference start, query end, reference end] in seconds. FIVR-200k-PVCD is
one text file of query;candidate;query start;query end;candidate start;candidate end, where the query's times are
full seconds, so that a start equal to its end is that one second. Labels without length on a side cannot be scored:
they are counted and skipped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.scoring import TrueCopy

Span = tuple[float, float]

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".flv", ".avi", ".mov", ".ts")


class AnnotationError(ValueError):
    """An invalid label file; the message has the file, the line and what was expected."""


@dataclass(frozen=True, slots=True)
class LabelledPair:
    """The ids of two videos and every section that they share."""

    query: str
    reference: str
    shared: tuple[tuple[Span, Span], ...]  # (in the query, in the reference)

    @property
    def name(self) -> str:
        return f"{self.query}-{self.reference}"

    def truth(self) -> list[TrueCopy]:
        """The shared sections as true copies; the channel is the pair, so that pairs are scored separately."""
        return [TrueCopy(self.name, self.reference, *live, *ref) for live, ref in self.shared]


@dataclass(frozen=True, slots=True)
class Annotations:
    """The content of a label file."""

    pairs: tuple[LabelledPair, ...]
    n_without_length: int  # labels skipped

    @property
    def videos(self) -> tuple[str, ...]:
        """The ids of all videos, each once, sorted."""
        return tuple(sorted({video for pair in self.pairs for video in (pair.query, pair.reference)}))

    @property
    def n_labels(self) -> int:
        return sum(len(pair.shared) for pair in self.pairs)

    def among(self, videos: Iterable[str]) -> Annotations:
        """The pairs of which both videos are available."""
        available = set(videos)
        pairs = tuple(pair for pair in self.pairs if pair.query in available and pair.reference in available)
        return Annotations(pairs, self.n_without_length)


def read_vcdb(labels: Path) -> Annotations:
    """VCDB's labels: the JSON file, or a folder with it and the CSV of pairs; a pair without labels shares nothing."""
    label_file, pair_file = _vcdb_files(labels)
    try:
        shared = json.loads(label_file.read_text())
    except ValueError as error:
        raise AnnotationError(f"{label_file} is not JSON: {error}") from error
    if not isinstance(shared, dict):
        raise AnnotationError(f"{label_file}: expected one object of pairs, got a {type(shared).__name__}")
    names = list(shared) if pair_file is None else _vcdb_pairs(pair_file)
    pairs, n_without_length = [], 0
    for name in dict.fromkeys([*names, *shared]):
        query, dash, reference = name.partition("-")
        if not dash:
            raise AnnotationError(f"{label_file}: expected a pair <query>-<reference>, got {name!r}")
        spans = [_vcdb_spans(label_file, name, label) for label in shared.get(name, [])]
        valid = [both for both in spans if _have_length(both)]
        n_without_length += len(spans) - len(valid)
        pairs.append(LabelledPair(query, reference, tuple(valid)))
    return Annotations(tuple(pairs), n_without_length)


def read_fivr(labels: Path) -> Annotations:
    """FIVR-200k-PVCD's labels: the text file, or a folder with it."""
    path = labels
    if labels.is_dir():
        path = _only(labels, "*.txt")
    shared: dict[tuple[str, str], list[tuple[Span, Span]]] = {}
    n_without_length = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        query, reference, both = _fivr_label(line, f"{path}:{number}")
        pair = shared.setdefault((query, reference), [])
        if _have_length(both):
            pair.append(both)
        else:
            n_without_length += 1
    pairs = [LabelledPair(query, reference, tuple(both)) for (query, reference), both in shared.items()]
    return Annotations(tuple(pairs), n_without_length)


def find_videos(folder: Path, ids: Sequence[str]) -> dict[str, Path]:
    """The files named by these ids, anywhere below the folder; ids without a file are skipped."""
    wanted = set(ids)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in VIDEO_SUFFIXES and path.stem in wanted)
    return {path.stem: path for path in reversed(files)}  # the first of several


def _vcdb_files(labels: Path) -> tuple[Path, Path | None]:
    folder, label_file = (labels, None) if labels.is_dir() else (labels.parent, labels)
    pair_files = sorted(folder.glob("*.csv"))
    return label_file or _only(folder, "*.json"), pair_files[0] if len(pair_files) == 1 else None


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise AnnotationError(f"{folder}: expected one file {pattern}, found {len(found)}")
    return found[0]


def _vcdb_pairs(path: Path) -> list[str]:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    if not rows or rows[0] != ["query_id", "reference_id"]:
        raise AnnotationError(f"{path}:1: expected the header query_id,reference_id")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != 2:
            raise AnnotationError(f"{path}:{number}: expected two ids, got {len(row)}")
    return [f"{query}-{reference}" for query, reference in rows[1:]]


def _vcdb_spans(path: Path, name: str, label: object) -> tuple[Span, Span]:
    if not isinstance(label, list) or len(label) != 4 or not all(isinstance(value, int | float) for value in label):
        raise AnnotationError(f"{path}: {name}: expected four numbers, got {label!r}")
    query_start, reference_start, query_end, reference_end = (float(value) for value in label)
    return (query_start, query_end), (reference_start, reference_end)


def _fivr_label(line: str, where: str) -> tuple[str, str, tuple[Span, Span]]:
    fields = line.strip().split(";")
    try:
        query, reference = fields[:2]
        query_start, query_end, reference_start, reference_end = (float(field) for field in fields[2:])
    except ValueError as error:
        raise AnnotationError(f"{where}: expected two ids and four numbers between semicolons, got {line!r}") from error
    if query_start == query_end:
        query_end += 1  # full seconds: it begins and ends within this one
    return query, reference, ((query_start, query_end), (reference_start, reference_end))


def _have_length(both: tuple[Span, Span]) -> bool:
    return all(end > start for start, end in both)
