"""The matcher: bands open on candidates, stay bounded, and go with their reference."""

from __future__ import annotations

import pytest

from monitor.matching.matcher import IDLE_S, MAX_BANDS, Matcher, MatchParameters
from monitor.matching.stitching import SegmentView
from monitor.matching.tiles import HALO
from reference_db.search.index import ReferenceIndex
from tests.support.planted_channels import FILMS, Part, library, plant, quick_models

INDEX = library(FILMS).index


def push(matcher: Matcher, parts: list[Part], index: ReferenceIndex = INDEX) -> list[SegmentView]:
    """The views of each second's open segments and of those that closed in it."""
    stream, views = plant(parts), list[SegmentView]()
    first_s = 0 if matcher.window.newest_s is None else matcher.window.newest_s + 1
    for sample, (row, informative) in zip(stream.samples, stream.rows, strict=True):
        for live in matcher.window.push(first_s + sample.second, row, informative):
            hits = index.search(row[None], matcher.matching.hits) if informative else None
            views += matcher.apply(quick_models().read(matcher.plan(live, hits, index)))
    return views


def test_a_copy_is_one_open_segment_and_one_closed_one() -> None:
    matcher = Matcher(MatchParameters())
    views = push(matcher, [Part(10, noise=1.0), Part(30, "swift", 20, noise=0.2), Part(30, noise=1.0)])
    assert {view.reference for view in views if view.score > 0.5} == {"swift"}
    (closed,) = [view for view in views if not view.is_open and view.score > 0.5]
    assert (closed.live_start_s, closed.live_end_s) == pytest.approx((10, 40), abs=1)
    assert (closed.ref_start_s, closed.ref_end_s) == pytest.approx((20, 50), abs=1)
    refined = matcher.refined(closed)
    assert (refined.live_start_s, refined.live_end_s) == pytest.approx((10, 40), abs=1)


def test_finish_closes_what_is_open() -> None:
    matcher = Matcher(MatchParameters())
    push(matcher, [Part(5, noise=1.0), Part(20, "swift", 20, noise=0.2)])
    (last,) = [view for view in matcher.finish() if view.score > 0.5]
    assert (last.is_open, last.live_end_s) == (False, 25)


def test_bands_are_bounded_and_close_when_idle() -> None:
    matcher = Matcher(MatchParameters())
    push(matcher, [Part(3, film, start, noise=0.4) for start in (0, 30) for film in FILMS] * 3)
    assert 0 < len(matcher._readings) <= MAX_BANDS
    push(matcher, [Part(2 * IDLE_S + HALO, noise=1.0, black=True)])
    assert matcher._readings == []
    assert matcher.n_open_paths == 0


def test_paths_of_a_removed_reference_are_dropped() -> None:
    matcher = Matcher(MatchParameters())
    push(matcher, [Part(5, noise=1.0), Part(20, "swift", 20, noise=0.2, beside="other", beside_from_s=5)])
    assert matcher.features(INDEX.references[0].id) != (None, None)
    without_swift = library(("other", "slow", "long")).index
    assert "swift" in matcher.drop_gone(without_swift)
    later = push(matcher, [Part(10, "other", 25, noise=0.2)], without_swift)
    assert {view.reference for view in later if view.score > 0.5} == {"other"}


def test_a_restored_matcher_returns_what_dropped_out_of_the_index() -> None:
    matcher, restored = Matcher(MatchParameters()), Matcher(MatchParameters())
    push(matcher, [Part(5, noise=1.0), Part(20, "swift", 20, noise=0.2)])
    assert restored.restore(matcher.state(), library(("other", "slow", "long")).index) >= {"swift"}
    assert [view for view in restored.finish() if view.reference == "swift"] == []
