"""Labels against the paper's equations, an example by hand, and the properties of matching by time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import training_oracles as oracles
from training.labels import NO_ORIGINAL, Labels, label_by_id, labels_of, match_by_id, match_by_time

ids = st.lists(st.integers(NO_ORIGINAL, 12), min_size=2, max_size=20)


@st.composite
def edited_ids(draw: st.DrawFn) -> list[int]:
    """Increasing ids with holds, cuts, padding and skipped frames."""
    out: list[int] = []
    at = draw(st.integers(0, 8))
    for what in draw(
        st.lists(st.sampled_from(["on", "on", "on", "hold", "cut", "skip", "pad"]), min_size=2, max_size=20)
    ):
        at += {"on": 1, "hold": 0, "cut": 4, "skip": 2, "pad": 0}[what]
        out.append(NO_ORIGINAL if what == "pad" else at)
    return out


@settings(deadline=None)
@given(live=st.one_of(ids, edited_ids()), ref=st.one_of(ids, edited_ids()))
def test_labels_are_the_papers_equations(live: list[int], ref: list[int]) -> None:
    got = label_by_id(np.array(live), np.array(ref))
    r = oracles.paths(live, ref)
    q = oracles.responsible_targets(r, len(live), len(ref))
    for i in range(len(live)):
        for j in range(len(ref)):
            assert got.on_path[i, j] == ((i, j) in r)
    for i in range(len(live) - 1):
        for j in range(len(ref) - 1):
            wanted = [oracles.target_probability(q, i, j, category) for category in range(3)]
            assert got.step[i, j].tolist() == wanted
            assert got.responsible[i, j] == (sum(wanted) > 0)
            assert sum(wanted) in (0, 1)


def test_a_freeze_by_hand() -> None:
    # The channel holds original frame 1 for two seconds, the reference continues:
    #            ref 0  1  2  3
    #   live 0       X  .  .  .
    #   live 1       .  X  .  .
    #   live 1       .  X  .  .
    #   live 2       .  .  X  .
    got = label_by_id(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 3]))
    assert got.on_path.astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    right_down, right, down, both, none = [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0.5, 0.5], [0, 0, 0]
    assert got.step.tolist() == [
        [right_down, down, none],
        [right_down, down, none],  # from (1, 0) right-down to (2, 1), although right stays in R as well
        [right, right_down, down],
    ]
    assert got.responsible.tolist() == [[True, True, False], [True, True, False], [True, True, True]]
    assert both not in got.step.reshape(-1, 3).tolist()


def test_right_and_down_share_where_both_stay_in_r() -> None:
    on_path = np.array([[False, True], [True, False]])
    assert labels_of(on_path).step.tolist() == [[[0, 0.5, 0.5]]]


@settings(deadline=None)
@given(st.lists(st.tuples(edited_ids(), edited_ids()), min_size=2, max_size=4))
def test_a_batch_is_its_pairs(pairs: list[tuple[list[int], list[int]]]) -> None:
    live = np.array([(a + [NO_ORIGINAL] * 20)[:20] for a, _ in pairs])
    ref = np.array([(b + [NO_ORIGINAL] * 20)[:20] for _, b in pairs])
    batch = label_by_id(live, ref)
    for k in range(len(pairs)):
        alone = label_by_id(live[k], ref[k])
        assert np.array_equal(batch.on_path[k], alone.on_path)
        assert np.array_equal(batch.step[k], alone.step)


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.0, 1.25, 1.5, 2.0])
@settings(deadline=None)
@given(phase=st.floats(-0.49, 0.49))
def test_by_time_a_copy_at_any_speed_is_one_path_without_holes(speed: float, phase: float) -> None:
    live = 10.0 + phase + speed * np.arange(16.0)
    ref = np.arange(50.0)
    on_path, tied = match_by_time(live, ref, 0.5 * max(1.0, speed))
    cells = [(int(i), int(j)) for i, j in np.argwhere(on_path)]
    assert {i for i, _ in cells} == set(range(16))
    for (i, j), (k, m) in itertools.pairwise(cells):  # argwhere is in row order: a monotone path
        assert (k - i, m - j) in {(0, 1), (1, 0), (1, 1)}
    assert not (on_path & tied).any()


@settings(deadline=None)
@given(phase=st.floats(-0.44, 0.44))
def test_by_time_a_copy_at_full_speed_is_the_diagonal(phase: float) -> None:
    on_path, _ = match_by_time(np.arange(8.0) + phase, np.arange(8.0), 0.5)
    assert np.array_equal(on_path, np.eye(8, dtype=bool))


def test_by_time_half_a_second_out_of_phase_is_a_tie() -> None:
    on_path, tied = match_by_time(np.array([2.5, 3.5]), np.arange(6.0), 0.5)
    # 2.5 is as near to 2 as to 3: one of them is on the path, the other is a tie.
    assert np.argwhere(on_path).tolist() == [[0, 3], [1, 4]]
    assert np.argwhere(on_path | tied).tolist() == [[0, 2], [0, 3], [1, 3], [1, 4]]


def test_by_time_the_seconds_that_a_cut_removed_are_unmatched() -> None:
    live = np.array([0.1, 1.1, 2.1, 7.1, 8.1])
    on_path, _ = match_by_time(live, np.arange(10.0), 0.5)
    assert np.argwhere(on_path).tolist() == [[0, 0], [1, 1], [2, 2], [3, 7], [4, 8]]


def test_other_material_matches_nothing() -> None:
    on_path, tied = match_by_time(np.array([np.nan, np.nan]), np.arange(3.0), 5.0)
    assert not on_path.any()
    assert not tied.any()
    assert not match_by_id(np.array([NO_ORIGINAL]), np.array([NO_ORIGINAL])).any()


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="M-1"):
        Labels(np.zeros((4, 4), bool), np.zeros((4, 4, 3), np.float32), np.zeros((3, 3), bool))
