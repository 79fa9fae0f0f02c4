"""One channel's matching: seconds and their index hits in, tiles for the network out, then segment views out.

The network is called in between by whoever owns it (`plan`, predict, `apply`), so that tiles of many channels can
share a batch. Which bands are open follows from the stream and the library alone: a candidate opens one, back to
before its first vote; votes and open paths keep it alive. Their number and width are bounded whatever airs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from monitor.ingest.windows import FeatureWindow, LiveSecond
from monitor.matching.candidates import Candidate, Voter
from monitor.matching.paths import AlignmentPath, PathTracker
from monitor.matching.refining import refine
from monitor.matching.stitching import PathState, Scoring, SegmentView, Stitcher
from monitor.matching.tiles import HALO, Band, Cut, MapRow, SimilarityTile, TileMaps
from reference_db.catalog import ReferenceId
from reference_db.index import Hits, ReferenceIndex

BACK_FILL_S = 20  # a band begins so long before the candidate that opens it
KEEP_S = 20  # a band without votes and without paths is closed after this
MAX_BANDS = 12
WIDE = 512  # columns of a band: a reference up to this long is read whole
BEHIND = 96  # columns kept to the left of a candidate in a longer one
MOVE = 128  # a band moves on by so many columns when a path comes this close to its right border


@dataclass(frozen=True, slots=True)
class Matching:
    """What decides about paths and scores. The defaults are the paper's where it has them."""

    tau: float = 0.3  # mask from which a cell may begin a path
    sigma: float = 0.1  # similarity x mask from which a cell joins one
    hits: int = 20  # nearest reference seconds that vote, per stream second
    min_similarity: float = 0.3  # of a vote
    min_votes: float = 0.6  # sum of similarities over the voting seconds that opens a band
    refines: bool = True  # read a segment's ends off lines
    scoring: Scoring = field(default_factory=Scoring)


@dataclass(slots=True, eq=False)
class _Reading:
    """A band, the tracker that reads it, and what is known ahead of its final rows."""

    band: Band
    tracker: PathTracker
    last_vote_s: int
    weight: float
    ended: list[AlignmentPath] = field(default_factory=list)
    provisional: list[MapRow] = field(default_factory=list)

    def covers(self, candidate: Candidate) -> bool:
        return self.band.reference == candidate.reference and candidate.ref_s in self.band.columns

    def read(self, rows: list[MapRow]) -> None:
        """Takes the newest rows of a cut; only the first can be final."""
        if len(rows) > HALO:
            self.ended += self.tracker.push(rows[0])
            rows = rows[1:]
        self.provisional = rows

    def finish(self) -> None:
        """The stream ends here: what was provisional is the border of the matrix."""
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

    def follow(self) -> None:
        """Moves the window of columns on when a path nears its right border."""
        heads, columns = self.tracker.heads(), self.band.columns
        if heads and max(heads) > columns.stop - MOVE and columns.stop < self.band.n_columns:
            stop = min(self.band.n_columns, columns.stop + MOVE)
            self.band.columns = range(max(0, stop - WIDE), stop)


