"""Excluding: a segment without excluded spans of its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monitor.matching.excluding import trimmed, without
from monitor.matching.paths import AlignmentPath, soft_weight
from monitor.matching.stitching import Scoring, SegmentView
from reference_db.store.catalog import ReferenceId

SCORING = Scoring()


def view_of(n: int = 20) -> SegmentView:
    """Stream seconds 100 to 100 + n show the reference from its second 50 on."""
    points = tuple((100 + i, 50 + i) for i in range(n))
    path = AlignmentPath(points[0], points[0], points[-1], n, n, 0.8 * n, float(n), (0.0, 0.0, 0.0, 0.0), points)
    score = 0.8 * soft_weight(n, SCORING.gamma)
    return SegmentView(ReferenceId("film"), (100, 50), 100, 100 + n, 50, 50 + n, score, n, n, 0.8 * n, (path,), True)


def test_spans_elsewhere_change_nothing() -> None:
    view = view_of()
    assert without(view, [(0.0, 50.0), (70.0, 90.0)], SCORING) is view
    assert trimmed(view, [(0.0, 50.0), (70.0, 90.0)]) is view


def test_the_evidence_outside_the_spans_remains() -> None:
    view = without(view_of(), [(50.0, 65.0)], SCORING)
    assert (view.n_live, view.evidence_s, view.total_weight) == pytest.approx((5, 5, 4))
    assert view.score == pytest.approx(0.8 * soft_weight(5, SCORING.gamma))
    assert (view.name, view.live_start_s, view.live_end_s) == (view_of().name, 100, 120)  # its name and span stay


def test_a_view_inside_a_span_has_score_zero_and_is_not_trimmed() -> None:
    view = view_of()
    assert without(view, [(40.0, 80.0)], SCORING).score == 0.0
    assert trimmed(view, [(40.0, 80.0)]) is view


def test_excluded_seconds_are_trimmed_at_the_ends_only() -> None:
    view = trimmed(view_of(), [(45.0, 53.0), (58.0, 60.0), (66.5, 90.0)])
    assert (view.live_start_s, view.live_end_s, view.ref_start_s, view.ref_end_s) == (103, 117, 53, 67)
    assert replace(view, live_start_s=100, live_end_s=120, ref_start_s=50, ref_end_s=70) == view_of()
