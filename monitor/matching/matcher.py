"""One channel's matching: seconds and their index hits in, tiles for the network out, then segment views out.

The caller runs the network between `plan` and `apply`, so that tiles of many channels can share a batch. Which bands
are open follows from the stream and the library alone: a candidate opens one, back to before its first vote; votes and
open paths keep it open. Their number and width are bounded for any stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from monitor.ingest.feature_windows import FeatureWindow, LiveSecond, WindowState
from monitor.matching.ambiguity import alternatives
from monitor.matching.candidates import Candidate, Voter, VoterState
from monitor.matching.changes import change_correlation
from monitor.matching.excluding import Spans, without
from monitor.matching.paths import AlignmentPath, PathTracker, TrackerState
from monitor.matching.refining import refine
from monitor.matching.stitching import PathState, Scoring, SegmentName, SegmentState, SegmentView, Stitcher
from monitor.matching.tiles import HALO, Band, BandState, Cut, MapRow, SimilarityTile, TileMaps
from reference_db.search.feature_rows import CachedRows, ReferenceRows
from reference_db.search.index import Hits, ReferenceIndex
from reference_db.store.catalog import ReferenceId

BACK_FILL_S = 20  # a band starts this long before the candidate that opens it
IDLE_S = 20  # a band without votes and without paths is closed after this
MAX_BANDS = 12
WIDE = 512  # columns of a band: a reference up to this long is read whole
BEHIND = 96  # columns to the left of a candidate in a longer one
MOVE = 128  # a band moves by so many columns when a path comes this close to its right border


@dataclass(frozen=True, slots=True)
class MatchParameters:
    """Parameters of paths and scores. The defaults are the paper's where it has them."""

    tau: float = 0.3  # mask from which a cell may start a path
    sigma: float = 0.1  # similarity x mask from which a cell joins one
    hits: int = 20  # nearest reference seconds that vote, per stream second
    min_similarity: float = 0.3  # of a vote
    min_votes: float = 0.6  # sum of similarities over the voting seconds that opens a band
    refines: bool = True  # read a segment's ends off lines
    scoring: Scoring = field(default_factory=Scoring)


@dataclass(frozen=True, slots=True, eq=False)
class ReadRow:
    """The maps of one row of a band, for snapshots."""

    second: int
    mask: NDArray[np.float32]
    step: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class ReadingState:
    """A band and its paths, for snapshots: the newest rows read, the first of them final if `has_undecided`."""

    band: BandState
    tracker: TrackerState
    last_vote_s: int
    weight: float
    rows: list[ReadRow]
    has_undecided: bool


@dataclass(frozen=True, slots=True, eq=False)
class MatcherState:
    """The state of a `Matcher` between two seconds, for snapshots."""

    window: WindowState
    voter: VoterState
    readings: list[ReadingState]
    done: dict[ReferenceId, list[tuple[int, range]]]
    segments: list[SegmentState]
    features: dict[ReferenceId, str]  # identity of the features of each reference in use


@dataclass(frozen=True, slots=True, eq=False)
class _InUse:
    """A reference that a band or a segment uses."""

    rows: CachedRows
    informative: NDArray[np.bool_]
    features_id: str


