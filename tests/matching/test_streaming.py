"""The property that matters most: a stream gives the paths, scores and segments of its whole matrix aligned at once.

Any similarities, read in tiles of any size, over bands that open, move and close, with lost and uninformative seconds,
restarted any number of times. The oracle gets the plan (which rows of which columns were read, and when) and nothing
else: it reads the whole matrix of each band at once, aligns it by `oracles.align_planned`, and joins by loops over all
of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from monitor.ingest.feature_windows import LiveSecond
from monitor.matching import matcher as matcher_module
from monitor.matching import tiles as tiles_module
from monitor.matching.candidates import Candidate
from monitor.matching.matcher import Matcher, MatcherState, MatchParameters
from monitor.matching.paths import AlignmentPath, soft_weight
from monitor.matching.stitching import MAX_PATHS, MIN_MEMBERS, Scoring, SegmentView, _continues
from monitor.matching.tiles import HALO
from monitor.runtime.snapshots import pack, unpack
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import FEATURE_SIZE, Reference, ReferenceFeatures, ReferenceId
from tests.support import oracles
from tests.support.planted_channels import BEGAN, quick_maps, quick_tile

EXAMPLES = int(os.environ.get("COPYWATCH_TEST_EXAMPLES", "20"))  # `scripts/chaos.py matching` tries 20,000
MATCHING = MatchParameters(refines=False, scoring=Scoring(echo_similarity=2.0))
WIDTHS = {ReferenceId("a"): 60, ReferenceId("b"): 26}
FIRST_COLUMN = {ReferenceId("a"): 0, ReferenceId("b"): 60}
BLACK_COLUMN = 13  # of each reference: an uninformative second


def library() -> ReferenceIndex:
    """Reference seconds are orthogonal, so the numbers of a row are its similarities."""
    pairs = []
    for reference, width in WIDTHS.items():
        rows = np.zeros((width, FEATURE_SIZE), np.float16)
        rows[np.arange(width), FIRST_COLUMN[reference] + np.arange(width)] = 1
        informative = np.arange(width) != BLACK_COLUMN
        entry = Reference(reference, reference, "", {}, "0" * 64, width, 1, "planted", f"{reference:0>64}", BEGAN)
        pairs.append((entry, ReferenceFeatures(rows, informative)))
    return ReferenceIndex.from_features(pairs)


INDEX = library()


@dataclass(frozen=True)
class Shape:
    """Sizes of the implementation; they may change the plan, but not the result of a plan."""

    inner_columns: int
    tile_rows: int
    wide: int
    behind: int
    move: int
    back_fill_s: int
    idle_s: int
    max_bands: int

    def patches(self) -> tuple[object, object]:
        columns = self.inner_columns + 2 * HALO
        return (
            patch.multiple(
                tiles_module, INNER_COLUMNS=self.inner_columns, TILE_COLUMNS=columns, TILE_ROWS=self.tile_rows
            ),
            patch.multiple(
                matcher_module,
                WIDE=self.wide,
                BEHIND=self.behind,
                MOVE=self.move,
                BACK_FILL_S=self.back_fill_s,
                IDLE_S=self.idle_s,
                MAX_BANDS=self.max_bands,
            ),
        )


SHAPES = st.builds(
    Shape,
    inner_columns=st.sampled_from([5, 16, 256]),
    tile_rows=st.sampled_from([9, 10, 14]),
    wide=st.sampled_from([24, 40, 512]),
    behind=st.sampled_from([4, 10]),
    move=st.sampled_from([6, 10]),
    back_fill_s=st.sampled_from([6, 20]),
    idle_s=st.sampled_from([6, 20]),
    max_bands=st.sampled_from([1, 2, 12]),
)


@dataclass(frozen=True)
class Stream:
    """Similarities [second, column of either reference], and which seconds are lost or uninformative."""

    cells: NDArray[np.float32]
    lost: NDArray[np.bool_]
    black: NDArray[np.bool_]

    def row(self, second: int) -> NDArray[np.float32]:
        row = np.zeros(FEATURE_SIZE, np.float32)
        row[: self.cells.shape[1]] = self.cells[second]
        return row


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    n_seconds = draw(st.integers(8, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cells = rng.uniform(0, draw(st.sampled_from([0.1, 0.3, 0.6])), (n_seconds, sum(WIDTHS.values())))
    for _ in range(draw(st.integers(0, 6))):  # lines at any speed, in either reference, of any strength
        at, speed = draw(st.integers(0, n_seconds - 1)), draw(st.sampled_from([0.5, 1.0, 1.0, 1.3, 2.0]))
        column, length = draw(st.integers(0, cells.shape[1] - 1)), draw(st.integers(3, 40))
        strength = draw(st.sampled_from([0.4, 0.7, 1.0]))
        for n in range(min(length, n_seconds - at)):
            if int(column + n * speed) < cells.shape[1]:
                cells[at + n, int(column + n * speed)] = strength * rng.uniform(0.7, 1)
    share = draw(st.sampled_from([0.0, 0.05, 0.3]))
    lost, black = rng.uniform(size=n_seconds) < share, rng.uniform(size=n_seconds) < share
    burst = draw(st.integers(0, n_seconds - 1))
    lost[burst : burst + draw(st.sampled_from([0, 0, 4, 12]))] = True
    return Stream((np.round(cells * 64) / 64).astype(np.float32), lost, black)


@dataclass(eq=False)
class BandPlan:
    """The rows that were read of one band, and when it was opened and closed."""

    reference: ReferenceId
    opened_s: int
    rows: list[tuple[LiveSecond, range]] = field(default_factory=list)
    last_final_s: int | None = None


class RecordingMatcher(Matcher):
    """A matcher that records its plan."""

    def __init__(self) -> None:
        super().__init__(MATCHING)
        self.plan_of: dict[int, BandPlan] = {}
        self._bands: list[tiles_module.Band] = []

    def _open(self, candidate: Candidate, second: int, index: ReferenceIndex) -> None:
        super()._open(candidate, second, index)
        band = self._readings[-1].band
        self.plan_of[id(band)] = BandPlan(band.reference, second)
        self._bands.append(band)  # so that no other band gets its id
        self.plan_of[id(band)].rows = [
            (live, band.columns) for live in self.window.since(band.first_live_s) if live.second <= second
        ]

    def plan(self, live: LiveSecond, hits: object, index: ReferenceIndex) -> list[tiles_module.SimilarityTile]:
        before = {id(reading.band): reading.band.columns for reading in self._readings}
        tiles = super().plan(live, hits, index)  # type: ignore[arg-type]
        for band, columns in before.items():
            self.plan_of[band].rows.append((live, columns))
        return tiles

    def _retire(self, reading: matcher_module._Reading, last_final_s: int) -> None:
        self.plan_of[id(reading.band)].last_final_s = last_final_s
        super()._retire(reading, last_final_s)


def run(stream: Stream, matcher: Matcher, restarts: set[int]) -> list[SegmentView]:
    """The closed segments of the stream, with a restart before each of these seconds."""
    closed = []
    for second in range(len(stream.cells)):
        if second in restarts:
            content = pack(matcher.state(), {}, {})
            matcher = Matcher(MATCHING)
            matcher.restore(unpack(MatcherState, content, {})[0], INDEX)
        if stream.lost[second]:
            continue
        for live in matcher.window.push(second, stream.row(second), not stream.black[second]):
            hits = INDEX.search(live.row[None], MATCHING.hits) if live.counts and live.row is not None else None
            maps = [quick_tile(tile.cells) for tile in matcher.plan(live, hits, INDEX)]
            closed += [view for view in matcher.apply(maps) if not view.is_open]
    return closed + matcher.finish()


# --- the oracle ------------------------------------------------------------------------------------------------------


def walks_of(reading: BandPlan) -> list[oracles.Walk]:
    """Every path of a band, in stream and reference seconds, from its whole matrix."""
    height, width = len(reading.rows), WIDTHS[reading.reference]
    similarity, planned = np.zeros((height, width), np.float32), np.zeros((height, width), np.bool_)
    counts = np.zeros((height, width), np.bool_)
    for i, (live, columns) in enumerate(reading.rows):
        for j in range(width):
            planned[i, j] = j in columns
            counts[i, j] = live.counts and j != BLACK_COLUMN
            if planned[i, j] and counts[i, j]:
                assert live.row is not None
                similarity[i, j] = live.row[FIRST_COLUMN[reading.reference] + j]
    mask, step = quick_maps(similarity)
    top = reading.rows[0][0].second
    walks = oracles.align_planned(similarity, mask, step, counts, planned, MATCHING.tau, MATCHING.sigma)
    walked = []
    for walk in walks:
        if reading.last_final_s is not None and walk.start[0] + top >= reading.last_final_s:
            continue  # its start was never decided: the band was closed before
        members = [(i + top, j) for i, j in walk.members]
        end_row = None if walk.end_row is None else walk.end_row + top
        walked.append(oracles.Walk((walk.start[0] + top, walk.start[1]), members, walk.weights, end_row))
    return walked


def path_of(walk: oracles.Walk, until_s: int, novelty: dict[int, float]) -> AlignmentPath | None:
    """The walk as far as row `until_s`."""
    n = sum(i <= until_s for i, _ in walk.members)
    if n == 0 or walk.start[0] + 1 > until_s:
        return None
    members, sum_weight, sum_novelty, seconds = walk.members[:n], 0.0, 0.0, list[int]()
    si = sj = sii = sij = 0.0
    for (i, j), weight in zip(members, walk.weights, strict=False):
        di, dj = i - walk.start[0], j - walk.start[1]
        si, sj, sii, sij = si + di, sj + dj, sii + di * di, sij + di * dj
        sum_weight += weight
        if i not in seconds:
            seconds.append(i)
            sum_novelty += novelty[i]
    sums = (len(seconds), sum_weight, sum_novelty, (si, sj, sii, sij))
    return AlignmentPath(walk.start, members[0], members[-1], n, *sums)


@dataclass
class Joined:
    reference: ReferenceId
    start: tuple[int, int]
    paths: dict[tuple[int, int], tuple[AlignmentPath, bool]]


def expected(plan: list[BandPlan], lives: dict[int, LiveSecond], last_s: int) -> list[tuple[object, ...]]:
    """Reference, name, spans, score and matched seconds of every segment, joined second after second."""
    novelty = {second: live.novelty for second, live in lives.items()}
    walks = [(reading, walk) for reading in plan for walk in walks_of(reading)]
    ended: set[int] = set()
    is_open, closed = list[Joined](), list[Joined]()
    for second in [*sorted(lives), last_s + HALO]:  # at the end of the stream every row is final
        final_s = second - HALO
        states = []
        for n, (reading, walk) in enumerate(walks):
            path = path_of(walk, final_s if second <= last_s else last_s + HALO, novelty)
            over = (walk.end_row is not None and walk.end_row <= final_s) or second > last_s
            if path is None or n in ended or reading.opened_s > second:
                continue
            if over:
                ended.add(n)
            states.append((reading.reference, path, not over))
        for reference, path, still in sorted(states, key=lambda state: (state[1].start, state[0])):
            place(is_open, reference, path, still)
        for segment in list(is_open):
            last = max(path.last[0] for path, _ in segment.paths.values())
            if not any(still for _, still in segment.paths.values()) and final_s - last > MATCHING.scoring.join_s:
                is_open.remove(segment)
                closed.append(segment)
    return sorted(map(view_of, closed + is_open), key=str)


def place(segments: list[Joined], reference: ReferenceId, path: AlignmentPath, still: bool) -> None:
    mine = [segment for segment in segments if segment.reference == reference]
    found = next((segment for segment in mine if path.start in segment.paths), None)
    found = found or next(
        (s for s in mine if any(_continues(path, old, MATCHING.scoring.join_s) for old, _ in s.paths.values())), None
    )
    if found is None:
        segments.append(Joined(reference, path.start, {path.start: (path, still)}))
        return
    found.paths[path.start] = (path, still)
    if not still and path.n_members < MIN_MEMBERS and len(found.paths) > 1:
        del found.paths[path.start]
    if len(found.paths) > MAX_PATHS:
        reject()  # the oracle does not fold paths


def view_of(segment: Joined) -> tuple[object, ...]:
    """The strongest of its paths that do not overlap, their common span and score."""
    chosen: list[AlignmentPath] = []
    for path in sorted((path for path, _ in segment.paths.values()), key=lambda p: (-p.sum_weight, p.start)):
        overlaps = any(path.first[0] <= old.last[0] and old.first[0] <= path.last[0] for old in chosen)
        if not overlaps and (not chosen or path.n_members >= MIN_MEMBERS):
            chosen.append(path)
    chosen.sort(key=lambda path: path.first)
    scoring, evidence_s = MATCHING.scoring, 0.0
    for path in chosen:
        fresh = scoring.novelty_floor + (1 - scoring.novelty_floor) * (path.sum_novelty / path.n_live)
        evidence_s += path.shorter_side * fresh
    score = (
        soft_weight(evidence_s, scoring.gamma) * sum(p.sum_weight for p in chosen) / sum(p.n_members for p in chosen)
    )
    return (
        segment.reference,
        segment.start,
        min(path.first for path in chosen)[0],
        max(path.last[0] for path in chosen) + 1,
        min(path.first[1] for path in chosen),
        max(path.last[1] for path in chosen) + 1,
        score,
        sum(path.n_live for path in chosen),
        [replace(path, points=()) for path in chosen],
    )


def values_of(view: SegmentView) -> tuple[object, ...]:
    paths = [replace(path, points=()) for path in view.paths]
    spans = (view.live_start_s, view.live_end_s, view.ref_start_s, view.ref_end_s)
    return (view.reference, view.start, *spans, view.score, view.n_live, paths)


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(stream=streams(), shape=SHAPES, data=st.data())
def test_a_stream_gives_the_segments_of_its_whole_matrix(stream: Stream, shape: Shape, data: st.DataObject) -> None:
    restarts = data.draw(st.sets(st.integers(1, len(stream.cells) - 1), max_size=4))
    tile_patch, matcher_patch = shape.patches()
    with tile_patch, matcher_patch:  # type: ignore[attr-defined]
        recording = RecordingMatcher()
        unbroken = run(stream, recording, set())
        restarted = run(stream, Matcher(MATCHING), restarts)
    lives = {live.second: live for live in recording.window}
    whole = expected(list(recording.plan_of.values()), lives, max(lives, default=0))
    assert sorted(map(values_of, unbroken), key=str) == whole
    assert sorted(map(values_of, restarted), key=str) == whole


def test_the_oracle_and_the_matcher_find_a_planted_line() -> None:
    cells = np.zeros((40, sum(WIDTHS.values())), np.float32)
    for n in range(20):
        cells[8 + n, 20 + n] = 0.9375
    stream = Stream(cells, np.zeros(40, np.bool_), np.zeros(40, np.bool_))
    recording = RecordingMatcher()
    (view,) = run(stream, recording, set())
    ((reference, _, first_s, end_s, *_),) = expected(
        list(recording.plan_of.values()), {live.second: live for live in recording.window}, 39
    )
    assert (reference, first_s, end_s) == ("a", 8, 28)
    assert (view.live_start_s, view.live_end_s, view.ref_start_s, view.ref_end_s) == (8, 28, 20, 40)
