"""From a file to its segments: the real decoder, encoder, index and network on generated films."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitor.alerting.alerts import Alert
from monitor.runtime.check import check_file
from reference_db.errors import MediaError
from tests.support.recorded_channel import RecordedChannel


def test_both_copies_are_found_where_they_aired_and_nothing_else(recorded: RecordedChannel) -> None:
    alerts: list[Alert] = []
    segments = check_file(recorded.recording, "ch1", settings=recorded.settings, on_alert=alerts.append)
    assert [segment["reference"] for segment in segments] == ["harbour", "garden"]
    for segment, (live_s, ref_s, length) in zip(segments, ((14.3, 10.6, 18), (50.3, 20.2, 16)), strict=True):
        assert segment["channel_start"] == pytest.approx(live_s, abs=2)
        assert segment["channel_end"] == pytest.approx(live_s + length, abs=2)
        assert segment["reference_start"] == pytest.approx(ref_s, abs=2)
        assert segment["reference_end"] == pytest.approx(ref_s + length, abs=2)
        assert segment["detected_at"] <= live_s + 10  # type: ignore[operator]
    assert next(alert.type for alert in alerts if alert.reference == "harbour") == "alert.started"


def test_the_error_for_a_file_that_is_no_video_names_it(recorded: RecordedChannel, tmp_path: Path) -> None:
    broken = tmp_path / "broken.ts"
    broken.write_bytes(b"no video at all" * 100)
    with pytest.raises(MediaError, match=r"broken\.ts"):
        check_file(broken, "ch1", settings=recorded.settings)
