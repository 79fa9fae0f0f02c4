"""Training targets: which cells are a copy (R), and in which direction the copy continues from each (Q and d).

Input: for each second of both sides, the moment of the original that it shows. R follows from one of two rules. By id,
the paper's: frames made from the same original frame match. By time, for broadcasts that are never in phase with their
reference: each second matches the nearest second of the other side. All functions accept leading batch axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_ORIGINAL = -1  # id of a second that does not show the video: padding, other material

TIE_S = 0.2  # two seconds whose distances differ by less are equally good matches
TILT_S = 1e-6  # breaks exact ties towards the later reference second: half a second off phase is one diagonal
FAR_S = 1e9  # distance of a second without an original


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The targets of one pair, or of a batch of them along the leading axes."""

    on_path: NDArray[np.bool_]  # [..., M, N]: R
    step: NDArray[np.float32]  # [..., M-1, N-1, 3]: d, in the order right-down, right, down
    responsible: NDArray[np.bool_]  # [..., M-1, N-1]: cells with some (i, j, l) in Q

    def __post_init__(self) -> None:
        *batch, height, width = self.on_path.shape
        if self.step.shape != (*batch, height - 1, width - 1, 3):
            raise ValueError(f"step must be [..., M-1, N-1, 3] for a mask {self.on_path.shape}, got {self.step.shape}")


def labels_of(on_path: NDArray[np.bool_]) -> Labels:
    """The labels of R [..., M, N]; right-down takes precedence, right and down share where both stay in R."""
    right_down, right, down = on_path[..., 1:, 1:], on_path[..., :-1, 1:], on_path[..., 1:, :-1]
    in_q = np.stack([right_down, right & ~right_down, down & ~right_down], axis=-1)
    step = in_q.astype(np.float32)
    step[in_q[..., 1] & in_q[..., 2], 1:] = 0.5
    return Labels(on_path, step, np.logical_or.reduce(in_q, axis=-1))


def label_by_id(live_ids: NDArray[np.int64], ref_ids: NDArray[np.int64]) -> Labels:
    """The paper's labels of two sequences of ids of original frames; NO_ORIGINAL matches nothing."""
    return labels_of(match_by_id(live_ids, ref_ids))


def match_by_id(live_ids: NDArray[np.int64], ref_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """R = {(i, j): i' = j'} as [..., M, N]."""
    live, ref = live_ids[..., :, None], ref_ids[..., None, :]
    matched: NDArray[np.bool_] = (live == ref) & (live != NO_ORIGINAL)
    return matched


def match_by_time(
    live_s: NDArray[np.float64], ref_s: NDArray[np.float64], reach_s: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """R [..., M, N] by nearest time, and the cells that are nearly as near, whose mask label is not certain.

    Times are moments of the original, NaN where there is none. Each second is matched with the nearest one of the other
    side, and with all that show the same moment, if they are at most `reach_s` away: half the time between two frames
    of the faster side. So a copy at any speed is a path without holes.
    """
    later = live_s[..., :, None] - ref_s[..., None, :]
    apart = np.where(np.isnan(later), FAR_S, np.abs(later + TILT_S))
    in_reach = apart <= reach_s + TILT_S / 2
    nearest_ref = _first_smallest(apart, axis=-1)
    nearest_live = _first_smallest(apart, axis=-2)
    on_path = (nearest_ref | nearest_live | (later == 0)) & in_reach
    beyond_row = apart - apart.min(axis=-1, keepdims=True)
    beyond_col = apart - apart.min(axis=-2, keepdims=True)
    tied = ((beyond_row < TIE_S) | (beyond_col < TIE_S)) & (apart <= reach_s + TIE_S)
    return on_path, tied & ~on_path


def _first_smallest(values: NDArray[np.float64], axis: int) -> NDArray[np.bool_]:
    """True at the first smallest value along an axis."""
    chosen = np.zeros(values.shape, bool)
    np.put_along_axis(chosen, np.expand_dims(values.argmin(axis=axis), axis), True, axis=axis)
    return chosen
