"""The outbox on disk: alert events, snapshots and pending deliveries, all or nothing."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import apsw
import pytest

from monitor.alerting.alerts import ENDED, STARTED, UPDATED
from monitor.alerting.outbox import History, Outbox, OutboxEntry
from monitor.errors import ConfigError, OutboxFailed
from tests.support.sample_alert import sample_events

SINKS = ("file", "log")


def test_an_event_is_stored_once_and_pending_for_each_sink_until_it_is_delivered(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, SINKS) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events("a1")[:2], b"state 1")])
        outbox.write([OutboxEntry("ch5", sample_events("a1"), b"state 2")])  # written again, as after a replay
        assert outbox.n_pending() == {"file": 3, "log": 3}
        first, *_ = outbox.pending("file", 0, 10)
        assert (first.n, first.alert) == (1, sample_events("a1")[0])
        outbox.write([], {"file": {1, 2}})
        assert [event.n for event in outbox.pending("file", 0, 10)] == [3]
        assert [event.n for event in outbox.pending("log", 1, 1)] == [2]
    with Outbox.open(tmp_path, SINKS) as outbox:
        assert outbox.n_pending() == {"file": 1, "log": 3}
        assert outbox.snapshots() == {"ch5": b"state 2"}
    with Outbox.open(tmp_path, ("log", "new")) as outbox:  # one sink was removed, one added
        assert outbox.n_pending() == {"log": 3, "new": 0}
    with Outbox.open(tmp_path, SINKS) as outbox:
        assert outbox.n_pending() == {"file": 0, "log": 3}


def test_history_is_read_by_cursor_and_filter_while_the_monitor_writes(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert (history.events(), history.alerts(), history.newest()) == ([], [], 0)
    with Outbox.open(tmp_path, SINKS) as outbox:
        outbox.write(
            [OutboxEntry("ch5", sample_events("a1")), OutboxEntry("ch6", sample_events("a2", "ch6", "other")[:1])]
        )
        outbox.write([OutboxEntry("ch5", sample_events("a3", reference="other")[:2])])
        assert history.newest() == 6
        assert [event.n for event in history.events(after=2, limit=3)] == [3, 4, 5]
        assert [event.alert.id for event in history.events(channel="ch6")] == ["a2"]
        assert [event.n for event in history.events(type=STARTED, reference="other")] == [4, 5]
        assert [(n, event.alert.id, event.alert.type) for n, event in history.alerts()] == [
            (5, "a3", UPDATED),
            (4, "a2", STARTED),
            (1, "a1", ENDED),
        ]
        assert [n for n, _ in history.alerts(before=5, limit=1)] == [4]
        assert [n for n, _ in history.alerts(type=ENDED)] == [1]
        assert [event.alert.seq for event in history.alert("a1")] == [1, 2, 3]
        assert history.alert("nothing") == []
        assert [alert.id for alert in outbox.open_alerts()] == ["a2", "a3"]
        event = history.events(limit=1)[0].as_dict()
        assert json.loads(json.dumps(event))["gaps"] == [{"at": 20.0, "seconds": 1.0, "reason": "reconnect"}]


def test_alerts_are_filtered_by_confidence_and_those_of_older_versions_have_none(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, SINKS) as outbox:
        for id, confidence in (("a1", 0.6), ("a2", 0.9), ("a3", None)):
            outbox.write([OutboxEntry("ch5", [replace(sample_events(id)[0], confidence=confidence)])])
    history = History(tmp_path)
    assert [event.alert.id for _, event in history.alerts(min_confidence=0.5)] == ["a2", "a1"]
    assert [event.alert.id for _, event in history.alerts(min_confidence=0.9)] == ["a2"]
    assert [event.alert.confidence for _, event in history.alerts()] == [None, 0.9, 0.6]


def test_alerts_that_ended_long_ago_are_purged_and_their_numbers_are_not_reused(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, SINKS) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events("a1") + sample_events("a2")[:1])])
        assert outbox.purge(timedelta(days=1)) == 0
        assert outbox.purge(timedelta(seconds=-1)) == 3
        assert [alert.id for alert in outbox.open_alerts()] == ["a2"]  # still open, so it stays
        outbox.write([OutboxEntry("ch5", sample_events("a3")[:1])])
        assert [event.n for event in History(tmp_path).events()] == [4, 5]
        assert outbox.n_pending() == {"file": 2, "log": 2}


def test_a_second_monitor_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, SINKS), pytest.raises(ConfigError, match="Another monitor is running"):
        Outbox.open(tmp_path, SINKS)
    Outbox.open(tmp_path, SINKS).close()


def test_a_damaged_file_is_moved_aside_and_a_damaged_event_is_skipped(tmp_path: Path) -> None:
    with Outbox.open(tmp_path, SINKS) as outbox:
        outbox.write([OutboxEntry("ch5", sample_events("a1"))])
    db = apsw.Connection(str(tmp_path / "alerts.sqlite"))
    db.execute("UPDATE event SET body = replace(body, 'Studio', 'Studip') WHERE n = 2")
    db.close()
    assert [event.n for event in History(tmp_path).events()] == [1, 3]
    content = bytearray((tmp_path / "alerts.sqlite").read_bytes())
    content[4096:8192] = bytes(4096)
    (tmp_path / "alerts.sqlite").write_bytes(content)
    with Outbox.open(tmp_path, SINKS) as outbox:
        assert outbox.snapshots() == {}
        outbox.write([OutboxEntry("ch5", sample_events("a1"))])
    assert [path.name for path in tmp_path.glob("*damaged*")]


WRITE_SIX_ENTRIES = """
import sys
from pathlib import Path
from monitor.alerting.outbox import OutboxEntry, Outbox
from monitor.errors import OutboxFailed
from tests.support.sample_alert import sample_events
outbox, n_failed = Outbox.open(Path(sys.argv[1]), ("file",)), 0
for number in range(6):
    try:
        outbox.write([OutboxEntry("ch5", sample_events(f"a{number}"), bytes(50_000))])
    except OutboxFailed:
        n_failed += 1
print(n_failed)
"""


@pytest.mark.system
@pytest.mark.parametrize("call", ["fdatasync", "pwrite64"])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_disk_that_fails_once_loses_one_entry_and_nothing_else(tmp_path: Path, call: str, error: str) -> None:
    assert hasattr(errno, error)
    failing = ["strace", "-f", "-o", "/dev/null", "-P", str(tmp_path / "alerts.sqlite-wal"), "-e", f"trace={call}"]
    failing += ["-e", f"inject={call}:error={error}:when=4"]
    run = subprocess.run(
        [*failing, sys.executable, "-c", WRITE_SIX_ENTRIES, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    n_failed = int(run.stdout)
    with Outbox.open(tmp_path, ("file",)) as outbox:
        events = outbox.pending("file", 0, 100)
    stored = {event.alert.id for event in events}
    assert len(events) == 3 * len(stored)  # each entry whole or not at all
    assert len(stored) >= 6 - n_failed
    assert n_failed == 1


def test_an_outbox_that_cannot_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / "alerts.sqlite").mkdir()
    with Outbox.open(tmp_path, SINKS) as outbox, pytest.raises(OutboxFailed, match=r"alerts\.sqlite"):
        outbox.write([OutboxEntry("ch5", sample_events("a1"))])
