"""Sinks: a file of JSON lines that survives crashes and rotation."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from monitor.alerting.sinks import JsonLinesSink
from tests.support.sample_alert import sample_events


def test_a_torn_line_is_cut_and_a_line_already_there_is_not_written_again(tmp_path: Path) -> None:
    path, events = tmp_path / "alerts.jsonl", sample_events("a1") + sample_events("a2")
    JsonLinesSink(path).send(events[:4])
    content = path.read_bytes()
    path.write_bytes(content + content[:100])
    JsonLinesSink(path).send(events[3:])  # a new process, which does not know that the fourth was written
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["id"], line["seq"]) for line in lines] == [(event.id, event.seq) for event in events]
    path.write_bytes(b"torn before the first end of line")
    JsonLinesSink(path).send(events[:1])
    assert json.loads(path.read_text())["id"] == "a1"


def test_a_file_that_was_rotated_away_is_created_again(tmp_path: Path) -> None:
    path, events = tmp_path / "alerts.jsonl", sample_events("a1")
    sink = JsonLinesSink(path)
    sink.send(events[:1])
    path.rename(tmp_path / "alerts.jsonl.1")
    sink.send(events[1:2])
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [2]


def test_events_of_a_failed_sync_are_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events = tmp_path / "alerts.jsonl", sample_events("a1") + sample_events("a2")
    sink = JsonLinesSink(path)
    sink.send(events[:1])

    def fail(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            sink.send(events[1:3])
    sink.send(events[1:3])  # the dispatcher's retry
    sink.send(events[3:])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["id"], line["seq"]) for line in lines] == [(event.id, event.seq) for event in events]
