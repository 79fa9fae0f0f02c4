"""From seconds to alerts: the real encoder, index and network on what a generated recording shows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from monitor.alerting.alerts import ENDED, Alert
from tests.support.planted_channels import outcomes_of
from tests.support.recorded_channel import RecordedChannel


def tell(recorded: RecordedChannel, cuts: list[int]) -> list[Alert]:
    """The alerts of the recording, handed over in pieces that end at the cuts."""
    watch, alerts = recorded.new_monitor(), []
    edges = [0, *cuts, len(recorded.samples)]
    for begin, end in pairwise(edges):
        for outcome in outcomes_of(watch, recorded.samples[begin:end], recorded.rows[begin:end]):
            alerts += outcome.alerts
    return alerts + watch.finish()


def test_the_same_stream_gives_the_same_alerts_however_it_is_cut(recorded: RecordedChannel) -> None:
    whole = tell(recorded, [])
    assert [alert.reference for alert in whole if alert.type == ENDED] == ["harbour", "garden"]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        cuts = sorted(rng.choice(len(recorded.samples), 12, replace=False).tolist())
        assert tell(recorded, cuts) == whole


def test_a_lost_second_is_a_gap_in_the_alert_and_not_its_end(recorded: RecordedChannel) -> None:
    kept = [n for n, sample in enumerate(recorded.samples) if sample.second not in (22, 23)]
    watch = recorded.new_monitor()
    samples, rows = [recorded.samples[n] for n in kept], [recorded.rows[n] for n in kept]
    alerts = [alert for outcome in outcomes_of(watch, samples, rows) for alert in outcome.alerts] + watch.finish()
    (harbour,) = [alert for alert in alerts if alert.type == ENDED and alert.reference == "harbour"]
    assert [(gap.at, gap.seconds) for gap in harbour.gaps] == [(22, 2)]
    assert harbour.channel_end - harbour.channel_start >= 15


def test_features_of_a_picture_do_not_depend_on_its_company(recorded: RecordedChannel) -> None:
    frames = [sample.frame for sample in recorded.samples[:5]]
    alone = [recorded.models.encode([frame])[0][0] for frame in frames]
    assert all(np.array_equal(one, row) for one, (row, _) in zip(alone, recorded.rows, strict=False))
