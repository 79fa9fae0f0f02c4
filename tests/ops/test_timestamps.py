"""RFC 3339: every zone is written in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from monitor.ops.timestamps import rfc3339


def test_a_time_is_written_in_utc_with_the_precision_asked_for() -> None:
    moment = datetime(2026, 11, 16, 21, 0, 0, 123_456, tzinfo=timezone(timedelta(hours=1)))
    assert rfc3339(moment) == "2026-11-16T20:00:00Z"
    assert rfc3339(moment.astimezone(UTC), "milliseconds") == "2026-11-16T20:00:00.123Z"
