"""Where a channel is begun anew: a watch that knows nothing tells from there on what one that saw it all tells."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.alerting.alerts import Alert
from monitor.kafka.replay_points import CLEAR_S, KNOWN_S, LONGEST_S, ReplayPoint, ReplayPoints
from tests.support.planted_channels import Part, PlantedStream, alerts_of, new_monitor, parts, plant

QUIET = CLEAR_S + KNOWN_S + 10


def followed(air: PlantedStream, end: int) -> ReplayPoint | None:
    """The start that is safe after so many samples; its offset is that of a sample."""
    watch, starts = new_monitor(), ReplayPoints()
    for n in range(end):
        alerts_of(watch, air, n, n + 1)
        start = ReplayPoint(n, air.samples[n].second, {}, air.samples[n - 1].arrived_at.isoformat() if n else None)
        if n == 0 or air.samples[n].epoch != air.samples[n - 1].epoch:
            starts.begin(start)
        else:
            starts.push(start, watch.spans)
    return starts.safe(air.samples[end - 1].second) if end else None


def by_name(alerts: list[Alert]) -> dict[tuple[str, int], Alert]:
    """The link to a part before a break is left out: what it leads to may lie before the start."""
    return {(alert.id, alert.seq): replace(alert, continues=None) for alert in alerts}


@settings(max_examples=10, deadline=None)
@given(
    parts=parts(), quiet_s=st.sampled_from([0, CLEAR_S, QUIET]), more=parts(), seed=st.integers(0, 3), data=st.data()
)
def test_what_is_told_after_a_start_is_what_an_unbroken_watch_tells(
    parts: list[Part], quiet_s: int, more: list[Part], seed: int, data: st.DataObject
) -> None:
    air = plant([*parts, Part(quiet_s, noise=1.0), *more], seed)
    assert_told_alike(air, data.draw(st.integers(1, len(air))))


def test_what_was_missed_before_a_start_is_a_gap_all_the_same() -> None:
    air = plant([Part(6, noise=1.0), Part(1, noise=1.0, new_epoch=True), Part(20, "swift", noise=0.2)])
    alerts = assert_told_alike(air, 8)
    assert [gap.reason for alert in alerts for gap in alert.gaps] == ["reconnect"] * len(alerts)


def assert_told_alike(air: PlantedStream, refused_at: int) -> list[Alert]:
    """What is told from the start that is safe after so many samples; an unbroken watch must tell the same."""
    start = followed(air, refused_at)
    assert start is not None
    unbroken, anew = new_monitor(), new_monitor()
    anew.seen_at = None if start.seen_at is None else datetime.fromisoformat(start.seen_at)
    before = alerts_of(unbroken, air, 0, start.offset)
    if start.offset and air.samples[start.offset].epoch != air.samples[start.offset - 1].epoch:
        before += unbroken.finish()  # the epoch before it: told when that record was first read, so before any refusal
    expected = alerts_of(unbroken, air, start.offset) + unbroken.finish()
    ended_there = {alert.id for alert in before}  # their end may be told a few seconds after the last of their paths
    found = by_name(alerts_of(anew, air, start.offset) + anew.finish())
    assert found == by_name([alert for alert in expected if alert.id not in ended_there])
    return list(found.values())


def test_a_start_follows_the_air_but_not_into_a_copy() -> None:
    copy = [Part(QUIET, noise=1.0), Part(40, "swift", 5, noise=0.2)]
    air = plant([*copy, Part(2 * QUIET, noise=1.0)])
    within, after = followed(air, QUIET + 35), followed(air, len(air))
    assert within is not None
    assert after is not None
    assert 0 < within.second <= QUIET - CLEAR_S
    assert after.second > QUIET + 40


def test_what_would_be_read_for_too_long_is_not_read_again() -> None:
    starts = ReplayPoints(ReplayPoint(0, 100, {}))
    assert starts.safe(100 + LONGEST_S) is not None
    assert starts.safe(101 + LONGEST_S) is None
