"""Findability: how long a copy of a reference must be before it is found, measured by the matcher itself.

Clean pieces of the reference's own rows are matched as if they were on air: half a second out of step with the
registered seconds, since a broadcast hardly ever has their phase, and in a library without other references. A piece is
found when a segment that would be an alert overlaps the seconds that it was taken from. Pieces that end within the
network's halo are aired one by one; of longer ones each second of one airing shows what a copy that ends there gives.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from monitor.matching.matcher import Matcher, MatchParameters
from monitor.matching.stitching import SegmentView
from monitor.matching.tiles import HALO, SimilarityTile, TileMaps
from reference_db.registration import Findability
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Reference, ReferenceFeatures, ReferenceId
from reference_db.store.references import Features

MAX_PLACES = 5  # of a reference that pieces are taken from: each costs about as much as encoding three seconds
LONGEST_S = 30  # of a piece; what needs more is reported as not found
AROUND_S = 512  # before and after its start, the part of the reference that a piece is compared with
ROOM_S = 15  # that follow the start of a piece, if the reference has them
SHORTEST_S = 2  # a single picture is never a copy
START_S = HALO + 1  # an open stream this long has no path yet: starts are decided when the next row is final
HOLDS_S = 2  # further seconds in which a piece must stay found: a score near the threshold goes up and down

Reader = Callable[[list[SimilarityTile]], list[TileMaps]]
AlertRule = Callable[[SegmentView], bool]


def measure_findability(
    features: Features, read: Reader, parameters: MatchParameters, is_alert: AlertRule
) -> Findability:
    """The length from which pieces of these features are found; `is_alert` says which segments become alerts."""
    lengths, longest_s = [], 0
    for start_s in (places := _places(features)):
        first_s = max(0, start_s - AROUND_S)
        around = _excerpt(features, slice(first_s, start_s + AROUND_S))
        piece = _Airing(around, start_s - first_s, _index_of(around), read, parameters, is_alert)
        lengths.append(piece.shortest_found_s())
        longest_s = max(longest_s, piece.longest_s)
    found = [length for length in lengths if length is not None]
    return Findability(max(found, default=None), longest_s, len(places), len(places) - len(found))


class _Airing:
    """A piece of a reference as a channel that shows nothing else."""

    def __init__(
        self,
        features: ReferenceFeatures,
        start_s: int,
        index: ReferenceIndex,
        read: Reader,
        parameters: MatchParameters,
        is_alert: AlertRule,
    ) -> None:
        seconds = slice(start_s, start_s + LONGEST_S)
        self.start_s = start_s
        self._rows = _out_of_step(features.rows[start_s : start_s + LONGEST_S + 1].astype(np.float32))[:LONGEST_S]
        self._informative = features.informative[seconds]
        self._index, self._read, self._parameters, self._is_alert = index, read, parameters, is_alert

    @property
    def longest_s(self) -> int:
        return len(self._rows)

    def shortest_found_s(self) -> int | None:
        """The length from which the piece is found; None if it is not found at all."""
        found = [self._is_found_alone(n) for n in range(SHORTEST_S, min(START_S, self.longest_s) + 1)]
        first = _first_lasting(found, is_over=len(found) == self.longest_s - SHORTEST_S + 1)
        if first is not None:
            return SHORTEST_S + first
        matcher = Matcher(self._parameters)
        for second in range(self.longest_s):
            views = self._push(matcher, second)
            if second + 1 > START_S:
                found.append(self._is_found(views, second + 1))
            first = _first_lasting(found, is_over=second + 1 == self.longest_s)
            if first is not None:
                return SHORTEST_S + first
        return None

    def _is_found_alone(self, n_seconds: int) -> bool:
        """Whether a copy of this length is found."""
        matcher = Matcher(self._parameters)
        for second in range(n_seconds):
            self._push(matcher, second)
        return self._is_found(matcher.finish(), n_seconds)

    def _push(self, matcher: Matcher, second: int) -> list[SegmentView]:
        row = self._rows[second]
        (live,) = matcher.window.push(second, row, bool(self._informative[second]))
        hits = self._index.search(row[None], self._parameters.hits) if live.counts else None
        return matcher.apply(self._read(matcher.plan(live, hits, self._index)))

    def _is_found(self, views: list[SegmentView], n_seconds: int) -> bool:
        end_s = self.start_s + n_seconds
        return any(
            view.ref_start_s < end_s and view.ref_end_s > self.start_s and view.echo_of is None and self._is_alert(view)
            for view in views
        )


def _first_lasting(found: list[bool], *, is_over: bool) -> int | None:
    """The first place from which all are found, HOLDS_S further ones included or all there are."""
    first = len(found)
    while first > 0 and found[first - 1]:
        first -= 1
    n_lasting = len(found) - first
    return first if n_lasting > HOLDS_S or (is_over and n_lasting) else None


def _out_of_step(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows half-way between each second and the next; the last one as it is."""
    between = rows + np.concatenate([rows[1:], rows[-1:]])
    lengths = np.linalg.norm(between, axis=1, keepdims=True)
    return np.asarray(between / np.maximum(lengths, 1e-6))


def _excerpt(features: Features, seconds: slice) -> ReferenceFeatures:
    """These seconds of the features, in memory."""
    return ReferenceFeatures(np.array(features.rows[seconds]), features.informative[seconds].copy())


def _places(features: Features) -> list[int]:
    """Seconds from which pieces are taken: informative, spread over the reference, with room for a piece if it has."""
    starts = np.flatnonzero(features.informative)
    roomy = starts[starts <= len(features.rows) - ROOM_S]
    starts = roomy if len(roomy) else starts[:1]
    at = np.unique(np.linspace(0, len(starts) - 1, MAX_PLACES).round().astype(int))
    return [int(second) for second in starts[at]]


def _index_of(features: ReferenceFeatures) -> ReferenceIndex:
    """An index of this reference alone."""
    itself = Reference(
        id=ReferenceId("measured"),
        title="",
        owner="",
        tags={},
        content_sha256="",
        n_seconds=len(features.rows),
        n_uninformative=int((~features.informative).sum()),
        encoder_id="",
        features_sha256="",
        added_at=datetime.fromtimestamp(0, UTC),
    )
    return ReferenceIndex.from_features([(itself, features)], 0)
