"""From file to alert: the real decoder, encoder, index and network on generated films."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from monitor.alerting.alerts import ENDED, Alert
from monitor.pipeline import check_file
from reference_db.errors import MediaError
from tests.studio import Studio


def tell(studio: Studio, cuts: list[int]) -> list[Alert]:
    """The alerts of the recording, handed over in pieces that end at the cuts."""
    watch, alerts = studio.watch(), []
    edges = [0, *cuts, len(studio.samples)]
    for begin, end in pairwise(edges):
        for outcome in watch.push(studio.samples[begin:end], studio.rows[begin:end]):
            alerts += outcome.alerts
    return alerts + watch.finish()


def test_both_copies_are_found_where_they_aired_and_nothing_else(studio: Studio) -> None:
    told: list[Alert] = []
    segments = check_file(studio.recording, "ch1", settings=studio.settings, on_alert=told.append)
    assert [segment["reference"] for segment in segments] == ["harbour", "garden"]
    for segment, (air_s, ref_s, length) in zip(segments, ((14.3, 10.6, 18), (50.3, 20.2, 16)), strict=True):
        assert segment["channel_start"] == pytest.approx(air_s, abs=2)
        assert segment["channel_end"] == pytest.approx(air_s + length, abs=2)
        assert segment["reference_start"] == pytest.approx(ref_s, abs=2)
        assert segment["reference_end"] == pytest.approx(ref_s + length, abs=2)
        assert segment["detected_at"] <= air_s + 10  # type: ignore[operator]
    assert next(alert.type for alert in told if alert.reference == "harbour") == "alert.started"


def test_the_same_stream_gives_the_same_alerts_however_it_is_cut(studio: Studio) -> None:
    whole = tell(studio, [])
    assert [alert.reference for alert in whole if alert.type == ENDED] == ["harbour", "garden"]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        cuts = sorted(rng.choice(len(studio.samples), 12, replace=False).tolist())
        assert tell(studio, cuts) == whole


def test_a_lost_second_is_a_gap_in_the_alert_and_not_its_end(studio: Studio) -> None:
    kept = [n for n, sample in enumerate(studio.samples) if sample.second not in (22, 23)]
    watch = studio.watch()
    samples, rows = [studio.samples[n] for n in kept], [studio.rows[n] for n in kept]
    alerts = [alert for outcome in watch.push(samples, rows) for alert in outcome.alerts] + watch.finish()
    (harbour,) = [alert for alert in alerts if alert.type == ENDED and alert.reference == "harbour"]
    assert [(gap.at, gap.seconds) for gap in harbour.gaps] == [(22, 2)]
    assert harbour.channel_end - harbour.channel_start >= 15


def test_features_of_a_picture_do_not_depend_on_its_company(studio: Studio) -> None:
    frames = [sample.frame for sample in studio.samples[:5]]
    alone = [studio.models.encode([frame])[0][0] for frame in frames]
    assert all(np.array_equal(one, row) for one, (row, _) in zip(alone, studio.rows, strict=False))


def test_a_file_that_is_no_video_is_one_sentence(studio: Studio, tmp_path: Path) -> None:
    broken = tmp_path / "broken.ts"
    broken.write_bytes(b"no video at all" * 100)
    with pytest.raises(MediaError, match=r"broken\.ts"):
        check_file(broken, "ch1", settings=studio.settings)
