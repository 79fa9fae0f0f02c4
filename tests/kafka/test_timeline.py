"""Records on stream time: each second once, from any producer and however often it is sent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.kafka.records import FrameRecord, epoch_time
from monitor.kafka.timeline import Place, Timeline

BEGAN = datetime(2026, 11, 16, 8, tzinfo=UTC)


def record(second: int, epoch: str | None = "2026-11-16T08:00:00Z", seen_s: float | None = None) -> FrameRecord:
    seen_at = BEGAN + timedelta(seconds=second if seen_s is None else seen_s)
    began_at = epoch_time(epoch) if epoch is not None else None
    return FrameRecord("ch5", second * 1000 + 500, seen_at, epoch, began_at, "unseen")


def place_all(timeline: Timeline, *records: FrameRecord) -> list[int | str]:
    places = [timeline.place(one) for one in records]
    return [place.second if isinstance(place, Place) else place for place in places]


def test_repeated_and_backward_seconds_are_dropped() -> None:
    timeline = Timeline("ch5")
    assert place_all(timeline, *(record(n) for n in (5, 6, 6, 4, 8))) == [5, 6, "repeated", "backward", 8]


def test_two_producers_with_clocks_a_second_apart_share_an_epoch() -> None:
    timeline = Timeline("ch5")
    other = "2026-11-16T08:00:01Z"
    assert place_all(timeline, record(5), record(5, other), record(6, other), record(6)) == [
        5,
        "repeated",
        6,
        "repeated",
    ]
    assert timeline.newest is not None
    assert timeline.newest.epoch.name == "2026-11-16T08:00:00Z"


def test_another_clock_starts_an_epoch_and_records_of_the_first_are_late() -> None:
    timeline, other = Timeline("ch5"), "2026-11-16T07:00:00Z"
    places = place_all(timeline, record(5), record(3606, other, 6), record(6, seen_s=6.5), record(3607, other, 7))
    assert places == [5, 3606, "late", 3607]
    # An hour later the first clock is back.
    assert place_all(timeline, record(3700)) == [3700]
    assert timeline.newest is not None
    assert timeline.newest.epoch.name == "2026-11-16T08:00:00Z"


def test_after_a_long_silence_the_same_clock_starts_another_epoch() -> None:
    timeline = Timeline("ch5")
    before, within, after = (timeline.place(record(n)) for n in (5, 35, 66))
    assert isinstance(before, Place)
    assert isinstance(within, Place)
    assert isinstance(after, Place)
    assert before.epoch == within.epoch
    assert after.epoch != within.epoch
    assert after.epoch.name == within.epoch.name


def test_a_recording_has_no_wall_clock_and_allows_holes_of_up_to_an_hour() -> None:
    timeline = Timeline("ch5")
    places = [timeline.place(record(n, "file-x")) for n in (5, 1000, 10**9)]
    epochs = [place.epoch for place in places if isinstance(place, Place)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert epochs[0].began_at is None


def test_without_an_epoch_clock_breaks_are_detected() -> None:
    timeline = Timeline("ch5")
    places = place_all(
        timeline, *(record(n, None) for n in (5, 6, 6, 4, 7)), record(9000, None, 8), record(9001, None, 9)
    )
    assert places == [5, 6, "repeated", "backward", 7, 9000, 9001]
    assert timeline.newest is not None
    assert timeline.newest.epoch.name == "2026-11-16T05:30:08Z"


records = st.builds(
    record,
    st.integers(0, 120),
    st.sampled_from([None, "file-x", "2026-11-16T08:00:00Z", "2026-11-16T08:00:04Z", "2026-11-16T07:00:00Z"]),
    st.floats(0, 200),
)


@given(st.lists(records, max_size=40), st.integers(0, 40))
def test_resuming_from_a_position_gives_the_places_of_an_uninterrupted_timeline(
    given_records: list[FrameRecord], at: int
) -> None:
    uninterrupted, first, second = Timeline("ch5"), Timeline("ch5"), Timeline("ch5")
    expected = [uninterrupted.place(one) for one in given_records]
    places = [first.place(one) for one in given_records[:at]]
    second.resume(first.position())
    assert places + [second.place(one) for one in given_records[at:]] == expected


@given(st.lists(records, max_size=60))
def test_within_an_epoch_seconds_only_rise(given_records: list[FrameRecord]) -> None:
    timeline, newest = Timeline("ch5"), dict[object, int]()
    for one in given_records:
        place = timeline.place(one)
        if isinstance(place, Place):
            assert place.second > newest.get(place.epoch, -1)
            newest[place.epoch] = place.second


@pytest.mark.parametrize("name", ["2026-11-16", "20261116", "12", "file-x"])
def test_an_epoch_that_is_no_timestamp_has_no_wall_time(name: str) -> None:
    assert epoch_time(name) is None
