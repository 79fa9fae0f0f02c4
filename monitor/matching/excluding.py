"""Excluding: what is left of a segment when spans of its reference must not count.

Paths are walked and named as if nothing were excluded, so an alert's id does not depend on exclusions added while it is
open; only the segment's view does. A path's weight is taken to lie evenly along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from monitor.matching.paths import AlignmentPath, soft_weight
from monitor.matching.stitching import Scoring, SegmentView

Spans: TypeAlias = Sequence[tuple[float, float]]  # half-open seconds of a reference


def without(view: SegmentView, spans: Spans, scoring: Scoring) -> SegmentView:
    """The view with only the evidence outside the spans; score 0 if there is none."""
    shares = [_share_outside(path, spans) for path in view.paths]
    if all(share == 1.0 for share in shares):
        return view
    n_members = sum(path.n_members * share for path, share in zip(view.paths, shares, strict=True))
    total = sum(path.sum_weight * share for path, share in zip(view.paths, shares, strict=True))
    evidence_s = sum(scoring.evidence_s([path]) * share for path, share in zip(view.paths, shares, strict=True))
    return replace(
        view,
        score=soft_weight(evidence_s, scoring.gamma) * total / n_members if n_members else 0.0,
        n_live=round(sum(path.n_live * share for path, share in zip(view.paths, shares, strict=True))),
        evidence_s=evidence_s,
        total_weight=total,
    )


def trimmed(view: SegmentView, spans: Spans) -> SegmentView:
    """The view without the excluded seconds at its ends; unchanged if all or none of it is excluded."""
    seconds = np.arange(int(view.live_start_s), int(view.live_end_s))
    columns = view.columns(seconds)
    outside = np.flatnonzero(~_inside(columns, spans))
    if not len(outside):
        return view
    first, last = int(outside[0]), int(outside[-1])
    if first > 0:
        view = replace(view, live_start_s=float(seconds[first]), ref_start_s=float(columns[first]))
    if last < len(seconds) - 1:
        view = replace(view, live_end_s=float(seconds[last] + 1), ref_end_s=float(columns[last] + 1))
    return view


def _share_outside(path: AlignmentPath, spans: Spans) -> float:
    """The share of a path's stream seconds whose reference second lies in none of the spans."""
    live, ref = np.array(sorted({path.first, *path.points, path.last})).T
    columns = np.interp(np.arange(path.first[0], path.last[0] + 1), live, ref)
    return 1.0 - float(_inside(columns, spans).mean())


def _inside(columns: NDArray[np.float64] | NDArray[np.int64], spans: Spans) -> NDArray[np.bool_]:
    inside = np.zeros(len(columns), np.bool_)
    for start_s, end_s in spans:
        inside |= (columns >= start_s) & (columns < end_s)
    return inside