@dataclass(slots=True, eq=False)
class _Reading:
    """A band, the tracker that walks its paths, and the rows that are not final yet."""

    band: Band
    tracker: PathTracker
    last_vote_s: int
    weight: float
    ended: list[AlignmentPath] = field(default_factory=list)
    provisional: list[MapRow] = field(default_factory=list)

    def covers(self, candidate: Candidate) -> bool:
        return self.band.reference == candidate.reference and candidate.ref_s in self.band.columns

    def read(self, rows: list[MapRow]) -> None:
        """Applies the newest rows of a cut; only the first can be final."""
        if len(rows) > HALO:
            self.ended += self.tracker.push(rows[0])
            rows = rows[1:]
        self.provisional = rows

    def finish(self) -> None:
        """The stream ends here: the provisional rows are the border of the matrix."""
        for row in self.provisional:
            self.ended += self.tracker.push(row)
        self.ended += self.tracker.finish()
        self.provisional = []

    def states(self) -> list[PathState]:
        """Every open path, and every one that ended since the last call."""
        states = [PathState(self.band.reference, path, path, False) for path in self.ended]
        ahead = {path.start: path for path in self.tracker.peek(self.provisional)}
        states += [PathState(self.band.reference, path, ahead[path.start], True) for path in self.tracker.open_paths()]
        self.ended = []
        return states

    def state(self) -> ReadingState:
        """All that `restore` needs."""
        undecided = self.tracker.undecided
        rows = ([undecided] if undecided is not None else []) + self.provisional
        return ReadingState(
            self.band.state(),
            self.tracker.state(),
            self.last_vote_s,
            self.weight,
            [ReadRow(row.live_s, row.mask, row.step) for row in rows],
            undecided is not None,
        )

    def restore(self, state: ReadingState, at: Callable[[int], LiveSecond]) -> None:
        """Resumes from there; `at` gives the stream's seconds."""
        self.band.restore(state.band, at)
        rows = [self.band.mapped(row.second, row.mask, row.step) for row in state.rows]
        self.tracker.restore(state.tracker, rows[0] if state.has_undecided else None)
        self.provisional = rows[1:] if state.has_undecided else rows

    def move_columns(self) -> None:
        """Moves the window of columns to the right when a path comes close to its border."""
        heads, columns = self.tracker.heads(), self.band.columns
        if heads and max(heads) > columns.stop - MOVE and columns.stop < self.band.n_columns:
            stop = min(self.band.n_columns, columns.stop + MOVE)
            self.band.columns = range(max(0, stop - WIDE), stop)


