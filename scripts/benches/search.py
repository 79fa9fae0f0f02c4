"""Search in libraries of growing size: recall, the cost of a search, and the cost of storage.

One library per size is created in --folder (1.1 kB of disk per second), from references of an hour whose seconds form
shots, and the shots kinds of scene (`SyntheticFilms`). The videos of the given folder are registered among them; twelve
edited seconds of each are the planted copies that are searched for. Exact search is the baseline for recall: a second
is found if its video is among its hits, within three seconds; a copy is found if the votes of its seconds name it. CPU
time is that of the searching thread, alternating between our search and the bare FAISS call on the same index, after
one warm-up round; the bare call requests as many seconds as our search re-ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import faiss
import numpy as np
from numpy.typing import NDArray

from monitor.matching.candidates import OFFSET_BIN_S, Voter
from monitor.matching.matcher import MatchParameters
from reference_db.errors import UnknownReference
from reference_db.features.encoder import load_encoder
from reference_db.features.picture_detail import is_informative
from reference_db.media.decoding import decode_file
from reference_db.search.index import Hits, IndexKeeper, ReferenceIndex
from reference_db.search.index_shards import SHORTLIST, CodedShard, FlatShard, rotate, single_threaded
from reference_db.store.catalog import Catalog, Reference, ReferenceFeatures, ReferenceId
from training.edits import draw_edit

Figures: TypeAlias = dict[str, Any]
T = TypeVar("T")

HOUR = 3600
N_KINDS = 2000
KIND, SHOT, MOMENT = 0.5, 0.85, 0.45  # weights of the kind of scene, the shot and the moment in a row
VIDEO_S, COPY_S, COPY_FROM_S = 40, 12, 10  # of each video: length registered, length copied, start of the copy
NEAR_S = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", type=Path, help="folder of the videos to plant")
    parser.add_argument("--folder", type=Path, required=True, help="where the libraries are stored")
    parser.add_argument("--sizes", default="100000,1000000,10000000", help="seconds in each library")
    parser.add_argument(
        "--strength", type=float, default=0.5, help="of the edits, from 0 (nearly none) to 1 (strongest)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="searches of every copy")


def run(args: argparse.Namespace) -> Figures:
    """One entry per size."""
    planted = Planted.of(args.videos, args.folder, args.strength)
    out: Figures = {"strength": args.strength, "planted_copies": len(planted.copies), "sizes": []}
    for size in sorted(int(size) for size in args.sizes.split(",")):
        folder = args.folder / f"{size}.{planted.encoder_id[:24]}"
        say(f"{size} seconds: the library")
        make_library(folder, size, planted)
        in_a_process(prepare, folder, planted)
        figures = in_a_process(measure, folder, planted, args.rounds)  # so memory is that of the library alone
        out["sizes"].append({"seconds": size, **figures})
        say(json.dumps(out["sizes"][-1]))
    return out


def lines(figures: Figures) -> list[str]:
    """The figures as a table, one column per size, and the growth from size to size."""
    sizes = figures["sizes"]
    rows = [
        ("index", "kind", "{}"),
        ("recall of exact search, seconds", "seconds_found_exact", "{:.3f}"),
        ("recall of ours, seconds", "seconds_found", "{:.3f}"),
        ("  ours / exact", "seconds_ratio", "{:.3f}"),
        ("recall of exact search, copies", "copies_found_exact", "{:.3f}"),
        ("recall of ours, copies", "copies_found", "{:.3f}"),
        ("  ours / exact", "copies_ratio", "{:.3f}"),
        ("search, ms of CPU", "search_cpu_ms", "{:.2f}"),
        ("bare FAISS call, ms of CPU", "bare_cpu_ms", "{:.2f}"),
        ("  ours / bare", "search_ratio", "{:.2f}"),
        ("search, wall ms, median", "search_ms", "{:.2f}"),
        ("resident bytes per second", "resident_bytes", "{:.0f}"),
        ("index on disk, bytes per second", "index_bytes", "{:.0f}"),
        ("features on disk, bytes per second", "features_bytes", "{:.0f}"),
        ("open, s", "open_s", "{:.1f}"),
        ("open, s of CPU", "open_cpu_s", "{:.1f}"),
        ("build the index, s of CPU", "made_cpu_s", "{:.0f}"),
        ("add an hour: s until it is found", "add_s", "{:.2f}"),
        ("  of CPU", "add_cpu_s", "{:.2f}"),
        ("  large shard rebuilt", "rebuilt", "{}"),
        ("  longest search in between, ms", "longest_ms", "{:.0f}"),
        ("remove an hour: s until it is gone", "remove_s", "{:.2f}"),
    ]
    out = [f"{'seconds in the library':42}" + "".join(f"{entry['seconds']:>14,}" for entry in sizes)]
    for words, name, form in rows:
        cells = ("-" if entry.get(name) is None else form.format(entry[name]) for entry in sizes)
        out.append(f"{words:42}" + "".join(f"{text:>14}" for text in cells))
    for small, large in pairwise(sizes):
        growth = large["search_cpu_ms"] / small["search_cpu_ms"]
        out.append(
            f"from {small['seconds']:,} to {large['seconds']:,} seconds a search costs {growth:.2f} times as much"
        )
    return [*out, f"{figures['planted_copies']} copies of {COPY_S} s, edits of strength {figures['strength']}"]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- planted copies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Planted:
    """Real videos as references, and an edited part of each."""

    encoder_id: str
    films: dict[str, ReferenceFeatures]
    copies: list[tuple[str, NDArray[np.int64], NDArray[np.float32]]]  # film, its seconds, live rows

    @classmethod
    def of(cls, videos: Path, folder: Path, strength: float) -> Planted:
        encoder = load_encoder()
        paths = sorted(path for path in videos.iterdir() if path.suffix in (".mp4", ".mkv", ".webm", ".mov", ".ts"))
        key = f"{encoder.encoder_id}\n{strength}\n" + "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
        cache = folder / f"planted.{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
        folder.mkdir(parents=True, exist_ok=True)
        if not cache.exists():
            arrays: dict[str, NDArray[Any]] = {}
            for number, path in enumerate(paths):
                say(f"encoding {path.name}")
                arrays |= _plant(path, number, encoder, strength)
            with cache.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        with np.load(cache, allow_pickle=False) as stored:
            names = sorted({name.rpartition("/")[0] for name in stored})
            films = {n: ReferenceFeatures(stored[f"{n}/rows"], stored[f"{n}/informative"]) for n in names}
            copies = [(n, stored[f"{n}/seconds"], stored[f"{n}/copy"]) for n in names if len(stored[f"{n}/seconds"])]
        return cls(encoder.encoder_id, films, copies)


def _plant(path: Path, number: int, encoder: Any, strength: float) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng([17, number])
    edit = draw_edit(rng, strength)
    rows, informative, seconds, copied = [], [], [], []
    for frame in decode_file(path):
        if frame.second >= VIDEO_S:
            break
        rows.append(encoder.encode([frame.picture])[0])
        informative.append(is_informative(frame.picture))
        if COPY_FROM_S <= frame.second < COPY_FROM_S + COPY_S and informative[-1]:
            seconds.append(frame.second)
            copied.append(encoder.encode([edit(frame.picture, rng)])[0])
    stem = "".join(c if c.isalnum() else "-" for c in path.stem)
    return {
        f"{stem}/rows": np.array(rows, np.float16).reshape(-1, 512),
        f"{stem}/informative": np.array(informative, np.bool_),
        f"{stem}/seconds": np.array(seconds, np.int64),
        f"{stem}/copy": np.array(copied, np.float32).reshape(-1, 512),
    }


# --- the libraries ----------------------------------------------------------------------------------------------------


class SyntheticFilms:
    """Features of films of an hour, made of shots of some kinds of scene; equal for equal numbers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._kinds = rng.standard_normal((N_KINDS, 512), np.float32)
        self._noise = rng.standard_normal(1 << 23, np.float32)  # moments are slices of it: fresh noise is slow

    def film(self, number: int) -> ReferenceFeatures:
        rng = np.random.default_rng([2, number])
        mine = rng.integers(0, N_KINDS, 12)  # the recurring scenes of the film
        lengths = rng.integers(3, 13, HOUR // 3)
        shot_of = np.repeat(np.arange(len(lengths)), lengths)[:HOUR]
        shots = KIND * self._kinds[mine[rng.integers(0, 12, len(lengths))]]
        shots += SHOT * rng.standard_normal(shots.shape, np.float32)
        at = int(rng.integers(0, len(self._noise) - HOUR * 512))
        rows = shots[shot_of] + MOMENT * self._noise[at : at + HOUR * 512].reshape(HOUR, 512)
        rows /= np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
        return ReferenceFeatures(rows.astype(np.float16), np.ones(HOUR, np.bool_))


def reference(name: str, features: ReferenceFeatures, encoder_id: str) -> Reference:
    n_uninformative = int((~features.informative).sum())
    content = hashlib.sha256(name.encode()).hexdigest()
    when = datetime(2026, 1, 1, tzinfo=UTC)
    return Reference(
        ReferenceId(name), name, "", {}, content, len(features.rows), n_uninformative, encoder_id, "", when
    )


def make_library(folder: Path, size: int, planted: Planted) -> None:
    """Fills the library up to about this many seconds; existing references stay."""
    n_films = (size - sum(len(features.rows) for features in planted.films.values())) // HOUR
    with Catalog.open(folder, write=True) as catalog:
        present = {known.id for known in catalog.references()}
        if len(present) >= n_films + len(planted.films):
            return
        for name, features in planted.films.items():
            if name not in present:
                catalog.add(reference(name, features, planted.encoder_id), features)
        films = SyntheticFilms()
        for number in range(n_films):
            name = f"film-{number:05}"
            if name not in present:
                features = films.film(number)
                catalog.add(reference(name, features, planted.encoder_id), features)
            if number % 100 == 99:
                say(f"  {number + 1} of {n_films} hours")


# --- measurement ------------------------------------------------------------------------------------------------------


def in_a_process(work: Callable[..., T], *args: object) -> T:
    """The result of `work`, run in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def prepare(folder: Path, planted: Planted) -> None:
    """Builds the index and the exact hits, unless they exist."""
    built = folder / "made.json"
    if not built.exists():
        say("  building the index")
        cpu = time.process_time()
        IndexKeeper(folder, planted.encoder_id).refresh()
        built.write_text(json.dumps({"made_cpu_s": time.process_time() - cpu}))
    exact_hits(folder, planted)


def measure(folder: Path, planted: Planted, rounds: int) -> Figures:
    """All figures of one prepared library."""
    single_threaded()
    figures: Figures = {}
    exact = exact_hits(folder, planted)
    before, clock, cpu = anonymous_bytes(), time.perf_counter(), time.process_time()
    keeper = IndexKeeper(folder, planted.encoder_id)
    index = keeper.refresh()
    figures |= {"open_s": time.perf_counter() - clock, "open_cpu_s": time.process_time() - cpu}
    figures |= json.loads((folder / "made.json").read_text())
    coded = isinstance(index.shards[0], CodedShard)
    n_seconds = sum(one.n_seconds for one in index.references)
    figures["kind"] = f"{index.shards[0].book.n_lists} lists" if isinstance(index.shards[0], CodedShard) else "exact"
    if not coded:
        figures["made_cpu_s"] = None
    figures |= costs(index, planted, rounds)
    figures["resident_bytes"] = (anonymous_bytes() - before) / n_seconds
    figures["index_bytes"] = _size(folder / "index") / n_seconds if coded else None
    figures["features_bytes"] = _size(folder / "features") / n_seconds
    figures |= recall(index, planted, exact)
    figures |= changes(folder, keeper, planted)
    return figures


def costs(index: ReferenceIndex, planted: Planted, rounds: int) -> Figures:
    """A search of ours and the bare call, by turns, each first every other time."""
    rows = np.concatenate([copy for _, _, copy in planted.copies])
    shard, hits = index.shards[0], MatchParameters().hits
    clocks: list[float] = []
    cpu_s = {"ours": 0.0, "bare": 0.0}

    def ours(row: NDArray[np.float32]) -> None:
        clock = time.perf_counter()
        index.search(row[None], hits)
        clocks.append(time.perf_counter() - clock)

    def bare(row: NDArray[np.float32]) -> None:
        if isinstance(shard, CodedShard):
            shard.index.search(row[None], SHORTLIST, params=shard.book.search_parameters)
        elif isinstance(shard, FlatShard):
            shard._flat.search(row[None], hits)

    plain = rotate(rows) if isinstance(shard, CodedShard) else rows
    n_first = len(rows)  # each once before it counts: a monitor that has run for a while has read these rows before
    for n in range(rounds * len(rows) + n_first):
        row, as_bare = rows[n % len(rows)], plain[n % len(rows)]
        turns = [("ours", ours, row), ("bare", bare, as_bare)]
        for name, search, given in turns if n % 2 else turns[::-1]:  # the second finds its lists in the cache
            cpu = time.thread_time()
            search(given)
            cpu_s[name] += (time.thread_time() - cpu) if n >= n_first else 0.0
    n = rounds * len(rows)
    return {
        "search_cpu_ms": 1000 * cpu_s["ours"] / n,
        "bare_cpu_ms": 1000 * cpu_s["bare"] / n,
        "search_ratio": cpu_s["ours"] / cpu_s["bare"],
        "search_ms": 1000 * float(np.median(clocks)),
    }


def exact_hits(folder: Path, planted: Planted) -> Hits:
    """The exact hits for every row of every copy; cached beside the library."""
    rows = np.concatenate([copy for _, _, copy in planted.copies])
    with Catalog.open(folder) as catalog:
        references = catalog.references()
        key = hashlib.sha256(rows.tobytes() + repr([r.features_sha256 for r in references]).encode()).hexdigest()
        cache = folder / f"exact.{key[:16]}.npz"
        if not cache.exists():
            say("  exact search")
            faiss.cvar.distance_compute_blas_threshold = 1  # affects speed only
            best = faiss.ResultHeap(len(rows), MatchParameters().hits, keep_max=True)
            for place, one in enumerate(references):
                features = catalog.features(one.id)
                seconds = np.flatnonzero(features.informative)
                similarity = rows @ features.rows[seconds].astype(np.float32).T
                k = min(MatchParameters().hits, len(seconds))
                top = np.argpartition(-similarity, k - 1, axis=1)[:, :k]
                best.add_result(np.take_along_axis(similarity, top, 1), (place << 32) | seconds[top])
            best.finalize()
            single_threaded()
            with cache.open("wb") as file:
                np.savez(file, similarity=best.D, number=best.I)
    with np.load(cache) as stored:
        number = stored["number"]
        return Hits((number >> 32).astype(np.int32), (number & 0xFFFFFFFF).astype(np.int32), stored["similarity"])


def recall(index: ReferenceIndex, planted: Planted, exact: Hits) -> Figures:
    """Shares of planted seconds and copies that exact search and our search find."""
    rows = np.concatenate([copy for _, _, copy in planted.copies])
    figures: Figures = {}
    for name, hits in (("_exact", exact), ("", index.search(rows, MatchParameters().hits))):
        seconds_found, copies_found, at = [], [], 0
        for film, seconds, copy in planted.copies:
            place = index.place(ReferenceId(film))
            rows_of_copy = slice(at, at + len(copy))
            one = Hits(hits.reference[rows_of_copy], hits.second[rows_of_copy], hits.similarity[rows_of_copy])
            near = (one.reference == place) & (np.abs(one.second - seconds[:, None]) <= NEAR_S)
            seconds_found += near.any(axis=1).tolist()
            copies_found.append(_is_voted_for(film, seconds, one, index))
            at += len(copy)
        figures |= {f"seconds_found{name}": np.mean(seconds_found), f"copies_found{name}": np.mean(copies_found)}
    figures["seconds_ratio"] = figures["seconds_found"] / figures["seconds_found_exact"]
    figures["copies_ratio"] = figures["copies_found"] / figures["copies_found_exact"]
    return {name: float(value) for name, value in figures.items()}


def _is_voted_for(film: str, seconds: NDArray[np.int64], hits: Hits, index: ReferenceIndex) -> bool:
    """Whether the votes of its seconds make the copy a candidate at any time, as in the matcher."""
    voter = Voter(MatchParameters().min_similarity, MatchParameters().min_votes)
    for n, second in enumerate(seconds.tolist()):
        one = Hits(hits.reference[n : n + 1], hits.second[n : n + 1], hits.similarity[n : n + 1])
        for candidate in voter.push(second, one, index):
            if candidate.reference == film and abs(candidate.ref_s - second) <= OFFSET_BIN_S:
                return True
    return False


def changes(folder: Path, keeper: IndexKeeper, planted: Planted) -> Figures:
    """Adds and removes an hour while another thread keeps searching."""
    new = ReferenceId("an-hour-more")
    features = SyntheticFilms().film(999_999)
    with Catalog.open(folder, write=True) as catalog, suppress(UnknownReference):
        catalog.remove(new)  # left over from an aborted run
    current = [keeper.refresh()]
    main, waits, is_over = current[0].shards[0], [0.0], threading.Event()
    rows = np.concatenate([copy for _, _, copy in planted.copies])

    def search() -> None:
        while not is_over.is_set():
            for row in rows:
                clock = time.perf_counter()
                current[0].search(row[None], MatchParameters().hits)
                waits.append(time.perf_counter() - clock)
                time.sleep(0.005)

    with Catalog.open(folder, write=True) as catalog:
        catalog.add(reference(new, features, planted.encoder_id), features)
        searching = threading.Thread(target=search)
        searching.start()
        clock, cpu = time.perf_counter(), time.thread_time()
        current[0] = keeper.refresh()
        figures: Figures = {"add_s": time.perf_counter() - clock, "add_cpu_s": time.thread_time() - cpu}
        figures["rebuilt"] = "no" if current[0].shards[0] is main else "yes"
        row = features.rows[1800].astype(np.float32)
        hits = current[0].search(row[None], 1)
        if current[0].references[hits.reference[0, 0]].id != new or hits.second[0, 0] != 1800:
            raise SystemExit("bench: the added hour is not found")
        catalog.remove(new)
        clock = time.perf_counter()
        current[0] = keeper.refresh()
        figures["remove_s"] = time.perf_counter() - clock
        if current[0].place(new) is not None:
            raise SystemExit("bench: the removed hour is still found")
    is_over.set()
    searching.join()
    figures["longest_ms"] = 1000 * max(waits)
    return figures


def anonymous_bytes() -> int:
    """Memory of this process that is not backed by a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("bench: /proc/self/status has no RssAnon")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
