"""Full matrices: maps in blocks, and paths against a plain version of Algorithm 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation import full_matrix
from evaluation.full_matrix import FullMaps, FullMatrix, compare, crop, read_maps, stitch, walk, walk_by_diagonal
from evaluation.recordings import Recording
from monitor.ingest.feature_windows import LiveSecond
from monitor.matching.mask_step import MaskStepNet
from monitor.matching.matcher import MatchParameters
from monitor.matching.paths import AlignmentPath
from monitor.matching.tiles import NO_STEP
from reference_db.store.catalog import ReferenceId
from tests.support import oracles
from tests.support.planted_features import blurred, channel, cut, film, plain_net

torch.set_num_threads(1)
MATCHING = MatchParameters()


def test_maps_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    net = MaskStepNet().eval()
    cells = np.random.default_rng(0).uniform(-0.2, 1, (41, 23)).astype(np.float32)
    at_once = read_maps(net, cells)
    monkeypatch.setattr(full_matrix, "BLOCK_ROWS", 10)
    in_blocks = read_maps(net, cells)
    np.testing.assert_allclose(in_blocks.mask, at_once.mask, atol=1e-6)
    np.testing.assert_array_equal(in_blocks.step, at_once.step)
    with torch.inference_mode():
        mask_logits, step_logits = net(torch.from_numpy(cells)[None, None])
    np.testing.assert_allclose(at_once.mask, mask_logits.softmax(1)[0, 1].numpy(), atol=1e-6)
    np.testing.assert_array_equal(at_once.step[:-1, :-1], step_logits.argmax(1)[0].numpy())
    assert (at_once.step[-1] == NO_STEP).all()
    assert (at_once.step[:, -1] == NO_STEP).all()


def test_missing_and_uninformative_seconds_do_not_count() -> None:
    ref = film("film", 12, 1)
    rows, informative = ref.rows.copy(), np.ones(12, bool)
    rows[4] = 0.0  # missing
    informative[7] = False  # black
    matrix = compare(Recording("ch0", rows, informative & rows.any(axis=1)), ref)
    assert len(matrix.lives) == 12
    assert not matrix.counts[[4, 7]].any()
    assert not matrix.similarity[[4, 7]].any()
    assert matrix.similarity[3, 3] == pytest.approx(1.0, abs=1e-3)


@st.composite
def maps(draw: st.DrawFn) -> tuple[FullMatrix, FullMaps]:
    """A small matrix with random maps, some cells of which do not count."""
    height, width = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    step = rng.choice(3, (height, width), p=[0.7, 0.15, 0.15]).astype(np.uint8)
    step[-1], step[:, -1] = NO_STEP, NO_STEP
    counts = rng.random((height, width)) < draw(st.sampled_from([1.0, 0.8]))
    similarity = rng.uniform(0, 1, (height, width)).astype(np.float32)
    mask = (rng.random((height, width)) ** 2).astype(np.float32)
    lives = tuple(LiveSecond(i + 5, np.ones(1, np.float32), True, 1.0) for i in range(height))
    return (
        FullMatrix(ReferenceId("film"), lives, np.zeros((width, 1), np.float32), similarity, counts),
        FullMaps(mask, step),
    )


def summary(paths: list[AlignmentPath]) -> list[tuple[object, ...]]:
    """The fields of a path that the oracle has too; rows begin at second 5."""
    out = [((p.start[0] - 5, p.start[1]), p.first, p.last, p.n_members, round(p.sum_weight, 4)) for p in paths]
    return sorted(out)


@settings(max_examples=150, deadline=None)
@given(maps(), st.booleans())
def test_paths_are_those_of_the_oracle(both: tuple[FullMatrix, FullMaps], by_diagonal: bool) -> None:
    matrix, read = both
    found = (walk_by_diagonal if by_diagonal else walk)(matrix, read, MATCHING)
    expected_paths = oracles.align_whole(
        matrix.similarity, read.mask, read.step, matrix.counts, MATCHING.tau, MATCHING.sigma, by_diagonal=by_diagonal
    )
    expected = [
        (
            path.start,
            (path.members[0][0] + 5, path.members[0][1]),
            (path.members[-1][0] + 5, path.members[-1][1]),
            len(path.members),
            round(sum(path.weights), 4),
        )
        for path in expected_paths
    ]
    assert summary(found) == sorted(expected)


def test_a_cut_is_two_paths_and_one_segment() -> None:
    ref = film("film", 60, 1)
    live = channel("ch0", [film("x", 10, 5), cut(ref, 10, 22), cut(ref, 26, 38), film("y", 10, 6)])
    matrix = compare(blurred(live, 0.3), ref)
    read = read_maps(plain_net(), matrix.similarity)
    assert len(walk(matrix, read, MATCHING)) == 2
    (segment,) = stitch(matrix, read, MATCHING)
    assert (segment.live_start_s, segment.live_end_s) == (10, 34)
    assert (segment.ref_start_s, segment.ref_end_s) == (10, 38)


def test_a_cropped_matrix_has_the_same_seconds_and_its_own_columns() -> None:
    ref = film("film", 30, 1)
    matrix = compare(ref, ref)
    part, read = crop(matrix, read_maps(plain_net(), matrix.similarity), slice(10, 20), slice(10, 25))
    (path,) = walk(part, read, MATCHING)
    assert (path.first, path.last) == ((10, 0), (19, 9))
    assert part.similarity.shape == (10, 15)
