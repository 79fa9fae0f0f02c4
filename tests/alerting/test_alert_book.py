"""The alert book: which events a segment leads to, and when."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

from monitor.alerting.alert_book import AlertBook, alert_id_of
from monitor.alerting.alerts import Alert, Gap
from monitor.ingest.clock import ChannelEpoch
from monitor.matching.excluding import Spans
from monitor.matching.paths import AlignmentPath
from monitor.matching.stitching import SegmentView
from reference_db.store.catalog import Reference, ReferenceId

FILM = Reference(
    id=ReferenceId("film"),
    title="A film",
    owner="Studio",
    tags={},
    content_sha256="0" * 64,
    n_seconds=100,
    n_uninformative=0,
    encoder_id="enc",
    features_sha256="0" * 64,
    added_at=datetime(2026, 1, 1, tzinfo=UTC),
)
EPOCH = ChannelEpoch("ch5", "2026-11-16T08:00:00Z", datetime(2026, 11, 16, 8, tzinfo=UTC))


class AsFound:
    """Leaves segments as they are."""

    def __init__(
        self,
        likeness: float = 0.0,
        strengths: dict[str, float] | None = None,
        alternatives: tuple[tuple[float, float], ...] = (),
    ) -> None:
        self._likeness, self._strengths, self._alternatives = likeness, strengths or {}, alternatives

    def refined(self, view: SegmentView) -> SegmentView:
        return view

    def without(self, view: SegmentView, spans: Spans) -> SegmentView:
        return view

    def alternatives(self, view: SegmentView) -> tuple[tuple[float, float], ...]:
        return self._alternatives

    def likeness(self, one: SegmentView, other: SegmentView) -> float:
        return self._likeness

    def strength(self, view: SegmentView, beside: SegmentView) -> float:
        return self._strengths.get(view.reference, 1.0)


def new_book(
    epoch: ChannelEpoch = EPOCH, matcher: AsFound | None = None, lengths: dict[str, int] | None = None
) -> AlertBook:
    def reference(reference_id: ReferenceId) -> Reference:
        return replace(FILM, id=reference_id, n_seconds=(lengths or {}).get(reference_id, FILM.n_seconds))

    return AlertBook(epoch, "model", 0.5, 10, reference, matcher or AsFound(), lambda view: view.score)


A_PATH = AlignmentPath((12, 40), (12, 40), (19, 47), 8, 8, 5.0, 8.0, (0.0, 0.0, 0.0, 0.0))


def view(end_s: int, score: float, *, is_open: bool = True, echo: bool = False) -> SegmentView:
    return SegmentView(
        FILM.id,
        (12, 40),
        12,
        end_s,
        40,
        28 + end_s,
        score,
        end_s - 12,
        9.0,
        5.0,
        (),
        is_open,
        (1, 1) if echo else None,
    )


def events_of(score_by_second: list[float]) -> list[Alert]:
    """The events of a segment that grows a second at a time and then closes."""
    book, events = new_book(), []
    for n, score in enumerate(score_by_second):
        events += book.apply(20 + n, [view(16 + n, score)], [])
    return events + book.apply(60, [view(16 + len(score_by_second), score_by_second[-1], is_open=False)], [])


def test_one_id_from_start_to_end_and_an_update_every_ten_seconds() -> None:
    alerts = events_of([0.1, 0.4, 0.6] + [0.9] * 24)
    assert [alert.type.removeprefix("alert.") for alert in alerts] == ["started", "updated", "updated", "ended"]
    assert len({alert.id for alert in alerts}) == 1
    assert [alert.seq for alert in alerts] == [1, 2, 3, 4]
    assert {alert.detected_at for alert in alerts} == {22.0}
    end = alerts[-1]
    assert (end.channel_start, end.channel_end, end.reference_start) == (12.0, 43.0, 40.0)
    assert (end.started_at, end.ended_at) == ("2026-11-16T08:00:12Z", "2026-11-16T08:00:43Z")
    assert (end.title, end.owner, end.coverage_reference) == ("A film", "Studio", 0.31)


def test_an_alert_whose_final_confidence_is_below_the_minimum_is_retracted() -> None:
    assert [alert.type for alert in events_of([0.6, 0.6, 0.3])] == ["alert.started", "alert.retracted"]


def test_a_segment_that_never_reaches_the_minimum_confidence_never_alerts() -> None:
    assert events_of([0.1, 0.49]) == []


def test_an_echo_does_not_alert_and_an_alert_that_becomes_one_is_retracted() -> None:
    book = new_book()
    assert book.apply(20, [view(20, 0.9, echo=True)], []) == []
    (started,) = book.apply(21, [view(21, 0.9)], [])
    (ended,) = book.apply(40, [view(30, 0.9, is_open=False, echo=True)], [])  # nothing else alerts in its place
    assert (started.type, ended.type, ended.id) == ("alert.started", "alert.ended", started.id)
    book = new_book()
    (stronger,) = book.apply(20, [replace(view(20, 0.9), start=(1, 1), live_start_s=1, live_end_s=12)], [])
    (started,) = book.apply(21, [view(21, 0.9)], [])
    (last,) = book.apply(40, [view(30, 0.9, is_open=False, echo=True)], [])
    assert (last.type, last.id, last.reason) == (
        "alert.retracted",
        started.id,
        f"better explained by {stronger.id}",
    )


def test_one_copy_in_several_segments_alerts_once() -> None:
    book = new_book()
    first = replace(view(30, 0.9), total_weight=9.0)
    twin = replace(view(29, 0.8), start=(15, 44), total_weight=4.0)
    assert [alert.id for alert in book.apply(30, [first], [])] == [alert_id_of(EPOCH, first)]
    assert book.apply(31, [first, twin], []) == []
    (ended,) = book.apply(40, [replace(first, is_open=False)], [])
    assert ended.type == "alert.ended"
    assert book.apply(41, [replace(twin, is_open=False)], []) == []
    assert len(book.apply(200, [replace(twin, is_open=False)], [])) == 1  # long after, it is a new copy


def test_two_places_of_a_reference_at_once_alert_twice_only_if_they_look_different() -> None:
    first = view(30, 0.9)
    elsewhere = replace(view(30, 0.8), start=(15, 70), ref_start_s=70, ref_end_s=88)
    assert len(new_book().apply(30, [first, elsewhere], [])) == 2
    assert len(new_book(matcher=AsFound(likeness=0.6)).apply(30, [first, elsewhere], [])) == 1


def test_an_alert_follows_a_rival_that_goes_on_when_its_segment_closes() -> None:
    book = new_book(matcher=AsFound(likeness=0.6))
    first, rival = view(30, 0.9), replace(view(30, 0.8), start=(13, 70), ref_start_s=70, ref_end_s=88)
    (started,) = book.apply(30, [first, rival], [])
    later = replace(rival, live_end_s=45, ref_end_s=103)
    (updated,) = book.apply(46, [replace(first, is_open=False), later], [])
    (ended,) = book.apply(60, [replace(later, is_open=False)], [])
    assert [event.id for event in (updated, ended)] == [started.id, started.id]
    assert (updated.type, ended.type, ended.channel_end) == ("alert.updated", "alert.ended", 45.0)


def test_a_segment_whose_changes_do_not_match_does_not_alert() -> None:
    book = new_book()
    assert book.apply(20, [replace(view(20, 0.9), change=0.1)], []) == []
    assert [alert.type for alert in book.apply(21, [replace(view(21, 0.9), change=0.4)], [])] == ["alert.started"]
    (last,) = book.apply(40, [replace(view(30, 0.9, is_open=False), change=0.05)], [])
    assert (last.type, last.reason) == ("alert.retracted", "a look-alike: what changes in the pictures does not match")
    assert len(new_book().apply(20, [replace(view(20, 0.9), change=None)], [])) == 1  # a still reference


def test_a_look_alike_of_a_stronger_reference_stays_silent_or_is_retracted() -> None:
    film, like = view(30, 0.9), replace(view(30, 0.6), reference=ReferenceId("like"))
    matcher = AsFound(strengths={"film": 0.5, "like": 0.2})
    assert [alert.reference for alert in new_book(matcher=matcher).apply(30, [film, like], [])] == ["film"]
    book = new_book(matcher=matcher)
    (early,) = book.apply(29, [like], [])
    retracted, started = book.apply(30, [film, like], [])
    assert (retracted.id, retracted.reason) == (early.id, f"better explained by {started.id}")
    assert (retracted.type, started.type, started.reference) == ("alert.retracted", "alert.started", "film")
    assert book.apply(31, [film, like], []) == []  # it does not come back
    both = new_book(matcher=AsFound(strengths={"film": 0.5, "like": 0.4}))  # a split screen
    assert len(both.apply(30, [film, like], [])) == 2


def test_versions_of_one_film_are_one_alert_that_names_the_best_and_lists_the_others() -> None:
    matcher = AsFound(likeness=0.9)
    long, short = view(30, 0.9), replace(view(30, 0.9), reference=ReferenceId("short"))
    lengths = {"film": 100, "short": 18}
    book = new_book(matcher=matcher, lengths=lengths)
    (started,) = book.apply(30, [short, long], [])
    assert started.reference == "film"  # of versions that match alike, the longest
    (ended, *others) = book.apply(40, [replace(short, is_open=False), replace(long, is_open=False)], [])
    assert (ended.type, ended.id, ended.reference, others) == (
        "alert.ended",
        started.id,
        "short",
        [],
    )  # all of it aired
    assert [(version.reference, version.reference_start) for version in ended.versions] == [("film", 40.0)]
    book = new_book(matcher=matcher, lengths=lengths)
    (started,) = book.apply(30, [short], [])
    heavier = replace(long, total_weight=9.0, live_end_s=40, ref_end_s=68)
    (updated,) = book.apply(31, [short, heavier], [])
    assert (updated.type, updated.id, updated.reference) == ("alert.updated", started.id, "film")
    assert [version.reference for version in updated.versions] == ["short"]


def test_speed_is_that_of_the_stated_spans_and_absent_for_a_short_copy() -> None:
    (short,) = new_book().apply(20, [view(26, 0.9)], [])
    (long,) = new_book().apply(20, [replace(view(42, 0.9), ref_end_s=77.5)], [])
    assert (short.speed, long.speed) == (None, 1.25)


def test_an_ambiguous_place_is_marked_and_its_alternatives_are_listed() -> None:
    others = ((10.0, 18.0), (70.5, 78.5))
    seen = replace(view(40, 0.9), paths=(A_PATH,))
    (alert,) = new_book(matcher=AsFound(alternatives=others)).apply(20, [seen], [])
    assert (alert.ambiguous, alert.alternatives, alert.speed) == (True, others, None)
    assert Alert.from_dict(json.loads(json.dumps(alert.as_dict()))) == alert


def test_ids_depend_on_channel_epoch_reference_and_start_cell_alone() -> None:
    (one,) = new_book().apply(21, [view(21, 0.9)], [])
    (again,) = new_book().apply(92, [view(50, 0.7)], [])
    (elsewhere,) = new_book(replace(EPOCH, channel="ch6")).apply(21, [view(21, 0.9)], [])
    (later,) = new_book(replace(EPOCH, name="2026-11-17T08:00:00Z")).apply(21, [view(21, 0.9)], [])
    assert one.id == again.id
    assert len({one.id, elsewhere.id, later.id}) == 3


def test_an_alert_lists_the_gaps_it_touches() -> None:
    gaps = [Gap(2, 3, "reconnect"), Gap(15, 1, "reconnect"), Gap(70, 5, "reconnect")]
    (alert,) = new_book().apply(21, [view(21, 0.9)], gaps)
    assert alert.gaps == (Gap(15, 1, "reconnect"),)
