"""Candidates: index hits of the newest seconds, voted into (reference, offset).

Each second's hits vote for the offset between reference and stream at which they lie. Votes of a few seconds are
added up over neighbouring offsets, wide enough for speeds of 0.5 to 2; an offset above the threshold is a candidate.
The network decides what is a copy, so the threshold is low: it only bounds the work.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from reference_db.search.index import Hits, ReferenceIndex
from reference_db.store.catalog import ReferenceId

VOTING_S = 8  # seconds whose votes are added up
OFFSET_BIN_S = 24  # at twice the speed the offset moves 8 s within the voting seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A reference that may be on air, the newest second of it that was hit, and how strongly it was voted for."""

    reference: ReferenceId
    ref_s: int
    weight: float


@dataclass(frozen=True, slots=True)
class _Vote:
    reference: ReferenceId
    offset_bin: int
    ref_s: int
    similarity: float


@dataclass(frozen=True, slots=True)
class VoterState:
    """The state of a `Voter`, for snapshots."""

    seconds: list[tuple[int, list[_Vote]]]


class Voter:
    """The votes of the last seconds of one channel."""

    def __init__(self, min_similarity: float, min_weight: float) -> None:
        self.min_similarity = min_similarity
        self.min_weight = min_weight
        self._seconds: deque[tuple[int, list[_Vote]]] = deque()

    def push(self, second: int, hits: Hits | None, index: ReferenceIndex) -> list[Candidate]:
        """Candidates by falling weight, after this second's hits (None: it was not searched)."""
        while self._seconds and self._seconds[0][0] <= second - VOTING_S:
            self._seconds.popleft()
        self._seconds.append((second, [] if hits is None else self._votes(second, hits, index)))
        return self._count()

    def state(self) -> VoterState:
        """All that `restore` needs."""
        return VoterState(list(self._seconds))

    def restore(self, state: VoterState) -> None:
        """Resumes from there."""
        self._seconds = deque(state.seconds)

    def _votes(self, second: int, hits: Hits, index: ReferenceIndex) -> list[_Vote]:
        """The best hit of each (reference, offset bin)."""
        best: dict[tuple[ReferenceId, int], _Vote] = {}
        for place, ref_s, similarity in zip(
            hits.reference[0].tolist(), hits.second[0].tolist(), hits.similarity[0].tolist(), strict=True
        ):
            if place < 0 or similarity < self.min_similarity:
                continue
            key = (index.references[place].id, (ref_s - second) // OFFSET_BIN_S)
            if key not in best or similarity > best[key].similarity:
                best[key] = _Vote(*key, ref_s, similarity)
        return list(best.values())

    def _count(self) -> list[Candidate]:
        weights: dict[tuple[ReferenceId, int], float] = defaultdict(float)
        newest: dict[tuple[ReferenceId, int], int] = {}
        for _, votes in self._seconds:
            for vote in votes:
                newest[vote.reference, vote.offset_bin] = vote.ref_s
                for near in (vote.offset_bin - 1, vote.offset_bin, vote.offset_bin + 1):
                    weights[vote.reference, near] += vote.similarity
        found = [
            Candidate(reference, ref_s, weights[reference, offset_bin])
            for (reference, offset_bin), ref_s in newest.items()
            if weights[reference, offset_bin] >= self.min_weight
        ]
        return sorted(found, key=lambda c: (-c.weight, c.reference, c.ref_s))
