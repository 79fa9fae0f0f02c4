"""Changes: whether what changes from second to second in the stream is what changes in the reference.

Whole pictures of one fixed camera, studio or road look alike at any minute; only what moves in them differs. So the
rows of both sides are compared about their own means: what stands still cancels, and the correlation of the rest is
high for a copy, also an edited one, and near zero for another recording of the same scene.

Two kinds of scenes have no changes to compare: those that stand still, and those whose movement is over within a second
(ripples on a lake, a turning antenna), where a copy that is sampled half a second out of phase shows other changes too.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = NDArray[np.float32]  # [seconds, 512]

MIN_PAIRS = 3  # fewer seconds have no changes to speak of
STILL = 0.1  # root mean square distance of rows from their mean, below which a scene stands still
NEAR_S = 2  # seconds before and after a second that it is compared with
LOCAL_NOISE = 1e-3  # squared energy below which a second does not change
EACH_SECOND = 2.5  # times the correlation second by second, which is lower; in copies 2.5 times it exceeds the other
STEADY = 0.1  # correlation of neighbouring seconds of a reference, below which its movement is too quick to compare
AROUND_S = 10  # seconds around a segment in which that is judged
MIN_START = 0.2  # correlation that an alert needs to start: 19 in 20 copies have it after six seconds
MIN_END = 0.2  # that a whole copy needs
MIN_LONG, LONG_S = 0.28, 30  # that a longer one needs: over half a minute, chance counts for less


def min_change(seconds: float) -> float:
    """The correlation that a copy of this length needs in the end."""
    return MIN_LONG if seconds >= LONG_S else MIN_END


def change_correlation(lives: Rows, refs: Rows) -> float | None:
    """Correlation of the changes of paired rows; None if the reference stands still there, or for too few rows.

    The lower of two: about the mean of all rows, and second by second about the seconds around each. The latter is
    lower where only a cut or a passer-by coincides: in a copy every second has the changes of its film.
    """
    whole = _whole_correlation(lives, refs)
    return None if whole is None else min(whole, EACH_SECOND * _local_correlation(lives, refs))


def _whole_correlation(lives: Rows, refs: Rows) -> float | None:
    if len(lives) < MIN_PAIRS:
        return None
    live, ref = lives - lives.mean(axis=0), refs - refs.mean(axis=0)
    live_energy, ref_energy = float(np.vdot(live, live)), float(np.vdot(ref, ref))
    if ref_energy < STILL * STILL * len(refs):
        return None
    return float(np.vdot(live, ref)) / float(np.sqrt(max(live_energy * ref_energy, 1e-12)))


def _local_correlation(lives: Rows, refs: Rows) -> float:
    """The mean over the seconds of their correlation about the seconds around each."""
    live, ref = lives - _local_means(lives), refs - _local_means(refs)
    energies = np.einsum("ij,ij->i", live, live) * np.einsum("ij,ij->i", ref, ref)
    return float((np.einsum("ij,ij->i", live, ref) / np.sqrt(energies + LOCAL_NOISE)).mean())


def _local_means(rows: Rows) -> Rows:
    """The mean of the five rows around each; at the ends, of the first or the last five."""
    n = len(rows)
    sums = np.concatenate([np.zeros((1, rows.shape[1]), rows.dtype), np.cumsum(rows, axis=0)])
    first = np.clip(np.arange(n) - NEAR_S, 0, max(0, n - 2 * NEAR_S - 1))
    last = np.minimum(first + 2 * NEAR_S + 1, n)
    return np.asarray((sums[last] - sums[first]) / (last - first)[:, None])


def is_steady(rows: Rows) -> bool:
    """Whether what changes in these consecutive seconds of a reference is still there a second later."""
    correlation = _whole_correlation(rows[:-1], rows[1:])
    return correlation is not None and correlation >= STEADY