class Matcher:
    """The matching state of one channel and stream epoch."""

    def __init__(self, matching: Matching) -> None:
        self.matching = matching
        self.window = FeatureWindow()
        self._voter = Voter(matching.min_similarity, matching.min_votes)
        self._readings: list[_Reading] = []
        self._done: dict[ReferenceId, list[tuple[int, range]]] = {}  # closed bands: last final second, columns
        self._rows: dict[ReferenceId, tuple[NDArray[np.float32], NDArray[np.bool_]]] = {}
        self._stitcher = Stitcher(matching.scoring, lambda reference: self._rows[reference][0], self.window.row)
        self._cuts: list[tuple[_Reading, Cut]] = []
        self._live: LiveSecond | None = None

    @property
    def n_open_paths(self) -> int:
        return sum(len(reading.tracker.heads()) for reading in self._readings)

    def plan(self, live: LiveSecond, hits: Hits | None, index: ReferenceIndex) -> list[SimilarityTile]:
        """Takes the window's next second in; the tiles that the network must read before `apply`."""
        self._live = live
        self._cuts = []
        candidates = self._voter.push(live.second, hits, index)
        for reading in self._readings:
            reading.band.push(live)
            self._cuts.append((reading, reading.band.cut()))
        for candidate in candidates:
            self._vote(candidate, live.second, index)
        return [tile for _, cut in self._cuts for tile in cut.tiles]

    def apply(self, maps: list[TileMaps]) -> list[SegmentView]:
        """What the second led to, given the maps of the tiles that `plan` gave: open segments and closed ones."""
        assert self._live is not None, "plan comes before apply"
        used = 0
        for reading, cut in self._cuts:
            reading.read(cut.read(maps[used : used + len(cut.tiles)]))
            used += len(cut.tiles)
        states = [state for reading in self._readings for state in reading.states()]
        for reading in self._readings:
            reading.follow()
        self._close_idle(self._live.second)
        return self._stitcher.push(self._live.second - HALO, states)

    def finish(self) -> list[SegmentView]:
        """The last word on every segment, when the stream or its epoch ends."""
        states = []
        for reading in self._readings:
            reading.finish()
            states += reading.states()
        self._readings = []
        closed = [] if self._live is None else self._stitcher.push(self._live.second, states)
        return [view for view in closed if not view.is_open] + self._stitcher.finish()

    def refined(self, view: SegmentView) -> SegmentView:
        """The view with its ends read off lines: for what is told, since it costs more than a second's matching."""
        return refine(view, self.window, *self._rows[view.reference]) if self.matching.refines else view

    def _vote(self, candidate: Candidate, second: int, index: ReferenceIndex) -> None:
        for reading in self._readings:
            if reading.covers(candidate):
                reading.last_vote_s = second
                reading.weight = candidate.weight
                return
        if index.place(candidate.reference) is None:
            return  # voted for in an older index, gone from this one
        if len(self._readings) >= MAX_BANDS and not self._drop_weakest(candidate.weight, second):
            return
        self._open(candidate, second, index)

    def _open(self, candidate: Candidate, second: int, index: ReferenceIndex) -> None:
        place = index.place(candidate.reference)
        assert place is not None
        rows, n = index.rows(place), index.references[place].n_seconds
        start = 0 if n <= WIDE else max(0, min(candidate.ref_s - BEHIND, n - WIDE))
        columns = range(start, min(n, start + WIDE))
        first = second - BACK_FILL_S
        for last, old in self._done.get(candidate.reference, []):
            if old.start < columns.stop and columns.start < old.stop:
                first = max(first, last + 1)  # what a closed band has read is not read again
        seconds = self.window.since(first)
        band = Band(candidate.reference, rows, index.informative(place), seconds[0].second, columns)
        tracker = PathTracker(self.matching.tau, self.matching.sigma)
        reading = _Reading(band, tracker, second, candidate.weight)
        self._rows[candidate.reference] = (rows, index.informative(place))
        self._readings.append(reading)
        for live in seconds:
            band.push(live)
            cut = band.cut()
            if cut.has_final_row or live.second == second:
                self._cuts.append((reading, cut))

    def _drop_weakest(self, weight: float, second: int) -> bool:
        """Makes room for a candidate of this weight at the cost of a weaker band without paths."""
        idle = [reading for reading in self._readings if not reading.tracker.heads() and reading.weight < weight]
        if not idle:
            return False
        weakest = min(idle, key=lambda reading: (reading.weight, reading.band.reference))
        self._cuts = [(reading, cut) for reading, cut in self._cuts if reading is not weakest]
        self._retire(weakest, second - 1 - HALO)
        return True

    def _close_idle(self, second: int) -> None:
        for reading in list(self._readings):
            if not reading.tracker.heads() and second - reading.last_vote_s > KEEP_S:
                self._retire(reading, second - HALO)
        self._done = {
            reference: recent
            for reference, bands in self._done.items()
            if (recent := [band for band in bands if band[0] > second - BACK_FILL_S])
        }
        needed = self._stitcher.references() | {reading.band.reference for reading in self._readings}
        for reference in self._rows.keys() - needed:
            del self._rows[reference]

    def _retire(self, reading: _Reading, last_final_s: int) -> None:
        self._readings.remove(reading)
        self._done.setdefault(reading.band.reference, []).append((last_final_s, reading.band.columns))
