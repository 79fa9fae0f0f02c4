"""Training pairs: two sequences of bank rows, and which of their cells are the same moment of the same video.

`paper_pair` is the paper's: two temporal edits of one stretch, trimmed or padded to 16 frames, labelled by id.
`broadcast_pair` is ours: a stretch of air, in which a copy may begin and end between foreign programmes, against a
reference that goes on; out of phase, at any speed, held, frozen or cut; or with nothing in common but black, an ident
or stillness. A pair holds indices only, so drawing one costs no arithmetic on features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.feature_bank import CLEAN, EDITED, NOTHING, FeatureBank, Take
from training.labels import NO_ORIGINAL, labels_of, matched_by_id, matched_by_time

Rows = NDArray[np.int64]  # indices into the bank
Times = NDArray[np.float64]  # moments of the original in seconds, NaN for foreign material

RAW_FPS = 2  # the paper samples raw video at 2 fps: half the default speed
MAX_FROZEN = 4
MAX_DELETED = 4
MIN_MATCHED = 4  # frames that anchor and positive share at least
TEMPORAL_EDITS = ("speed", "freeze", "deletion", "nothing")

AIR_SPEEDS = (0.8, 1.25, 1.5)  # what stations do on purpose
MIN_AIRED = 3  # rows of a copy that a tile shows at least


@dataclass(frozen=True, slots=True)
class AirChances:
    """How often a broadcast pair is what; the rest of each is the plain case."""

    negative: float = 0.25  # nothing in common
    off_speed: float = 0.4
    freeze: float = 0.12
    cut: float = 0.18
    held: float = 0.15  # the air shows key frames only
    edited_reference: float = 0.15  # the reference is itself an edited version
    black: float = 0.12  # a run of black between programmes
    stream_start: float = 0.1  # the first rows lie before the stream began
    elsewhere: float = 0.05  # a copy is on air, but of another stretch than the reference's band
    hole: float = 0.06  # some seconds of the air were not seen
    band: float = 0.2  # the matrix is only known for a band of columns, and zero beside it
    shared: float = 0.5  # of the negatives: both sides have black, an ident or stillness in common


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One matrix to learn from; `live` and `ref` begin with the context that a sequence encoder looks back on."""

    live: Rows  # [context + M]
    ref: Rows  # [context + N]
    on_path: NDArray[np.bool_]  # [M, N]: R
    counted: NDArray[np.bool_]  # [M, N]: cells whose mask label is certain
    inside: NDArray[np.bool_]  # [M, N]: cells of the true matrix
    twin: Rows  # [M]: what the reference shows at the moment of each live row, NOTHING for foreign material


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pairs of one shape as tensors."""

    live: Tensor  # [B, context + M] int64
    ref: Tensor
    on_path: Tensor  # [B, M, N] bool
    counted: Tensor
    inside: Tensor
    twin: Tensor  # [B, M] int64
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
        twin=torch.from_numpy(np.stack([pair.twin for pair in pairs])),
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
        n_gone = min(int(rng.integers(1, MAX_DELETED + 1)), len(frames) - 1)
        at = int(rng.integers(0, len(frames) - n_gone + 1))
        return np.delete(frames, np.s_[at : at + n_gone])
    return frames


def change_speed(rng: np.random.Generator, n_raw: int, speed: float) -> NDArray[np.int64]:
    """Raw frames are half speed; of every 2 * speed of them one is kept, whichever, and the rest removed."""
    edges = np.floor(np.arange(int(n_raw / (RAW_FPS * speed)) + 1) * RAW_FPS * speed + 1e-9).astype(np.int64)
    kept: NDArray[np.int64] = rng.integers(edges[:-1], edges[1:])
    return kept


def paper_pair(rng: np.random.Generator, bank: FeatureBank, length: int = 16, context: int = 0) -> Pair:
    """Anchor and positive: two edits of one video, temporal and spatial, with at least 4 frames matched."""
    while True:
        video = bank.draw_video(rng)
        anchor_take, positive_take = _two_takes(rng, bank, video)
        begin = max(anchor_take.start_s, positive_take.start_s)
        n_raw = int((min(anchor_take.end_s, positive_take.end_s) - begin) * RAW_FPS) + 1
        if n_raw < RAW_FPS * MIN_MATCHED:
            continue
        anchor, positive = temporal_edit(rng, n_raw), temporal_edit(rng, n_raw)
        live_ids, live = _trimmed(rng, anchor, anchor_take, begin, length, context)
        ref_ids, ref = _trimmed(rng, positive, positive_take, begin, length, context)
        on_path = matched_by_id(live_ids, ref_ids)
        if on_path.any(axis=1).sum() >= MIN_MATCHED:
            everywhere = np.ones_like(on_path)
            twin = positive_take.rows_at(np.where(live_ids == NO_ORIGINAL, np.nan, begin + live_ids / RAW_FPS))
            return Pair(live, ref, on_path, everywhere, everywhere, twin)


def _trimmed(
    rng: np.random.Generator, frames: NDArray[np.int64], take: Take, begin: float, length: int, context: int
) -> tuple[NDArray[np.int64], Rows]:
    """The ids of `length` frames from anywhere in an edited sequence, and their rows after those of the context."""
    first = int(rng.integers(0, max(0, len(frames) - length) + 1))
    after = np.full(max(0, first + length - len(frames)), NO_ORIGINAL)
    before = np.full(context, NO_ORIGINAL)
    ids = np.concatenate([before, frames, after])[first : first + context + length]
    rows = take.rows_at(np.where(ids == NO_ORIGINAL, np.nan, begin + ids / RAW_FPS))
    return ids[context:], rows


def _two_takes(rng: np.random.Generator, bank: FeatureBank, video: str) -> tuple[Take, Take]:
    edited = bank.of(video, EDITED)
    first = edited[rng.integers(len(edited))]
    both = [
        take
        for take in edited
        if take is not first and min(take.end_s, first.end_s) - max(take.start_s, first.start_s) > 8
    ]
    others = [*both, *bank.of(video, CLEAN)]
    return first, others[rng.integers(len(others))]


# --- pairs as a monitor meets them ------------------------------------------------------------------------------------


def broadcast_pair(
    rng: np.random.Generator,
    bank: FeatureBank,
    height: int,
    width: int,
    context: int = 0,
    chances: AirChances | None = None,
) -> Pair:
    """Rows of air against a band of one reference, on whole seconds of each side's own clock."""
    chances = chances or AirChances()
    video = bank.draw_video(rng)
    air = _Air(rng, bank, context + height, video)
    if rng.random() < chances.black:
        air.black_out()
    is_copy = rng.random() >= chances.negative
    middle_s = float(rng.uniform(0, bank.of(video, CLEAN)[0].end_s))
    if is_copy:
        copied_s = air.insert_copy(chances, context)
        middle_s = middle_s if rng.random() < chances.elsewhere else copied_s
    ref, ref_s, ref_take = _reference(rng, bank, video, middle_s, width, context, chances)
    if not is_copy and rng.random() < chances.shared:
        _share(rng, bank, air, ref, context)
    if rng.random() < chances.held:
        air.hold(int(rng.integers(2, 4)))
    if rng.random() < chances.hole:
        air.lose_seconds()
    on_path, tied = matched_by_time(air.shown_s[context:], ref_s[context:], 0.5 * max(1.0, air.speed))
    inside = np.ones((height, width), bool) & ~np.isnan(ref_s[context:])
    if rng.random() < chances.stream_start:
        n_before = int(rng.integers(1, height // 2))
        air.rows[: context + n_before] = NOTHING
        inside[:n_before] = False
    unknown = np.zeros(width, bool)
    if rng.random() < chances.band:
        n_known = int(rng.integers(width // 2, width))
        first = int(rng.integers(0, width - n_known + 1))
        unknown[:first] = unknown[first + n_known :] = True
        ref[context:][unknown] = NOTHING
    counted = ~tied & ~air.doubtful[context:, None] & ~unknown
    twin = ref_take.rows_at(air.shown_s[context:])
    return Pair(air.rows, ref, on_path & inside, counted, inside, twin)


class _Air:
    """A stretch of broadcast, second by second: foreign programmes, in which a copy may be inserted."""

    def __init__(self, rng: np.random.Generator, bank: FeatureBank, length: int, video: str) -> None:
        self.rng, self.bank, self.length, self.video = rng, bank, length, video
        self.speed = 1.0
        self.rows = self._programmes(length)
        self.shown_s: Times = np.full(length, np.nan)  # the moment of `video` that is on air
        self.doubtful = np.zeros(length, bool)  # rows whose label cannot be told

    def _programmes(self, n: int) -> Rows:
        """Stretches of other videos, one after another, in whatever look they are aired."""
        out: list[Rows] = []
        while sum(map(len, out)) < n:
            takes = [take for take in self.bank.of(self.bank.draw_video(self.rng), EDITED) if take.video != self.video]
            if takes:
                take = takes[self.rng.integers(len(takes))]
                begin = self.rng.uniform(take.start_s, max(take.start_s, take.end_s - 6))
                moments = np.arange(begin, take.end_s, 1.0)[: self.rng.integers(6, 30)]
                out.append(take.rows_at(moments))
        return np.concatenate(out)[:n]

    def black_out(self) -> None:
        """A run of black somewhere; a copy laid over it later leaves what it does not cover.

        Black, flat and striped pictures carry no information, so the matrix is zero there, in training as on air.
        """
        at, n = self.rng.integers(0, self.length), self.rng.integers(1, 6)
        self.rows[at : at + n] = NOTHING

    def insert_copy(self, chances: AirChances, context: int) -> float:
        """Airs a stretch of the video and returns the moment of it in the middle of what the tile shows."""
        rng = self.rng
        takes = self.bank.of(self.video, EDITED)
        take = takes[rng.integers(len(takes))]
        if rng.random() < chances.off_speed:
            self.speed = float(rng.choice(AIR_SPEEDS) if rng.random() < 0.5 else rng.uniform(0.5, 2.0))
        longest = int((take.end_s - take.start_s) / self.speed)
        n = int(rng.integers(MIN_AIRED, longest + 1)) if longest > MIN_AIRED else max(1, longest)
        if rng.random() < 0.5:
            n = max(n, longest)  # long copies fill the tile
        # It begins on one of the take's pictures, so that at full speed none is off its moment.
        last = int(np.searchsorted(take.times_s, take.end_s - (n - 1) * self.speed + 1e-6))
        begin = float(take.times_s[rng.integers(max(1, last))])
        moments = _frozen_or_cut(rng, begin + self.speed * np.arange(float(n)), chances)
        n = len(moments)
        # The copy may begin before the tile and end after it, but the tile shows some of it.
        tile = self.length - context
        shown = min(MIN_AIRED, n)
        first = context + int(rng.integers(shown - n, tile - shown + 1))
        air = np.arange(max(0, first), min(self.length, first + n))
        self.rows[air] = take.rows_at(moments[air - first])
        self.shown_s[air] = moments[air - first]
        return float(np.nanmean(self.shown_s[context:]))

    def lose_seconds(self) -> None:
        """A gap in what was seen; a copy goes on behind it, so the mask there cannot be told."""
        at, n = self.rng.integers(0, self.length), self.rng.integers(1, 4)
        self.rows[at : at + n] = NOTHING
        self.doubtful[at : at + n] = True

    def hold(self, every: int) -> None:
        """Only every so many seconds a new picture: the label follows what is on air, the row what is shown."""
        second = np.arange(self.length)
        key = np.maximum(0, second - (second + int(self.rng.integers(every))) % every)
        foreign = np.isnan(self.shown_s)
        self.doubtful |= foreign != foreign[key]
        self.rows = self.rows[key]


def _frozen_or_cut(rng: np.random.Generator, moments: Times, chances: AirChances) -> Times:
    """The moments with some repeated or some left out, or as they are."""
    luck = rng.random()
    if len(moments) < 2 * MIN_AIRED or luck >= chances.freeze + chances.cut:
        return moments
    at = int(rng.integers(MIN_AIRED, len(moments) - MIN_AIRED + 1))
    if luck < chances.freeze:
        return np.insert(moments, at, np.full(rng.integers(1, MAX_FROZEN + 1), moments[at - 1]))
    return np.delete(moments, np.s_[at : at + int(rng.integers(1, MAX_DELETED + 1))])


def _reference(
    rng: np.random.Generator,
    bank: FeatureBank,
    video: str,
    middle_s: float,
    width: int,
    context: int,
    chances: AirChances,
) -> tuple[Rows, Times, Take]:
    """Rows and moments of a band of the reference about a moment; beyond its ends there is nothing."""
    clean = bank.of(video, CLEAN)[0]
    take = clean
    if rng.random() < chances.edited_reference:
        about = [t for t in bank.of(video, EDITED) if t.start_s <= middle_s <= t.end_s]
        take = about[rng.integers(len(about))] if about else clean
    first = np.floor(middle_s - rng.uniform(0.15, 0.85) * width)
    moments = first - context + rng.choice([0.0, 0.5]) + np.arange(context + width)
    rows = take.rows_at(moments)
    return rows, take.shown_s(rows), take


def _share(rng: np.random.Generator, bank: FeatureBank, air: _Air, ref: Rows, context: int) -> None:
    """Gives two strangers something in common that is no copy: black, a short ident, or each a still picture."""
    what = rng.choice(["black", "ident", "still"])
    there = np.flatnonzero(ref[context:] != NOTHING) + context
    if len(there) == 0:
        return
    at_live = int(rng.integers(context, len(air.rows)))
    at_ref = int(rng.choice(there))
    if what == "black":
        air.rows[at_live : at_live + rng.integers(1, 7)] = NOTHING
        ref[there[(there >= at_ref) & (there < at_ref + rng.integers(1, 7))]] = NOTHING
    elif what == "ident":
        n = int(rng.integers(1, 4))
        takes = bank.of(bank.draw_video(rng), EDITED)
        take = takes[rng.integers(len(takes))]
        still = np.full(n, rng.uniform(take.start_s, take.end_s))
        air.rows[at_live : at_live + n] = take.rows_at(still)[: len(air.rows) - at_live]
        held = there[(there >= at_ref) & (there < at_ref + n)]
        ref[held] = take.rows_at(still)[: len(held)]
    else:
        n = int(rng.integers(8, 40))
        air.rows[at_live : at_live + n] = air.rows[at_live]
        ref[there[(there >= at_ref) & (there < at_ref + n)]] = ref[at_ref]
