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
STEADY = 0.1  # correlation of neighbouring seconds of a reference, below which its movement is too quick to compare
AROUND_S = 10  # seconds around a segment in which that is judged
MIN_START = 0.2  # correlation that an alert needs to start: 19 in 20 copies have it after six seconds
MIN_END = 0.2  # that a whole copy needs
MIN_LONG, LONG_S = 0.28, 30  # that a longer one needs: over half a minute, chance counts for less


def min_change(seconds: float) -> float:
    """The correlation that a copy of this length needs in the end."""
    return MIN_LONG if seconds >= LONG_S else MIN_END


def change_correlation(lives: Rows, refs: Rows) -> float | None:
    """Correlation of the changes of paired rows; None if the reference stands still there, or for too few rows."""
    if len(lives) < MIN_PAIRS:
        return None
    live, ref = lives - lives.mean(axis=0), refs - refs.mean(axis=0)
    live_energy, ref_energy = float(np.vdot(live, live)), float(np.vdot(ref, ref))
    if ref_energy < STILL * STILL * len(refs):
        return None
    return float(np.vdot(live, ref)) / float(np.sqrt(max(live_energy * ref_energy, 1e-12)))


def is_steady(rows: Rows) -> bool:
    """Whether what changes in these consecutive seconds of a reference is still there a second later."""
    correlation = change_correlation(rows[:-1], rows[1:])
    return correlation is not None and correlation >= STEADY
