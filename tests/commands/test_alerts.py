"""`copywatch alerts`: as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitor.alerting.alerts import Pause
from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.cli import main
from tests.support.sample_alert import sample_alert, sample_events


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    with Outbox.open(tmp_path, ()) as outbox:
        outbox.write(
            [OutboxEntry("ch5", sample_events("a1")), OutboxEntry("ch6", sample_events("a2", "ch6", "other")[:1])]
        )
    return tmp_path


def alerts(capsys: pytest.CaptureFixture[str], data_dir: Path, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["alerts", *arguments, "--data-dir", str(data_dir)])
    out, err = capsys.readouterr()
    assert exit.value.code == code, err
    return out if code == 0 else err


def test_list_shows_the_latest_state_of_each_alert(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heading, newest, oldest = alerts(capsys, data_dir, "list").splitlines()
    assert heading.split()[:3] == ["N", "ID", "STATE"]
    assert newest.split()[:4] == ["4", "a2", "started", "ch6"]
    assert oldest.split()[:4] == ["1", "a1", "ended", "ch5"]
    (one,) = json.loads(alerts(capsys, data_dir, "list", "--json", "--channel", "ch5"))
    assert (one["first_n"], one["n"], one["id"], one["score"]) == (1, 3, "a1", 0.9)
    assert json.loads(alerts(capsys, data_dir, "list", "--json", "--before", "4", "--type", "started")) == []
    assert "retracted" in alerts(capsys, data_dir, "list", "--type", "nonsense", code=2)


def test_show_prints_all_of_one_alert(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = alerts(capsys, data_dir, "show", "a1")
    assert "1 s at 00:00:20 (reconnect)" in text
    assert [line.split()[2] for line in text.splitlines()[-5:-2]] == ["started", "updated", "ended"]
    assert "no evidence" in text.splitlines()[-1]
    whole = json.loads(alerts(capsys, data_dir, "show", "a1", "--json"))
    assert [one["seq"] for one in whole["events"]] == [1, 2, 3]
    assert (whole["alert"]["type"], whole["reviews"], whole["evidence"]) == ("alert.ended", [], None)
    assert "no alert a9" in alerts(capsys, data_dir, "show", "a9", code=1)


def test_show_prints_the_pauses_of_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Outbox.open(tmp_path, ()) as outbox:
        outbox.write([OutboxEntry("ch5", [sample_alert(7, pauses=(Pause(65.0, 4.0),))])])
    text = alerts(capsys, tmp_path, "show", sample_alert(7).id)
    assert [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("pauses")] == ["4 s at 00:01:05"]


def test_tail_continues_after_a_number(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = alerts(capsys, data_dir, "tail", "--no-follow", "--after", "2", "--json").splitlines()
    assert [json.loads(line)["n"] for line in lines] == [3, 4]
    assert alerts(capsys, data_dir, "tail", "--no-follow") == ""
    assert "ch6" in alerts(capsys, data_dir, "tail", "--no-follow", "--after", "0", "--reference", "other")
