"""Stream time over wraps, jumps and silences."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from monitor.ingest.clock import WRAP_S, StreamClock

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_time_goes_on_over_several_wraps() -> None:
    clock, first = StreamClock("ch"), None
    for n in range(0, 4 * 95_443, 20):
        epoch, stream_s = clock.place((50_000 + n) % WRAP_S, at(n))
        first = first or epoch
        assert epoch is first
        assert abs(stream_s - (50_000 + n)) < 1e-6


def test_a_jump_that_arrival_does_not_explain_begins_an_epoch() -> None:
    clock = StreamClock("ch")
    first, _ = clock.place(100.0, at(0))
    back, stream_s = clock.place(50.0, at(1))
    assert back is not first
    assert stream_s == 50.0
    forward, _ = clock.place(3_700.0, at(2))
    assert forward is not back


def test_a_gap_that_arrival_explains_is_no_new_epoch_until_thirty_seconds() -> None:
    clock = StreamClock("ch")
    first, _ = clock.place(100.0, at(0))
    again, stream_s = clock.place(125.0, at(25))
    assert (again, stream_s) == (first, 125.0)
    silent, _ = clock.place(160.0, at(60))
    assert silent is not first


def test_an_epoch_is_named_by_the_wall_time_of_its_second_zero() -> None:
    epoch, _ = StreamClock("ch").place(3_600.0, at(0))
    assert epoch.name == "2026-11-16T11:00:00Z"
    assert epoch.wall_time(3_601.0) == "2026-11-16T12:00:01Z"


@given(st.lists(st.tuples(st.floats(0, WRAP_S - 1), st.floats(0, 100)), min_size=1, max_size=50))
def test_time_within_an_epoch_never_jumps_unexplained(arrivals: list[tuple[float, float]]) -> None:
    clock, now, last = StreamClock("ch"), 0.0, None
    for pts_s, waited_s in arrivals:
        now += waited_s
        epoch, stream_s = clock.place(pts_s, at(now))
        if last is not None and last[0] is epoch:
            moved_s = stream_s - last[1]
            assert abs(moved_s) <= 10 or abs(moved_s - waited_s) <= 10.001
        last = (epoch, stream_s)
