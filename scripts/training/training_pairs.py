"""Training pairs: two sequences of rows of the feature table, and which cells show the same moment of the same video.

`paper_pair` is the paper's: two temporal edits of one section, trimmed or padded to 16 frames, labelled by id.
`broadcast_pair` is ours: a section of a broadcast, in which a copy may begin and end between other programmes, against
a longer reference; out of phase, at any speed, held, frozen or cut; or with nothing in common but black, an ident or a
still picture. A pair holds row indices only, so drawing one costs no arithmetic on features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.feature_table import CLEAN, EDITED, NO_PICTURE, EncodedClip, FeatureTable
from training.labels import NO_ORIGINAL, labels_of, match_by_id, match_by_time

Rows = NDArray[np.int64]  # row indices of the table
Times = NDArray[np.float64]  # moments of the original in seconds, NaN for other material

RAW_FPS = 2  # the paper samples raw video at 2 fps: half the default speed
MAX_FROZEN = 4
MAX_DELETED = 4
MIN_MATCHED = 4  # frames that anchor and positive share at least
TEMPORAL_EDITS = ("speed", "freeze", "deletion", "nothing")

BROADCAST_SPEEDS = (0.8, 1.25, 1.5)  # usual changes of speed
KEY_PICTURES_S = (2, 2, 3, 4, 5, 8, 10)  # seconds between key pictures, which are held; 10 is the product's limit
MIN_COPY_ROWS = 3  # of a copy, in the tile


@dataclass(frozen=True, slots=True)
class BroadcastProbabilities:
    """The probability of each variation of a broadcast pair."""

    negative: float = 0.25  # nothing in common
    off_speed: float = 0.4
    freeze: float = 0.12
    cut: float = 0.18
    held: float = 0.15  # the channel is decoded at key frames only
    edited_reference: float = 0.15  # the reference is an edited version too
    black: float = 0.12  # a run of black between programmes
    stream_start: float = 0.1  # the first rows lie before the start of the stream
    elsewhere: float = 0.05  # the copy is of another section than the band of the reference
    hole: float = 0.06  # some seconds of the stream are missing
    band: float = 0.2  # the matrix is known for a band of columns only, and zero beside it
    shared: float = 0.5  # of the negatives: both sides have black, an ident or a still picture in common


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One training matrix; `live` and `ref` begin with the context that a sequence encoder needs."""

    live: Rows  # [context + M]
    ref: Rows  # [context + N]
    on_path: NDArray[np.bool_]  # [M, N]: R
    counted: NDArray[np.bool_]  # [M, N]: cells whose mask label is certain
    inside: NDArray[np.bool_]  # [M, N]: cells of the matrix, without padding
    counterpart: Rows  # [M]: the row of the reference for the moment of each live row, NO_PICTURE for other material


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pairs of one shape as tensors."""

    live: Tensor  # [B, context + M] int64
    ref: Tensor
    on_path: Tensor  # [B, M, N] bool
    counted: Tensor
    inside: Tensor
    counterpart: Tensor  # [B, M] int64
    step: Tensor  # [B, M-1, N-1, 3] float32: d, zero where a cell of the 2x2 lies outside


def batch_of(pairs: Sequence[Pair]) -> Batch:
    """The pairs stacked, with their step targets."""
    inside = np.stack([pair.inside for pair in pairs])
    labels = labels_of(np.stack([pair.on_path for pair in pairs]))
    within = inside[:, :-1, :-1] & inside[:, 1:, :-1] & inside[:, :-1, 1:] & inside[:, 1:, 1:]
    return Batch(
        live=torch.from_numpy(np.stack([pair.live for pair in pairs])),
        ref=torch.from_numpy(np.stack([pair.ref for pair in pairs])),
        on_path=torch.from_numpy(labels.on_path),
        counted=torch.from_numpy(np.stack([pair.counted for pair in pairs]) & inside),
        inside=torch.from_numpy(inside),
        counterpart=torch.from_numpy(np.stack([pair.counterpart for pair in pairs])),
        step=torch.from_numpy(labels.step * within[..., None]),
    )


# --- the paper's pairs ------------------------------------------------------------------------------------------------


def temporal_edit(rng: np.random.Generator, n_raw: int, kind: str | None = None) -> NDArray[np.int64]:
    """Which raw frames (2 fps, counted from 0) the edited sequence shows, in order; one of TEMPORAL_EDITS."""
    kind = kind or str(rng.choice(TEMPORAL_EDITS))
    if kind == "speed":
        return change_speed(rng, n_raw, rng.uniform(0.5, 2.0))
    frames = np.arange(0, n_raw, RAW_FPS)  # the default of 1 fps
    if kind == "freeze":
        at, n_more = int(rng.integers(0, len(frames))), int(rng.integers(1, MAX_FROZEN + 1))
        return np.insert(frames, at, np.full(n_more, frames[at]))
    if kind == "deletion":
        n_deleted = min(int(rng.integers(1, MAX_DELETED + 1)), len(frames) - 1)
        at = int(rng.integers(0, len(frames) - n_deleted + 1))
        return np.delete(frames, np.s_[at : at + n_deleted])
    return frames


def change_speed(rng: np.random.Generator, n_raw: int, speed: float) -> NDArray[np.int64]:
    """Raw frames are half speed; of every 2 * speed of them a random one is retained."""
    edges = np.floor(np.arange(int(n_raw / (RAW_FPS * speed)) + 1) * RAW_FPS * speed + 1e-9).astype(np.int64)
    frames: NDArray[np.int64] = rng.integers(edges[:-1], edges[1:])
    return frames


def paper_pair(rng: np.random.Generator, table: FeatureTable, length: int = 16, context: int = 0) -> Pair:
    """Anchor and positive: two edits of one video, temporal and spatial, with at least 4 frames matched."""
    while True:
        video = table.draw_video(rng)
        anchor_clip, positive_clip = _draw_two_clips(rng, table, video)
        begin = max(anchor_clip.start_s, positive_clip.start_s)
        n_raw = int((min(anchor_clip.end_s, positive_clip.end_s) - begin) * RAW_FPS) + 1
        if n_raw < RAW_FPS * MIN_MATCHED:
            continue
        anchor, positive = temporal_edit(rng, n_raw), temporal_edit(rng, n_raw)
        live_ids, live = _trim(rng, anchor, anchor_clip, begin, length, context)
        ref_ids, ref = _trim(rng, positive, positive_clip, begin, length, context)
        on_path = match_by_id(live_ids, ref_ids)
        if on_path.any(axis=1).sum() >= MIN_MATCHED:
            everywhere = np.ones_like(on_path)
            counterpart = positive_clip.rows_at(np.where(live_ids == NO_ORIGINAL, np.nan, begin + live_ids / RAW_FPS))
            return Pair(live, ref, on_path, everywhere, everywhere, counterpart)


def _trim(
    rng: np.random.Generator, frames: NDArray[np.int64], clip: EncodedClip, begin: float, length: int, context: int
) -> tuple[NDArray[np.int64], Rows]:
    """The ids of `length` frames at a random place of an edited sequence, and their rows after those of the context."""
    first = int(rng.integers(0, max(0, len(frames) - length) + 1))
    after = np.full(max(0, first + length - len(frames)), NO_ORIGINAL)
    before = np.full(context, NO_ORIGINAL)
    ids = np.concatenate([before, frames, after])[first : first + context + length]
    rows = clip.rows_at(np.where(ids == NO_ORIGINAL, np.nan, begin + ids / RAW_FPS))
    return ids[context:], rows


def _draw_two_clips(rng: np.random.Generator, table: FeatureTable, video: str) -> tuple[EncodedClip, EncodedClip]:
    edited = table.clips_of(video, EDITED)
    first = edited[rng.integers(len(edited))]
    overlapping = [
        clip
        for clip in edited
        if clip is not first and min(clip.end_s, first.end_s) - max(clip.start_s, first.start_s) > 8
    ]
    others = [*overlapping, *table.clips_of(video, CLEAN)]
    return first, others[rng.integers(len(others))]


# --- pairs as in production -------------------------------------------------------------------------------------------


def broadcast_pair(
    rng: np.random.Generator,
    table: FeatureTable,
    height: int,
    width: int,
    context: int = 0,
    probability: BroadcastProbabilities | None = None,
) -> Pair:
    """Rows of a broadcast against a band of one reference, on full seconds of each side's own clock."""
    probability = probability or BroadcastProbabilities()
    video = table.draw_video(rng)
    live_side = _LiveSide(rng, table, context + height, video)
    if rng.random() < probability.black:
        live_side.insert_black()
    is_copy = rng.random() >= probability.negative
    middle_s = float(rng.uniform(0, table.clips_of(video, CLEAN)[0].end_s))
    if is_copy:
        copied_s = live_side.insert_copy(probability, context)
        middle_s = middle_s if rng.random() < probability.elsewhere else copied_s
    ref, ref_s, ref_clip = _reference(rng, table, video, middle_s, width, context, probability)
    if not is_copy and rng.random() < probability.shared:
        _insert_common(rng, table, live_side, ref, context)
    if rng.random() < probability.held:
        live_side.hold_pictures(int(rng.choice(KEY_PICTURES_S)))
    if rng.random() < probability.hole:
        live_side.drop_seconds()
    on_path, tied = match_by_time(live_side.moments_s[context:], ref_s[context:], 0.5 * max(1.0, live_side.speed))
    inside = np.ones((height, width), bool) & ~np.isnan(ref_s[context:])
    if rng.random() < probability.stream_start:
        n_before = int(rng.integers(1, height // 2))
        live_side.rows[: context + n_before] = NO_PICTURE
        inside[:n_before] = False
    unknown = np.zeros(width, bool)
    if rng.random() < probability.band:
        n_known = int(rng.integers(width // 2, width))
        first = int(rng.integers(0, width - n_known + 1))
        unknown[:first] = unknown[first + n_known :] = True
        ref[context:][unknown] = NO_PICTURE
    counted = ~tied & ~live_side.ambiguous[context:, None] & ~unknown
    counterpart = ref_clip.rows_at(live_side.moments_s[context:])
    return Pair(live_side.rows, ref, on_path & inside, counted, inside, counterpart)


class _LiveSide:
    """A section of a broadcast, second by second: other programmes, in which a copy may be inserted."""

    def __init__(self, rng: np.random.Generator, table: FeatureTable, length: int, video: str) -> None:
        self.rng, self.table, self.length, self.video = rng, table, length, video
        self.speed = 1.0
        self.rows = self._programmes(length)
        self.moments_s: Times = np.full(length, np.nan)  # the moment of `video` that each second shows
        self.ambiguous = np.zeros(length, bool)  # rows whose label is not certain

    def _programmes(self, n: int) -> Rows:
        """Edited sections of other videos, one after another."""
        out: list[Rows] = []
        while sum(map(len, out)) < n:
            clips = [
                clip
                for clip in self.table.clips_of(self.table.draw_video(self.rng), EDITED)
                if clip.video != self.video
            ]
            if clips:
                clip = clips[self.rng.integers(len(clips))]
                begin = self.rng.uniform(clip.start_s, max(clip.start_s, clip.end_s - 6))
                moments = np.arange(begin, clip.end_s, 1.0)[: self.rng.integers(6, 30)]
                out.append(clip.rows_at(moments))
        return np.concatenate(out)[:n]

    def insert_black(self) -> None:
        """Inserts a run of black; a copy inserted later may cover part of it.

        Black, flat and striped pictures carry no information, so the matrix is zero there, as in production.
        """
        at, n = self.rng.integers(0, self.length), self.rng.integers(1, 6)
        self.rows[at : at + n] = NO_PICTURE

    def insert_copy(self, probability: BroadcastProbabilities, context: int) -> float:
        """Inserts a section of the video; returns the mean moment of what the tile shows of it."""
        rng = self.rng
        clips = self.table.clips_of(self.video, EDITED)
        clip = clips[rng.integers(len(clips))]
        if rng.random() < probability.off_speed:
            self.speed = float(rng.choice(BROADCAST_SPEEDS) if rng.random() < 0.5 else rng.uniform(0.5, 2.0))
        longest = int((clip.end_s - clip.start_s) / self.speed)
        n = int(rng.integers(MIN_COPY_ROWS, longest + 1)) if longest > MIN_COPY_ROWS else max(1, longest)
        if rng.random() < 0.5:
            n = max(n, longest)  # so that long copies fill the tile
        # The copy begins on a picture of the clip, so that at full speed every row shows its exact moment.
        last = int(np.searchsorted(clip.times_s, clip.end_s - (n - 1) * self.speed + 1e-6))
        begin = float(clip.times_s[rng.integers(max(1, last))])
        moments = _freeze_or_cut(rng, begin + self.speed * np.arange(float(n)), probability)
        n = len(moments)
        # The copy may begin before the tile and end after it, but the tile shows some of it.
        tile = self.length - context
        n_shown = min(MIN_COPY_ROWS, n)
        first = context + int(rng.integers(n_shown - n, tile - n_shown + 1))
        seconds = np.arange(max(0, first), min(self.length, first + n))
        self.rows[seconds] = clip.rows_at(moments[seconds - first])
        self.moments_s[seconds] = moments[seconds - first]
        return float(np.nanmean(self.moments_s[context:]))

    def drop_seconds(self) -> None:
        """Removes some seconds; a copy continues behind the gap, so its mask there is not certain."""
        at, n = self.rng.integers(0, self.length), self.rng.integers(1, 4)
        self.rows[at : at + n] = NO_PICTURE
        self.ambiguous[at : at + n] = True

    def hold_pictures(self, every: int) -> None:
        """Repeats pictures, with a new one every so many seconds; the labels follow the true moments."""
        second = np.arange(self.length)
        key = np.maximum(0, second - (second + int(self.rng.integers(every))) % every)
        is_other = np.isnan(self.moments_s)
        self.ambiguous |= is_other != is_other[key]
        self.rows = self.rows[key]


def _freeze_or_cut(rng: np.random.Generator, moments: Times, probability: BroadcastProbabilities) -> Times:
    """The moments with one repeated, with some removed, or unchanged."""
    drawn = rng.random()
    if len(moments) < 2 * MIN_COPY_ROWS or drawn >= probability.freeze + probability.cut:
        return moments
    at = int(rng.integers(MIN_COPY_ROWS, len(moments) - MIN_COPY_ROWS + 1))
    if drawn < probability.freeze:
        return np.insert(moments, at, np.full(rng.integers(1, MAX_FROZEN + 1), moments[at - 1]))
    return np.delete(moments, np.s_[at : at + int(rng.integers(1, MAX_DELETED + 1))])


def _reference(
    rng: np.random.Generator,
    table: FeatureTable,
    video: str,
    middle_s: float,
    width: int,
    context: int,
    probability: BroadcastProbabilities,
) -> tuple[Rows, Times, EncodedClip]:
    """Rows and moments of a band of the reference around a moment; NO_PICTURE beyond its ends."""
    clean = table.clips_of(video, CLEAN)[0]
    clip = clean
    if rng.random() < probability.edited_reference:
        around = [t for t in table.clips_of(video, EDITED) if t.start_s <= middle_s <= t.end_s]
        clip = around[rng.integers(len(around))] if around else clean
    first = np.floor(middle_s - rng.uniform(0.15, 0.85) * width)
    moments = first - context + rng.choice([0.0, 0.5]) + np.arange(context + width)
    rows = clip.rows_at(moments)
    return rows, clip.moments_of(rows), clip


def _insert_common(
    rng: np.random.Generator, table: FeatureTable, live_side: _LiveSide, ref: Rows, context: int
) -> None:
    """Inserts common material that is no copy into both sides: black, a short ident, or a still picture on each."""
    what = rng.choice(["black", "ident", "still"])
    places = np.flatnonzero(ref[context:] != NO_PICTURE) + context
    if len(places) == 0:
        return
    at_live = int(rng.integers(context, len(live_side.rows)))
    at_ref = int(rng.choice(places))
    if what == "black":
        live_side.rows[at_live : at_live + rng.integers(1, 7)] = NO_PICTURE
        ref[places[(places >= at_ref) & (places < at_ref + rng.integers(1, 7))]] = NO_PICTURE
    elif what == "ident":
        n = int(rng.integers(1, 4))
        clips = table.clips_of(table.draw_video(rng), EDITED)
        clip = clips[rng.integers(len(clips))]
        still = np.full(n, rng.uniform(clip.start_s, clip.end_s))
        live_side.rows[at_live : at_live + n] = clip.rows_at(still)[: len(live_side.rows) - at_live]
        chosen = places[(places >= at_ref) & (places < at_ref + n)]
        ref[chosen] = clip.rows_at(still)[: len(chosen)]
    else:
        n = int(rng.integers(8, 40))
        live_side.rows[at_live : at_live + n] = live_side.rows[at_live]
        ref[places[(places >= at_ref) & (places < at_ref + n)]] = ref[at_ref]
