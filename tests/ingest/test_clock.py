"""Stream time over wraps, jumps and silences."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from monitor.ingest.clock import WRAP_S, ChannelEpoch, StreamClock

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_time_continues_over_several_wraps() -> None:
    clock, first = StreamClock("ch"), None
    for n in range(0, 4 * 95_443, 20):
        epoch, stream_s = clock.place((50_000 + n) % WRAP_S, at(n))
        first = first or epoch
        assert epoch is first
        assert abs(stream_s - (50_000 + n)) < 1e-6


def test_a_jump_that_arrival_does_not_explain_starts_an_epoch() -> None:
    clock = StreamClock("ch")
    first, _ = clock.place(100.0, at(0))
    back, stream_s = clock.place(50.0, at(1))
    assert back is not first
    assert stream_s == 50.0
    forward, _ = clock.place(3_700.0, at(2))
    assert forward is not back


def test_a_gap_that_arrival_explains_starts_an_epoch_after_thirty_seconds_only() -> None:
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


def test_wall_times_of_a_drifting_clock_are_right_to_a_second_for_a_day() -> None:
    """500 ppm, the drift of a bad oscillator; the first frame is late, as it is when a decoder opens."""
    for rate in (1.0005, 0.9995):
        clock = StreamClock("ch")
        epoch, _ = clock.place(1000.0, at(3.0))
        name = epoch.name
        for n in range(2, 24 * 3600, 2):
            jitter = (n * 7919 % 13) / 10  # up to 1.2 s late
            epoch, stream_s = clock.place(1000.0 + n * rate, at(n + jitter))
            assert epoch.name == name
            assert abs(stream_s - (1000.0 + n * rate)) < 1e-6  # the grid is the stream's own
            if n > 600:
                assert epoch.began_at is not None
                shown = epoch.began_at + timedelta(seconds=stream_s)
                assert abs((shown - at(n)).total_seconds()) <= 1.0, (rate, n)


def test_a_longer_delay_is_not_taken_for_drift_at_once() -> None:
    clock = StreamClock("ch")
    for n in range(0, 3600, 2):
        epoch, _ = clock.place(float(n), at(n))
    for n in range(3600, 4200, 2):
        epoch, _ = clock.place(float(n), at(n + 8))
    assert epoch.began_at is not None
    assert abs((epoch.began_at - NOON).total_seconds()) <= 1.0


def test_setting_the_wall_clock_moves_wall_times_only() -> None:
    for step_s in (3600, -3600):
        clock = StreamClock("ch")
        first, _ = clock.place(100.0, at(0), steady_s=50.0)
        again, stream_s = clock.place(101.0, at(1 + step_s), steady_s=51.0)
        assert (again, stream_s) == (first, 101.0)
        assert again.name == first.name
        assert again.wall_time(101.0) == at(1 + step_s).isoformat().replace("+00:00", "Z")


def test_epochs_are_compared_by_name_not_by_wall_time() -> None:
    first, _ = StreamClock("ch").place(0.0, at(0))
    assert first == ChannelEpoch("ch", first.name, at(5))
    assert first != ChannelEpoch("ch", "another", first.began_at)
