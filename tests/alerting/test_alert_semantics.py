"""Alerts of copies at the same time, one after the other and with breaks, on planted features."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monitor.alerting.alerts import ENDED, Alert, Gap, Pause
from tests.support.planted_channels import FILMS, SPOTS, Part, PlantedStream, alerts_of, new_monitor, plant

AD = 1.0  # noise alone: something that is in no library


def events_of(stream: PlantedStream, names: tuple[str, ...] = FILMS) -> list[Alert]:
    monitor = new_monitor(names)
    return alerts_of(monitor, stream) + monitor.finish()


def ended_alerts(stream: PlantedStream) -> list[Alert]:
    ended = (alert for alert in events_of(stream) if alert.type == ENDED)
    return sorted(ended, key=lambda alert: alert.channel_start)


def span(alert: Alert) -> tuple[float, float]:
    return alert.channel_start, alert.channel_end


def test_one_reference_airing_twice_at_once_is_two_alerts() -> None:
    # a split screen: seconds 5-35 of the film on the left, 50-80 on the right
    alerts = ended_alerts(
        plant([Part(8, noise=AD), Part(30, "swift", 5, noise=0.3, beside="swift", beside_from_s=50), Part(25)])
    )
    assert [alert.reference for alert in alerts] == ["swift", "swift"]
    assert len({alert.id for alert in alerts}) == 2
    assert sorted(alert.reference_start for alert in alerts) == pytest.approx([5, 50], abs=2)
    assert all(span(alert) == pytest.approx((8, 38), abs=2) for alert in alerts)


def test_two_references_at_once_are_two_alerts() -> None:
    alerts = ended_alerts(
        plant([Part(8, noise=AD), Part(30, "swift", 5, noise=0.3, beside="other", beside_from_s=20), Part(25)])
    )
    began = {str(alert.reference): alert.reference_start for alert in alerts}
    assert began == pytest.approx({"other": 20.0, "swift": 5.0}, abs=2)


@pytest.mark.parametrize("aired", SPOTS)
def test_versions_of_one_spot_are_one_alert_that_names_the_one_on_air(aired: str) -> None:
    length = sum(len(seconds) for seconds in SPOTS[aired])
    events = events_of(plant([Part(8, noise=AD), Part(length, aired, noise=0.3), Part(30, noise=AD)]), tuple(SPOTS))
    assert len({event.id for event in events}) == 1
    last = events[-1]
    assert (last.type, last.reference) == (ENDED, aired)
    assert span(last) == pytest.approx((8, 8 + length), abs=2)
    assert {version.reference for version in last.versions} <= SPOTS.keys() - {aired}
    assert last.versions


def test_a_fixed_camera_at_other_minutes_is_no_copy() -> None:
    copy = plant([Part(8, noise=AD), Part(30, "camera", 10, noise=0.3), Part(25, noise=AD)])
    later = plant([Part(8, noise=AD), Part(30, "camera-later", 10, noise=0.3), Part(25, noise=AD)])
    (ended,) = (event for event in events_of(copy, ("camera", "swift")) if event.type == ENDED)
    assert ended.reference_start == pytest.approx(10, abs=2)
    assert events_of(later, ("camera", "swift")) == []


def test_a_short_break_is_a_pause_within_one_alert() -> None:
    # the film until its second 30, five seconds of something else, the film on from there
    alerts = ended_alerts(
        plant([Part(8, noise=AD), Part(20, "swift", 10), Part(5, noise=AD), Part(20, "swift", 30), Part(25)])
    )
    (alert,) = alerts
    assert span(alert) == pytest.approx((8, 53), abs=2)
    (pause,) = alert.pauses
    assert (pause.at, pause.seconds) == pytest.approx((28.0, 5.0), abs=2)
    assert alert.coverage_channel < 0.95
    assert (alert.continues, alert.gaps) == (None, ())


def test_after_an_advert_break_a_second_alert_says_which_it_continues() -> None:
    parts = [Part(8, noise=AD), Part(25, "swift", 10), Part(60, noise=AD), Part(25, "swift", 35), Part(40, noise=AD)]
    first, second = ended_alerts(plant([*parts, Part(20, "swift", 5), Part(25)]))[:2]
    assert (first.continues, first.pauses) == (None, ())
    assert second.continues == first.id
    assert second.reference_start == pytest.approx(first.reference_end, abs=3)
    elsewhere = ended_alerts(plant([*parts, Part(20, "swift", 5), Part(25)]))[2]
    assert elsewhere.continues is None  # the same film from another of its seconds is another airing


def test_seconds_that_were_not_seen_are_a_gap_and_no_pause() -> None:
    (alert,) = ended_alerts(
        plant([Part(8, noise=AD), Part(20, "swift", 10), Part(6, lost=True), Part(20, "swift", 36), Part(25)])
    )
    assert [(gap.at, gap.seconds) for gap in alert.gaps] == [(28, 6)]
    assert alert.pauses == ()


def test_the_time_between_two_epochs_is_a_gap_of_the_alerts_before_and_after_it() -> None:
    # a copy is on air when the source fails, and another when it returns two hours later with a new clock
    stream = plant([Part(8, noise=AD), Part(32, "swift", 10), Part(30, "other", 5, new_epoch=True), Part(25)])
    monitor = new_monitor()
    alerts = [alert for alert in alerts_of(monitor, stream) if alert.type == ENDED]
    before, after = alerts
    missed_s = 2 * 3600 + 1000 - 40  # second 1000 of the new epoch airs that long after second 40
    assert before.gaps == (Gap(40, missed_s, "reconnect"),)
    assert after.gaps == (Gap(1000 - missed_s, missed_s, "reconnect"),)
    assert monitor._metrics.channels.of("ch5").report().gap_s == missed_s


def test_a_clock_that_jumps_in_mid_stream_leaves_no_gap() -> None:
    stream = plant([Part(8, noise=AD), Part(32, "swift", 10), Part(30, "other", 5, new_epoch=True), Part(25)])
    same = PlantedStream([replace(sample, gap_reason="unseen") for sample in stream.samples], stream.rows)
    assert [alert.gaps for alert in ended_alerts(same)] == [(), ()]


def test_an_alert_states_its_confidence_and_one_of_an_older_version_has_none() -> None:
    (alert,) = ended_alerts(plant([Part(8, noise=AD), Part(20, "swift", 10), Part(25)]))
    assert alert.confidence is not None
    assert 0.7 <= alert.confidence <= 0.99
    old = {name: value for name, value in alert.as_dict().items() if name != "confidence"}
    assert Alert.from_dict(old) == replace(alert, confidence=None)


def test_pauses_survive_json() -> None:
    (alert,) = ended_alerts(
        plant([Part(8, noise=AD), Part(20, "swift", 10), Part(5, noise=AD), Part(20, "swift", 30), Part(25)])
    )
    assert Alert.from_dict(alert.as_dict()) == alert
    assert isinstance(alert.pauses[0], Pause)
