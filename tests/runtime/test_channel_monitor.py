"""From samples to alerts: the real encoder, index and network on a generated recording."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import numpy as np

from monitor.alerting.alerts import ENDED, STARTED, Alert, Gap
from tests.support.planted_channels import Part, PlantedStream, alerts_of, new_monitor, plant
from tests.support.recorded_channel import RecordedChannel


def alerts_with_restarts(recorded: RecordedChannel, cuts: list[int]) -> list[Alert]:
    """The alerts of the recording, with a new monitor restored from a snapshot at each cut."""
    monitor, alerts = recorded.new_monitor(), list[Alert]()
    stream = PlantedStream(recorded.samples, recorded.rows)
    for begin, end in pairwise([0, *cuts, len(stream)]):
        alerts += alerts_of(monitor, stream, begin, end)
        snapshot, monitor = monitor.snapshot({"sample": end}), recorded.new_monitor()
        assert monitor.restore(snapshot).position == {"sample": end}
    return alerts + monitor.finish()


def test_restarts_do_not_change_the_alerts(recorded: RecordedChannel) -> None:
    unbroken = alerts_with_restarts(recorded, [])
    assert [alert.reference for alert in unbroken if alert.type == ENDED] == ["harbour", "garden"]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        cuts = sorted(rng.choice(len(recorded.samples), 12, replace=False).tolist())
        assert alerts_with_restarts(recorded, cuts) == unbroken


def test_a_lost_second_is_a_gap_in_the_alert_and_not_its_end(recorded: RecordedChannel) -> None:
    seen = [n for n, sample in enumerate(recorded.samples) if sample.second not in (22, 23)]
    monitor = recorded.new_monitor()
    stream = PlantedStream([recorded.samples[n] for n in seen], [recorded.rows[n] for n in seen])
    alerts = alerts_of(monitor, stream) + monitor.finish()
    (harbour,) = [alert for alert in alerts if alert.type == ENDED and alert.reference == "harbour"]
    assert [(gap.at, gap.seconds) for gap in harbour.gaps] == [(22, 2)]
    assert harbour.channel_end - harbour.channel_start >= 15


def test_a_new_epoch_ends_the_alerts_of_the_old_one_and_records_the_silence_between_them() -> None:
    copy = [Part(10, noise=1.0), Part(25, "swift", 20, noise=0.2)]
    stream = plant([*copy, Part(25, "swift", 45, noise=0.2, new_epoch=True), Part(20, noise=1.0)])
    last = stream.samples[34].arrived_at
    later = [
        replace(sample, arrived_at=last + timedelta(seconds=61 + n)) for n, sample in enumerate(stream.samples[35:])
    ]
    monitor = new_monitor()
    alerts = alerts_of(monitor, PlantedStream([*stream.samples[:35], *later], stream.rows)) + monitor.finish()
    first, second = [alert for alert in alerts if alert.type == ENDED]
    assert first.gaps == (Gap(35, 60, "reconnect"),)
    assert second.gaps == (Gap(940, 60, "reconnect"),)
    assert second.id != first.id


def test_finish_ends_open_alerts_once() -> None:
    monitor = new_monitor()
    assert monitor.finish() == []
    alerts = alerts_of(monitor, plant([Part(10, noise=1.0), Part(25, "swift", 20, noise=0.2)]))
    assert monitor.open_alerts == {alert.id for alert in alerts if alert.type == STARTED} != set()
    assert [alert.type for alert in monitor.finish()] == [ENDED]
    assert monitor.open_alerts == set()
    assert monitor.spans() == []
    assert monitor.finish() == []
