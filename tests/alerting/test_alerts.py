"""The alert book: which events a segment leads to, and when."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from monitor.alerting.alerts import Alert, AlertBook, Gap, alert_id_of
from monitor.ingest.clock import ChannelEpoch
from monitor.matching.excluding import Spans
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

    def refined(self, view: SegmentView) -> SegmentView:
        return view

    def without(self, view: SegmentView, spans: Spans) -> SegmentView:
        return view


def new_book(epoch: ChannelEpoch = EPOCH) -> AlertBook:
    return AlertBook(epoch, "model", 0.5, 10, lambda reference: FILM, AsFound())


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
        1.0,
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


def test_an_alert_whose_final_score_is_below_the_threshold_is_retracted() -> None:
    assert [alert.type for alert in events_of([0.6, 0.6, 0.3])] == ["alert.started", "alert.retracted"]


def test_a_segment_that_never_reaches_the_threshold_never_alerts() -> None:
    assert events_of([0.1, 0.49]) == []


def test_an_echo_does_not_alert_and_an_alert_that_becomes_one_is_retracted() -> None:
    book = new_book()
    assert book.apply(20, [view(20, 0.9, echo=True)], []) == []
    (started,) = book.apply(21, [view(21, 0.9)], [])
    (last,) = book.apply(40, [view(30, 0.9, is_open=False, echo=True)], [])
    assert (started.type, last.type, last.id) == ("alert.started", "alert.retracted", started.id)


def test_one_copy_in_two_segments_alerts_once() -> None:
    book = new_book()
    first = replace(view(30, 0.9), total_weight=9.0)
    twin = replace(view(29, 0.8), start=(15, 44), total_weight=4.0)
    elsewhere = replace(view(29, 0.8), start=(15, 70), ref_start_s=70, ref_end_s=87, total_weight=4.0)
    assert [alert.id for alert in book.apply(30, [first], [])] == [alert_id_of(EPOCH, first)]
    assert [alert.id for alert in book.apply(31, [twin, elsewhere], [])] == [alert_id_of(EPOCH, elsewhere)]
    (ended,) = book.apply(40, [replace(first, is_open=False)], [])
    assert ended.type == "alert.ended"
    assert book.apply(41, [replace(twin, is_open=False)], []) == []
    assert len(book.apply(200, [replace(twin, is_open=False)], [])) == 1  # long after, it is a new copy


def test_ids_depend_on_channel_epoch_reference_and_start_cell_alone() -> None:
    (one,) = new_book().apply(21, [view(21, 0.9)], [])
    (again,) = new_book().apply(99, [view(50, 0.7)], [])
    (elsewhere,) = new_book(replace(EPOCH, channel="ch6")).apply(21, [view(21, 0.9)], [])
    (later,) = new_book(replace(EPOCH, name="2026-11-17T08:00:00Z")).apply(21, [view(21, 0.9)], [])
    assert one.id == again.id
    assert len({one.id, elsewhere.id, later.id}) == 3


def test_an_alert_lists_the_gaps_it_touches() -> None:
    gaps = [Gap(2, 3, "reconnect"), Gap(15, 1, "reconnect"), Gap(70, 5, "reconnect")]
    (alert,) = new_book().apply(21, [view(21, 0.9)], gaps)
    assert alert.gaps == (Gap(15, 1, "reconnect"),)
