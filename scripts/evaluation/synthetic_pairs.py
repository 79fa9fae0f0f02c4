"""Synthetic pairs: an edited section of a video between other programmes, against the full video; and unrelated pairs.

The truth is known since the copy is made here. Temporal edits are drawn evenly (speed, freeze, cut, none), spatial
ones by `draw_edit`. Only the pictures of the copy are decoded and edited; the programmes around it are cached rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluation.recordings import PictureEncoder, Recording
from evaluation.scoring import TrueCopy
from reference_db.features.picture_detail import is_informative
from training.edits import Edit, Picture, draw_edit
from training.feature_table import raw_pictures

RAW_FPS = 4  # moments at which a copy may begin and be sampled
LENGTHS_S = (4, 6, 8, 10, 15, 20, 30, 45)
PROGRAMME_S = (8, 20)  # seconds of other material before and after a copy
TEMPORAL_EDITS = ("none", "speed", "freeze", "cut")
MAX_HELD_S = 4  # of a freeze
MAX_CUT_S = 4
SPEEDS = (0.5, 2.0)
MIN_FOR_EDIT_S = 10  # a shorter section has no temporal edit


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticPair:
    """A channel, a reference, and the copies of it in the channel; an unrelated pair has none."""

    live: Recording
    ref: Recording
    truth: tuple[TrueCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Section:
    """The section to be copied: one moment of the video for each second of the channel."""

    temporal: str
    moments_s: NDArray[np.float64]
    start_s: float
    end_s: float
    edit: Edit


def make_pairs(
    videos: Sequence[Path],
    recordings: Sequence[Recording],
    encoder: PictureEncoder,
    *,
    per_video: int = 4,
    unrelated_share: float = 0.5,
    strength: float = 0.8,
    seed: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[SyntheticPair]:
    """For every video long enough, `per_video` pairs with a copy and `unrelated_share` times as many without."""
    pairs: list[SyntheticPair] = []
    for number, (path, ref) in enumerate(zip(videos, recordings, strict=True)):
        progress(number, len(videos))
        others = [other for other in recordings if other is not ref and len(other.rows) >= min(PROGRAMME_S)]
        if len(ref.rows) < min(LENGTHS_S) + 1 or not others:
            continue
        rng = np.random.default_rng([seed, number])
        sections = [_draw_section(rng, len(ref.rows), strength) for _ in range(per_video)]
        for section, copied in zip(sections, _record(path, sections, encoder, rng), strict=True):
            pairs.append(_with_copy(f"pair{len(pairs)}", copied, section, ref, others, rng))
        for _ in range(round(per_video * unrelated_share)):
            parts = [_programme(rng, others) for _ in range(3)]
            pairs.append(SyntheticPair(_concatenate(f"pair{len(pairs)}", parts), ref, ()))
    progress(len(videos), len(videos))
    return pairs


def make_airings(
    path: Path,
    ref: Recording,
    others: Sequence[Recording],
    encoder: PictureEncoder,
    *,
    airings: int,
    length_s: int = 9,
    strength: float = 0.5,
    seed: int = 1,
) -> tuple[Recording, list[TrueCopy]]:
    """A channel that airs edited pieces of one video between pieces of `others`, and where it does."""
    others = [other for other in others if len(other.rows) >= min(PROGRAMME_S)]
    rng = np.random.default_rng([seed, len(ref.rows)])
    sections = []
    for _ in range(airings):
        length = min(length_s, len(ref.rows) - 1)
        start = float(rng.integers(0, (len(ref.rows) - 1 - length) * RAW_FPS + 1) / RAW_FPS)
        moments = start + np.arange(length, dtype=np.float64) + 0.5
        sections.append(_Section("none", moments, start, start + length, draw_edit(rng, strength)))
    parts, truth = [_programme(rng, others)], []
    for section, copied in zip(sections, _record(path, sections, encoder, rng), strict=True):
        at = sum(len(part.rows) for part in parts)
        edits = tuple(sorted({type(step).__name__.lower() for step in section.edit.steps}))
        end = at + len(copied.rows)
        truth.append(TrueCopy(path.stem, ref.name, at, end, section.start_s, section.end_s, edits))
        parts += [copied, _programme(rng, others)]
    return _concatenate(path.stem, parts), truth


def _draw_section(rng: np.random.Generator, n_seconds: int, strength: float) -> _Section:
    length = min(int(rng.choice(LENGTHS_S)), n_seconds - 1)
    start = rng.integers(0, (n_seconds - 1 - length) * RAW_FPS + 1) / RAW_FPS
    temporal = str(rng.choice(TEMPORAL_EDITS)) if length >= MIN_FOR_EDIT_S else "none"
    speed = rng.uniform(*SPEEDS) if temporal == "speed" else 1.0
    moments = start + speed * (np.arange(max(1, int(length / speed))) + 0.5)
    middle = len(moments) // 2
    if temporal == "freeze":
        moments = np.insert(moments, middle, np.full(rng.integers(2, MAX_HELD_S + 1), moments[middle]))
    elif temporal == "cut":
        moments = np.delete(moments, np.s_[middle : middle + int(rng.integers(2, MAX_CUT_S + 1))])
    return _Section(temporal, moments, float(start), float(start + length), draw_edit(rng, strength))


def _record(
    path: Path, sections: Sequence[_Section], encoder: PictureEncoder, rng: np.random.Generator
) -> list[Recording]:
    """The edited pictures of all sections of one video, encoded; the video is decoded once."""
    places = [np.round(section.moments_s * RAW_FPS).astype(int) for section in sections]
    wanted = set(np.concatenate(places).tolist())
    decoded: dict[int, Picture] = {}
    for k, picture in enumerate(raw_pictures(path, RAW_FPS)):
        if k in wanted:
            decoded[k] = picture
        if k >= max(wanted):
            break
    last = max(decoded)
    out = []
    for section, at in zip(sections, places, strict=True):
        pictures = [section.edit(decoded.get(k, decoded[last]), rng) for k in at.tolist()]
        informative = np.array([is_informative(picture) for picture in pictures])
        out.append(Recording(path.stem, encoder.encode(pictures), informative))
    return out


def _with_copy(
    name: str,
    copied: Recording,
    section: _Section,
    ref: Recording,
    others: Sequence[Recording],
    rng: np.random.Generator,
) -> SyntheticPair:
    before, after = _programme(rng, others), _programme(rng, others)
    start = len(before.rows)
    edits = sorted({type(step).__name__.lower() for step in section.edit.steps})
    if section.temporal != "none":
        edits.append(section.temporal)
    truth = TrueCopy(name, ref.name, start, start + len(copied.rows), section.start_s, section.end_s, tuple(edits))
    return SyntheticPair(_concatenate(name, [before, copied, after]), ref, (truth,))


def _programme(rng: np.random.Generator, others: Sequence[Recording]) -> Recording:
    """Some seconds of another video."""
    other = others[int(rng.integers(len(others)))]
    length = min(int(rng.integers(*PROGRAMME_S)), len(other.rows))
    first = int(rng.integers(0, len(other.rows) - length + 1))
    return Recording(other.name, other.rows[first : first + length], other.informative[first : first + length])


def _concatenate(name: str, parts: Sequence[Recording]) -> Recording:
    return Recording(
        name,
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.informative for part in parts]),
    )
