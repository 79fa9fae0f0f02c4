"""Replay points: a new monitor that starts there emits the alerts of one that saw the whole stream."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.alerting.alerts import Alert
from monitor.kafka.replay_points import CLEAR_S, KNOWN_S, MAX_REPLAY_S, ReplayPoint, ReplayPoints
from tests.support.planted_channels import Part, PlantedStream, alerts_of, new_monitor, parts, plant

QUIET = CLEAR_S + KNOWN_S + 10


def replay_point(stream: PlantedStream, end: int) -> ReplayPoint | None:
    """The newest safe point after `end` samples; its offset is the number of a sample."""
    monitor, points = new_monitor(), ReplayPoints()
    for n in range(end):
        alerts_of(monitor, stream, n, n + 1)
        seen_at = stream.samples[n - 1].arrived_at.isoformat() if n else None
        point = ReplayPoint(n, stream.samples[n].second, {}, seen_at)
        if n == 0 or stream.samples[n].epoch != stream.samples[n - 1].epoch:
            points.start_epoch(point)
        else:
            points.push(point, monitor.spans)
    return points.newest_safe(stream.samples[end - 1].second) if end else None


def by_name(alerts: list[Alert]) -> dict[tuple[str, int], Alert]:
    """Without the link to the part before a break, which may lie before the replay point."""
    return {(alert.id, alert.seq): replace(alert, continues=None) for alert in alerts}


@settings(max_examples=10, deadline=None)
@given(
    parts=parts(), quiet_s=st.sampled_from([0, CLEAR_S, QUIET]), more=parts(), seed=st.integers(0, 3), data=st.data()
)
def test_a_replay_emits_the_alerts_of_an_uninterrupted_monitor(
    parts: list[Part], quiet_s: int, more: list[Part], seed: int, data: st.DataObject
) -> None:
    stream = plant([*parts, Part(quiet_s, noise=1.0), *more], seed)
    assert_same_alerts(stream, data.draw(st.integers(1, len(stream))))


def test_seconds_missing_before_a_replay_point_are_a_gap() -> None:
    stream = plant([Part(6, noise=1.0), Part(1, noise=1.0, new_epoch=True), Part(20, "swift", noise=0.2)])
    alerts = assert_same_alerts(stream, 8)
    assert [gap.reason for alert in alerts for gap in alert.gaps] == ["reconnect"] * len(alerts)


def assert_same_alerts(stream: PlantedStream, refused_at: int) -> list[Alert]:
    """The alerts of a replay after `refused_at` samples; checks that an uninterrupted monitor emits the same."""
    point = replay_point(stream, refused_at)
    assert point is not None
    uninterrupted, replayed = new_monitor(), new_monitor()
    replayed.seen_at = None if point.seen_at is None else datetime.fromisoformat(point.seen_at)
    before = alerts_of(uninterrupted, stream, 0, point.offset)
    if point.offset and stream.samples[point.offset].epoch != stream.samples[point.offset - 1].epoch:
        before += uninterrupted.finish()  # the previous epoch ended when that record was first read
    expected = alerts_of(uninterrupted, stream, point.offset) + uninterrupted.finish()
    earlier = {alert.id for alert in before}  # these may end a few seconds after the last of their paths
    found = by_name(alerts_of(replayed, stream, point.offset) + replayed.finish())
    assert found == by_name([alert for alert in expected if alert.id not in earlier])
    return list(found.values())


def test_replay_points_follow_the_stream_but_not_into_a_copy() -> None:
    copy = [Part(QUIET, noise=1.0), Part(40, "swift", 5, noise=0.2)]
    stream = plant([*copy, Part(2 * QUIET, noise=1.0)])
    within, after = replay_point(stream, QUIET + 35), replay_point(stream, len(stream))
    assert within is not None
    assert after is not None
    assert 0 < within.second <= QUIET - CLEAR_S
    assert after.second > QUIET + 40


def test_a_replay_point_expires_after_an_hour() -> None:
    points = ReplayPoints(ReplayPoint(0, 100, {}))
    assert points.newest_safe(100 + MAX_REPLAY_S) is not None
    assert points.newest_safe(101 + MAX_REPLAY_S) is None
