"""Training pairs: the temporal edits, what anchor and positive share, and the variations of broadcast pairs."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from training.feature_table import CLEAN, EDITED, NO_PICTURE, FeatureTable, table_of
from training.training_pairs import (
    MAX_DELETED,
    MAX_FROZEN,
    BroadcastProbabilities,
    Pair,
    batch_of,
    broadcast_pair,
    change_speed,
    paper_pair,
    temporal_edit,
)

ALWAYS, NEVER = 1.0, 0.0
PLAIN = BroadcastProbabilities(
    *[NEVER for _ in fields(BroadcastProbabilities)]
)  # a copy at full speed without variations


def make_table(n_videos: int = 5, duration_s: float = 50.0) -> FeatureTable:
    """Videos whose rows contain what they show: [video, moment] in the first two of four columns."""
    parts = []
    for video in range(n_videos):
        for k in range(4):
            kind, begin, end = (CLEAN, 0.0, duration_s) if k == 0 else (EDITED, 0.25 * k, duration_s - 2 * k)
            times = np.arange(begin, end, 0.5)
            rows = np.stack(
                [np.full_like(times, video + 1), times, np.full_like(times, k), np.ones_like(times)], axis=1
            )
            parts.append((f"v{video}", kind, times, rows.astype(np.float32)))
    return table_of("test", parts)


TABLE = make_table()


def moments(pair: Pair, side: str) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], ...]:
    """The video and the moment of every row of a side."""
    rows = TABLE.rows[pair.live if side == "live" else pair.ref]
    return rows[:, 0], rows[:, 1]


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), n_raw=st.integers(12, 120))
def test_a_freeze_repeats_one_frame_up_to_four_times(seed: int, n_raw: int) -> None:
    frames = temporal_edit(np.random.default_rng(seed), n_raw, "freeze")
    plain = np.arange(0, n_raw, 2)
    assert np.array_equal(np.unique(frames), plain)
    again = np.flatnonzero(np.diff(frames) == 0)
    assert 1 <= len(again) <= MAX_FROZEN
    assert len(set(frames[again])) == 1
    assert (np.diff(frames) >= 0).all()


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), n_raw=st.integers(12, 120))
def test_a_deletion_removes_up_to_four_consecutive_frames(seed: int, n_raw: int) -> None:
    frames = temporal_edit(np.random.default_rng(seed), n_raw, "deletion")
    plain = np.arange(0, n_raw, 2)
    gone = np.setdiff1d(plain, frames)
    assert 1 <= len(gone) <= MAX_DELETED
    assert (np.diff(gone) == 2).all()
    assert np.array_equal(np.sort(np.concatenate([frames, gone])), plain)


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), n_raw=st.integers(12, 120))
def test_nothing_is_one_frame_a_second(seed: int, n_raw: int) -> None:
    assert np.array_equal(temporal_edit(np.random.default_rng(seed), n_raw, "nothing"), np.arange(0, n_raw, 2))


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), n_raw=st.integers(12, 120), speed=st.floats(0.5, 2.0))
def test_speed_keeps_one_frame_of_every_group(seed: int, n_raw: int, speed: float) -> None:
    frames = change_speed(np.random.default_rng(seed), n_raw, speed)
    assert len(frames) == int(n_raw / (2 * speed))
    assert (np.diff(frames) > 0).all()
    assert frames[0] >= 0
    assert frames[-1] < n_raw
    # The k-th group begins at raw frame floor(2 * speed * k).
    assert (np.abs(frames - 2 * speed * np.arange(len(frames))) <= 2 * speed).all()


def test_half_speed_is_the_raw_sequence() -> None:
    assert np.array_equal(change_speed(np.random.default_rng(0), 30, 0.5), np.arange(30))


def test_the_four_temporal_edits_are_equally_likely() -> None:
    rng = np.random.default_rng(7)
    plain = np.arange(0, 64, 2)
    seen = {"freeze": 0, "deletion": 0, "nothing": 0, "speed": 0}
    for _ in range(2000):
        frames = temporal_edit(rng, 64)
        if np.array_equal(frames, plain):
            seen["nothing"] += 1
        elif (np.diff(frames) == 0).any():
            seen["freeze"] += 1
        elif (frames % 2 == 0).all() and len(frames) < 32 and len(np.setdiff1d(plain, frames)) <= 4:
            seen["deletion"] += 1
        else:
            seen["speed"] += 1
    assert all(400 < n < 600 for n in seen.values()), seen


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), context=st.sampled_from([0, 15]))
def test_anchor_and_positive_are_sixteen_frames_and_four_match(seed: int, context: int) -> None:
    pair = paper_pair(np.random.default_rng(seed), TABLE, context=context)
    assert (len(pair.live), len(pair.ref), pair.on_path.shape) == (context + 16, context + 16, (16, 16))
    assert pair.on_path.any(axis=1).sum() >= 4
    live_video, live_s = moments(pair, "live")
    ref_video, ref_s = moments(pair, "ref")
    assert set(live_video) <= {live_video.max(), 0}
    for i, j in np.argwhere(pair.on_path) + context:
        assert live_video[i] == ref_video[j] > 0
        assert abs(live_s[i] - ref_s[j]) <= 0.5  # the same original frame of 2 fps, in clips out of phase
    assert not pair.on_path[live_video[context:] == 0].any()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), context=st.sampled_from([0, 15]), size=st.sampled_from([(16, 16), (32, 48)]))
def test_a_plain_copy_is_one_diagonal_of_the_same_moments(seed: int, context: int, size: tuple[int, int]) -> None:
    pair = broadcast_pair(np.random.default_rng(seed), TABLE, *size, context, PLAIN)
    assert pair.on_path.shape == size
    live_video, live_s = moments(pair, "live")
    ref_video, ref_s = moments(pair, "ref")
    for i, j in np.argwhere(pair.on_path) + context:
        assert live_video[i] == ref_video[j]
        assert abs(live_s[i] - ref_s[j]) <= 0.5
    steps = np.diff(np.argwhere(pair.on_path), axis=0)
    assert (steps == 1).all()
    # Every row of the reference's video whose moment lies in the band is on the path, and no other row is.
    band_s = ref_s[context:][pair.ref[context:] != NO_PICTURE]
    in_band = (live_s[context:] >= band_s.min() - 0.4) & (live_s[context:] <= band_s.max() + 0.4)
    of_video = live_video[context:] == ref_video.max()
    assert np.array_equal(np.logical_or.reduce(pair.on_path, axis=1)[in_band], of_video[in_band])


def draw_pairs(n: int, probability: BroadcastProbabilities, size: tuple[int, int] = (24, 32)) -> list[Pair]:
    rng = np.random.default_rng(11)
    return [broadcast_pair(rng, TABLE, *size, 0, probability) for _ in range(n)]


def test_copies_begin_and_end_inside_the_tile_and_fill_it() -> None:
    rows = [np.logical_or.reduce(pair.on_path, axis=1) for pair in draw_pairs(300, PLAIN)]
    assert sum(bool(r.any() and not r[0]) for r in rows) > 50
    assert sum(bool(r.any() and not r[-1]) for r in rows) > 50
    assert sum(bool(r.all()) for r in rows) > 10


def test_a_negative_matches_nowhere_even_with_something_in_common() -> None:
    pairs = draw_pairs(200, BroadcastProbabilities(negative=ALWAYS, shared=ALWAYS))
    assert not any(pair.on_path.any() for pair in pairs)
    in_common = [np.intersect1d(pair.live[pair.live >= 0], pair.ref[pair.ref >= 0]) for pair in pairs]
    videos = [TABLE.rows[rows, 0] for rows in in_common if len(rows)]
    assert any(len(v) for v in videos)  # an ident
    blacks = [(p.live == NO_PICTURE).any() and (p.ref == NO_PICTURE).any() for p in pairs]
    assert sum(blacks) > 20


def test_a_held_picture_is_repeated_while_the_label_moves_on() -> None:
    seen = longest = 0
    for pair in draw_pairs(50, replace(PLAIN, held=ALWAYS)):
        path = np.argwhere(pair.on_path)
        repeated = pair.live[path[1:, 0]] == pair.live[path[:-1, 0]]
        seen += int(repeated.sum())
        assert (np.diff(path, axis=0) == 1).all()
        if len(path) > 16:
            longest = max(longest, np.unique(pair.live[path[:, 0]], return_counts=True)[1].max())
    assert seen > 200
    assert longest == 10  # as long as the product holds a key picture


def test_missing_seconds_are_rows_of_no_picture_that_do_not_count() -> None:
    n_missing = 0
    for pair in draw_pairs(60, replace(PLAIN, hole=ALWAYS)):
        missing = pair.live == NO_PICTURE
        n_missing += int(missing.sum())
        assert not pair.counted[missing].any()
    assert n_missing > 60


def test_beside_its_band_a_matrix_is_zero_and_does_not_count() -> None:
    for pair in draw_pairs(60, replace(PLAIN, band=ALWAYS)):
        known = pair.counted.any(axis=0)
        assert 16 <= known.sum() < 32
        assert (pair.ref[~known] == NO_PICTURE).all()
        assert not pair.counted[:, ~known].any()
        assert (np.diff(np.flatnonzero(known)) == 1).all()


def test_rows_before_the_stream_and_columns_beyond_the_reference_are_outside() -> None:
    for pair in draw_pairs(100, BroadcastProbabilities(stream_start=ALWAYS, hole=0, band=0, black=0, shared=0)):
        missing = (pair.live == NO_PICTURE)[:, None] | (pair.ref == NO_PICTURE)[None, :]
        assert np.array_equal(pair.inside, ~missing)
        assert not (pair.on_path & ~pair.inside).any()
        assert not pair.inside[0].any()


def test_off_speed_copies_are_paths_without_holes() -> None:
    slopes: list[float] = []
    for pair in draw_pairs(200, replace(PLAIN, off_speed=ALWAYS)):
        path = np.argwhere(pair.on_path)
        steps = {(int(a), int(b)) for a, b in np.diff(path, axis=0)}
        assert steps <= {(1, 1), (0, 1), (1, 0)}
        if len(path) > 12:
            slopes.append((path[-1, 1] - path[0, 1]) / (path[-1, 0] - path[0, 0]))
    assert min(slopes) < 0.7
    assert max(slopes) > 1.6


def test_the_counterpart_of_a_live_row_is_the_row_of_the_reference_for_that_moment() -> None:
    for pair in draw_pairs(60, PLAIN):
        rows = pair.on_path.any(axis=1)
        counterpart = TABLE.rows[pair.counterpart[rows]]
        live = TABLE.rows[pair.live[rows]]
        assert np.array_equal(counterpart[:, 0], live[:, 0])
        assert (np.abs(counterpart[:, 1] - live[:, 1]) <= 0.25).all()
        assert (pair.counterpart[TABLE.rows[pair.live, 0] != TABLE.rows[pair.ref, 0].max()] == NO_PICTURE).all()


def test_a_batch_has_no_step_to_learn_outside_the_matrix() -> None:
    pairs = draw_pairs(40, BroadcastProbabilities(stream_start=ALWAYS))
    batch = batch_of(pairs)
    assert batch.step.shape == (40, 23, 31, 3)
    assert batch.step.any()
    for k, pair in enumerate(pairs):
        inside = pair.inside
        complete = inside[:-1, :-1] & inside[1:, :-1] & inside[:-1, 1:] & inside[1:, 1:]
        assert not batch.step[k].numpy()[~complete].any()
        assert not batch.counted[k].numpy()[~inside].any()


def test_the_same_seed_draws_the_same_pairs() -> None:
    a, b = draw_pairs(20, BroadcastProbabilities()), draw_pairs(20, BroadcastProbabilities())
    assert all(
        np.array_equal(x.live, y.live) and np.array_equal(x.on_path, y.on_path) for x, y in zip(a, b, strict=True)
    )