class Matcher:
    """The matching state of one channel and stream epoch."""

    def __init__(self, matching: MatchParameters, min_confidence: float = 0.0) -> None:
        self.matching = matching
        self.window = FeatureWindow()
        self._voter = Voter(matching.min_similarity, matching.min_votes)
        self._readings: list[_Reading] = []
        self._done: dict[ReferenceId, list[tuple[int, range]]] = {}  # closed bands: last final second, columns
        self._in_use: dict[ReferenceId, _InUse] = {}
        self._stitcher = Stitcher(
            matching.scoring, lambda reference: self._in_use[reference].rows, self.window.row, min_confidence
        )
        self._cuts: list[tuple[_Reading, Cut]] = []
        self._live: LiveSecond | None = None

    @property
    def n_open_paths(self) -> int:
        return sum(len(reading.tracker.heads()) for reading in self._readings)

    def spans(self) -> list[range]:
        """Stream seconds of every path that is open or closed a short time ago."""
        return self._stitcher.spans()

    def plan(self, live: LiveSecond, hits: Hits | None, index: ReferenceIndex) -> list[SimilarityTile]:
        """Adds the window's next second; returns the tiles that the network must read before `apply`."""
        self._live = live
        self._cuts = []
        candidates = self._voter.push(live.second, hits, index)
        for reading in self._readings:
            reading.band.push(live)
            self._cuts.append((reading, reading.band.cut()))
        for candidate in candidates:
            self._vote(candidate, live.second, index)
        return [tile for _, cut in self._cuts for tile in cut.tiles]

    def apply(self, maps: list[TileMaps], alerted: Collection[SegmentName] = ()) -> list[SegmentView]:
        """Views of the open segments and of those that closed in this second, given the maps of `plan`'s tiles.

        Segments with an open alert (`alerted`) are examined for echoes only when they close.
        """
        assert self._live is not None, "plan comes before apply"
        used = 0
        for reading, cut in self._cuts:
            reading.read(cut.read(maps[used : used + len(cut.tiles)]))
            used += len(cut.tiles)
        states = [state for reading in self._readings for state in reading.states()]
        for reading in self._readings:
            reading.move_columns()
        self._close_idle(self._live.second)
        return self._stitcher.push(self._live.second - HALO, states, alerted)

    def finish(self) -> list[SegmentView]:
        """The final view of every open segment, when the stream or its epoch ends."""
        states = []
        for reading in self._readings:
            reading.finish()
            states += reading.states()
        self._readings = []
        closed = [] if self._live is None else self._stitcher.push(self._live.second, states)
        return [view for view in closed if not view.is_open] + self._stitcher.finish()

    def refined(self, view: SegmentView) -> SegmentView:
        """The view with its ends read off lines: for emitted views only, since it costs more than matching a second."""
        if not self.matching.refines:
            return view
        reference = self._in_use[view.reference]
        return refine(view, self.window, reference.rows, reference.informative)

    def alternatives(self, view: SegmentView) -> tuple[tuple[float, float], ...]:
        """Other spans of the reference that explain a refined view as well; for emitted views only."""
        reference = self._in_use.get(view.reference)
        if not self.matching.refines or reference is None:  # it may have been removed
            return ()
        return alternatives(view, self._counting_rows(view), reference.rows, reference.informative)

    def likeness(self, one: SegmentView, other: SegmentView) -> float:
        """Mean similarity of what two refined views of references show in the stream seconds that they share."""
        seconds = self._shared_seconds(one, other)
        if not len(seconds) or not {one.reference, other.reference} <= self._in_use.keys():
            return 0.0
        sides = [self._in_use[view.reference].rows[self._line(view, seconds)] for view in (one, other)]
        return float(np.einsum("ij,ij->i", *sides).mean())

    def strength(self, view: SegmentView, beside: SegmentView) -> float:
        """Similarity times correlation of changes in the stream seconds that a refined view shares with another."""
        rows, seconds = self._counting_rows(view), self._shared_seconds(view, beside)
        seen = np.array([second for second in seconds.tolist() if second in rows], np.int64)
        if not len(seen) or view.reference not in self._in_use:
            return 0.0
        lives, refs = (
            np.stack([rows[s] for s in seen.tolist()]),
            self._in_use[view.reference].rows[self._line(view, seen)],
        )
        change = change_correlation(lives, refs)
        return float(np.einsum("ij,ij->i", lives, refs).mean()) * (1.0 if change is None else max(change, 0.0))

    def _counting_rows(self, view: SegmentView) -> dict[int, NDArray[np.float32]]:
        """The rows of the stream seconds of a view that are in memory and carry information."""
        return {
            live.second: live.row
            for live in self.window
            if live.counts and live.row is not None and view.live_start_s <= live.second < view.live_end_s
        }

    def _shared_seconds(self, one: SegmentView, other: SegmentView) -> NDArray[np.int64]:
        start, end = max(one.live_start_s, other.live_start_s), min(one.live_end_s, other.live_end_s)
        return np.arange(math.ceil(start), math.ceil(end))

    def _line(self, view: SegmentView, seconds: NDArray[np.int64]) -> NDArray[np.int64]:
        """The reference seconds of a refined view: those of its paths, or on the straight line between its ends."""
        if len(view.paths) > 1:
            return np.asarray(np.clip(view.columns(seconds), 0, len(self._in_use[view.reference].rows) - 1))
        speed = (view.ref_end_s - view.ref_start_s) / (view.live_end_s - view.live_start_s)
        columns = np.floor(view.ref_start_s + speed * (seconds - view.live_start_s) + 0.5).astype(np.int64)
        return np.asarray(np.clip(columns, 0, len(self._in_use[view.reference].rows) - 1))

    def features(self, reference: ReferenceId) -> tuple[ReferenceRows, NDArray[np.bool_]] | tuple[None, None]:
        """Rows of a reference in use, and which of its seconds carry information."""
        used = self._in_use.get(reference)
        return (None, None) if used is None else (used.rows, used.informative)

    def without(self, view: SegmentView, spans: Spans) -> SegmentView:
        """What is left of the view outside excluded spans of its reference."""
        return without(view, spans, self.matching.scoring)

    def state(self) -> MatcherState:
        """All that `restore` needs, between two seconds."""
        return MatcherState(
            self.window.state(),
            self._voter.state(),
            [reading.state() for reading in self._readings],
            self._done,
            self._stitcher.state(),
            {reference: used.features_id for reference, used in self._in_use.items()},
        )

    def restore(self, state: MatcherState, index: ReferenceIndex) -> set[ReferenceId]:
        """Resumes from there; returns the references in use that were removed or changed: their paths are dropped."""
        self.window.restore(state.window)
        self._voter.restore(state.voter)
        newest_s = self.window.newest_s
        self._live = None if newest_s is None else self.window.at(newest_s)
        self._done = state.done
        gone = _gone(state.features, index)
        for reference in (one for one in state.features if one not in gone):  # in their order, which a set has not
            place = index.place(reference)
            assert place is not None
            self._in_use[reference] = _in_use(index, place)
        self._stitcher.restore(segment for segment in state.segments if segment.reference not in gone)
        for stored in state.readings:
            if stored.band.reference not in gone:
                self._readings.append(self._reading(stored))
        return gone

    def drop_gone(self, index: ReferenceIndex) -> set[ReferenceId]:
        """Drops the paths of references in use that this index lacks or has with other features, and returns those."""
        gone = _gone({reference: used.features_id for reference, used in self._in_use.items()}, index)
        if gone:
            self._readings = [reading for reading in self._readings if reading.band.reference not in gone]
            self._stitcher.drop(gone)
            for reference in gone:
                self._done.pop(reference, None)
                del self._in_use[reference]
        return gone

    def _reading(self, stored: ReadingState) -> _Reading:
        used, state = self._in_use[stored.band.reference], stored.band
        band = Band(state.reference, used.rows, used.informative, state.first_live_s, state.columns)
        tracker = PathTracker(self.matching.tau, self.matching.sigma)
        reading = _Reading(band, tracker, stored.last_vote_s, stored.weight)
        reading.restore(stored, self.window.at)
        return reading

    def _vote(self, candidate: Candidate, second: int, index: ReferenceIndex) -> None:
        for reading in self._readings:
            if reading.covers(candidate):
                reading.last_vote_s = second
                reading.weight = candidate.weight
                return
        if index.place(candidate.reference) is None:
            return  # voted for in an older index, removed from this one
        if len(self._readings) >= MAX_BANDS and not self._drop_weakest(candidate.weight, second):
            return
        self._open(candidate, second, index)

    def _open(self, candidate: Candidate, second: int, index: ReferenceIndex) -> None:
        place = index.place(candidate.reference)
        assert place is not None
        used, n = _in_use(index, place), index.references[place].n_seconds
        start = 0 if n <= WIDE else max(0, min(candidate.ref_s - BEHIND, n - WIDE))
        columns = range(start, min(n, start + WIDE))
        first = second - BACK_FILL_S
        for last, old in self._done.get(candidate.reference, []):
            if old.start < columns.stop and columns.start < old.stop:
                first = max(first, last + 1)  # rows that a closed band has read are not read again
        seconds = [live for live in self.window.since(first) if live.second <= second]  # a gap has later ones too
        band = Band(candidate.reference, used.rows, used.informative, seconds[0].second, columns)
        tracker = PathTracker(self.matching.tau, self.matching.sigma)
        reading = _Reading(band, tracker, second, candidate.weight)
        self._in_use[candidate.reference] = used
        self._readings.append(reading)
        for live in seconds:
            band.push(live)
            cut = band.cut()
            if cut.has_final_row or live.second == second:
                self._cuts.append((reading, cut))

    def _drop_weakest(self, weight: float, second: int) -> bool:
        """Closes the weakest band without paths if it is weaker than this weight; whether there was one."""
        idle = [reading for reading in self._readings if not reading.tracker.heads() and reading.weight < weight]
        if not idle:
            return False
        weakest = min(idle, key=lambda reading: (reading.weight, reading.band.reference))
        self._cuts = [(reading, cut) for reading, cut in self._cuts if reading is not weakest]
        self._retire(weakest, second - 1 - HALO)
        return True

    def _close_idle(self, second: int) -> None:
        for reading in list(self._readings):
            if not reading.tracker.heads() and second - reading.last_vote_s > IDLE_S:
                self._retire(reading, second - HALO)
        self._done = {
            reference: recent
            for reference, bands in self._done.items()
            if (recent := [band for band in bands if band[0] > second - BACK_FILL_S])
        }
        needed = self._stitcher.references() | {reading.band.reference for reading in self._readings}
        for reference in self._in_use.keys() - needed:
            del self._in_use[reference]

    def _retire(self, reading: _Reading, last_final_s: int) -> None:
        self._readings.remove(reading)
        self._done.setdefault(reading.band.reference, []).append((last_final_s, reading.band.columns))


def _gone(features: Mapping[ReferenceId, str], index: ReferenceIndex) -> set[ReferenceId]:
    """Those of these references that the index does not have with features of this identity."""
    places = {reference: index.place(reference) for reference in features}
    return {
        reference
        for reference, place in places.items()
        if place is None or features[reference] not in _identities(index, place)
    }


def _identities(index: ReferenceIndex, place: int) -> tuple[str, str]:
    """The names of a reference's features: their identity, and the hash of their file, which old snapshots have."""
    return index.features_id(place), index.references[place].features_sha256


def _in_use(index: ReferenceIndex, place: int) -> _InUse:
    return _InUse(CachedRows(index.rows(place)), index.informative(place), index.features_id(place))
