"""Candidates: which references and offsets the index hits of the last seconds vote for."""

from __future__ import annotations

import numpy as np
import pytest

from monitor.matching.candidates import OFFSET_BIN_S, VOTING_S, Voter
from reference_db.search.index import Hits
from tests.support.planted_channels import library

INDEX = library(("swift", "other")).index
SWIFT, OTHER = 0, 1  # their places in the index


def hits(*found: tuple[int, int, float]) -> Hits:
    """Of one second: place, reference second and similarity."""
    places, seconds, similarities = zip(*found, strict=True)
    return Hits(np.array([places]), np.array([seconds]), np.array([similarities], np.float32))


def test_votes_of_neighbouring_seconds_add_up_to_a_candidate() -> None:
    voter = Voter(min_similarity=0.3, min_weight=1.0)
    assert voter.push(100, hits((SWIFT, 20, 0.75)), INDEX) == []
    (found,) = voter.push(101, hits((SWIFT, 21, 0.75)), INDEX)
    assert (found.reference, found.ref_s, found.weight) == ("swift", 21, 1.5)


def test_a_second_votes_once_for_an_offset_with_its_best_hit() -> None:
    voter = Voter(min_similarity=0.3, min_weight=0.1)
    (found,) = voter.push(0, hits((SWIFT, 48, 0.5), (SWIFT, 50, 0.75), (SWIFT, 49, 0.625)), INDEX)
    assert (found.ref_s, found.weight) == (50, 0.75)


def test_weak_hits_and_missing_ones_do_not_vote() -> None:
    voter = Voter(min_similarity=0.3, min_weight=0.1)
    assert voter.push(0, hits((SWIFT, 5, 0.25), (-1, 0, 0.9)), INDEX) == []
    assert voter.push(1, None, INDEX) == []


def test_candidates_are_ordered_by_weight_and_far_offsets_do_not_add_up() -> None:
    voter = Voter(min_similarity=0.3, min_weight=0.6)
    far_s = 3 * OFFSET_BIN_S
    found = voter.push(0, hits((OTHER, 10, 0.625), (SWIFT, 5, 0.75), (SWIFT, far_s, 0.5)), INDEX)
    assert [(one.reference, one.ref_s) for one in found] == [("swift", 5), ("other", 10)]


def test_votes_expire() -> None:
    voter = Voter(min_similarity=0.3, min_weight=0.6)
    assert voter.push(0, hits((SWIFT, 5, 0.75)), INDEX)
    assert voter.push(VOTING_S - 1, None, INDEX)
    assert voter.push(VOTING_S, None, INDEX) == []


def test_a_restored_voter_has_the_same_candidates() -> None:
    voter, restored = Voter(0.3, 0.1), Voter(0.3, 0.1)
    for second in range(5):
        voter.push(second, hits((SWIFT, second, 0.5), (OTHER, 30 - second, 0.75)), INDEX)
    restored.restore(voter.state())
    assert restored.push(5, None, INDEX) == voter.push(5, None, INDEX) != []


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_a_copy_at_any_speed_becomes_a_candidate(speed: float) -> None:
    voter = Voter(min_similarity=0.3, min_weight=2.0)
    found = [voter.push(second, hits((SWIFT, 20 + int(speed * second), 0.5)), INDEX) for second in range(VOTING_S)]
    assert found[-1]
    assert found[-1][0].weight >= 0.5 * VOTING_S
