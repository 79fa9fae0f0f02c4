"""The channels as the API shows them: from their statuses, only those that are monitored, and each change once."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from monitor.alerting.outbox import History, Outbox
from monitor.config.settings import ChannelSettings
from monitor.ops.channel_status import ChannelStatuses
from monitor.ops.timestamps import rfc3339
from monitor.web.channel_views import ChannelViews


def test_a_channel_is_shown_as_its_status_says(tmp_path: Path) -> None:
    Outbox.open(tmp_path, []).close()
    statuses, five = ChannelStatuses(), ChannelSettings(name="five", url="rtsp://user:s3cret@host/5", mode="exact")
    views = ChannelViews(lambda: [five], statuses, History(tmp_path))
    assert views.channels() == []  # it has no status yet
    status = statuses.of("five")
    status.enter("stalled", "rtsp://host closed the connection", "lost")
    status.note_new_frame(datetime(2026, 11, 18, 16, 43, 53, tzinfo=UTC))
    status.count_reconnect("lost")
    status.count_reconnect("ended")
    for _ in range(3):
        status.count_received()
    status.count_dropped("overload")
    status.count_processed()
    status.add_gap(7)
    status.set_lag(0.5)
    statuses.of("removed").enter("up")
    (view,) = views.channels()
    report = status.report()
    assert report.last_frame_at is not None
    assert view.model_dump() == {
        "name": "five",
        "url": "rtsp://***@host/5",
        "mode": "exact",
        "state": "stalled",
        "reason": "rtsp://host closed the connection",
        "cause": "lost",
        "since": rfc3339(report.since),
        "lag_s": 0.5,
        "last_second_at": rfc3339(report.last_frame_at),
        "last_new_at": "2026-11-18T16:43:53Z",
        "reconnects": 2,
        "gap_seconds": 7.0,
        "dropped": 1,
        "current": [],
    }
    assert views.counts() == {"stalled": 1}


def test_channels_are_sorted_and_a_file_shows_its_path(tmp_path: Path) -> None:
    Outbox.open(tmp_path, []).close()
    statuses = ChannelStatuses()
    channels = [ChannelSettings(name=name, url="/media/a.ts") for name in ("two", "one")]
    for channel in channels:
        statuses.of(channel.name)
    views = ChannelViews(lambda: channels, statuses, History(tmp_path)).channels()
    assert [(one.name, one.url, one.state, one.lag_s) for one in views] == [
        ("one", "/media/a.ts", "starting", None),
        ("two", "/media/a.ts", "starting", None),
    ]


def test_each_change_is_listed_once(tmp_path: Path) -> None:
    statuses, channels = ChannelStatuses(), [ChannelSettings(name="five", url="http://h/5")]
    views = ChannelViews(lambda: channels, statuses, History(tmp_path))
    statuses.of("five")
    assert views.changes() == {"five"}
    assert views.changes() == set()
    statuses.of("five").enter("up")
    assert views.changes() == {"five"}
    statuses.of("five").count_received()
    assert views.changes() == set()
    statuses.of("five").enter("failed", "one reason")
    assert views.changes() == {"five"}
    statuses.of("five").enter("failed", "another reason")
    assert views.changes() == {"five"}
    channels.clear()
    assert views.changes() == {"five"}
    assert views.changes() == set()
