"""The result of the demo, and the demo itself from end to end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monitor.alerting.alerts import ENDED, Alert
from monitor.demo.media import COPIES, Media
from monitor.demo.run import DemoResult, overlap
from reference_db.store.catalog import ReferenceId

ROOT = Path(__file__).parents[2]


def ended_alert(reference: str, channel: tuple[float, float], ref: tuple[float, float], id: str = "a") -> Alert:
    """An ended alert of these spans."""
    return Alert(
        id=id,
        type=ENDED,
        seq=2,
        channel="demo",
        reference=ReferenceId(reference),
        title="",
        owner="",
        channel_start=channel[0],
        channel_end=channel[1],
        started_at=None,
        ended_at=None,
        detected_at=channel[0] + 6,
        reference_start=ref[0],
        reference_end=ref[1],
        speed=1.0,
        confidence=0.95,
        score=0.9,
        matched_seconds=10,
        coverage_channel=1.0,
        coverage_reference=0.3,
        gaps=(),
        licence=None,
        model="test",
        evidence=None,
    )


def correct_alerts() -> list[Alert]:
    return [
        ended_alert(
            copy.reference,
            (int(copy.channel_start), int(copy.channel_end)),
            (int(copy.reference_start), int(copy.reference_end)),
            id=str(number),
        )
        for number, copy in enumerate(COPIES)
    ]


def test_all_copies_and_nothing_else_is_correct() -> None:
    result = DemoResult(list(COPIES), correct_alerts())
    assert result.is_correct
    assert [alert.id for _, alert in result.found if alert] == ["0", "1", "2", "3"]


def test_a_copy_without_an_alert_is_missed() -> None:
    result = DemoResult(list(COPIES), correct_alerts()[1:])
    assert not result.is_correct
    assert result.found[0] == (COPIES[0], None)
    assert result.false_alarms == []


@pytest.mark.parametrize(
    "stray",
    [
        ended_alert("paper-planets", (9, 28), (20, 39), id="s"),  # another film was broadcast then
        ended_alert("harbour-nights", (30, 48), (20, 38), id="s"),  # no part of it was broadcast then
        ended_alert("harbour-nights", (9, 28), (45, 64), id="s"),  # another part of it was
        ended_alert("harbour-nights", (9, 12), (20, 23), id="s"),  # too short to count as the copy
    ],
)
def test_an_alert_without_a_copy_is_a_false_alarm(stray: Alert) -> None:
    result = DemoResult(list(COPIES), [*correct_alerts(), stray])
    assert result.false_alarms == [stray]
    assert not result.is_correct


def test_overlap_is_the_smaller_of_both_sides() -> None:
    copy = COPIES[0]  # 8.4-28.4 of the broadcast, 20.1-40.1 of the film
    assert overlap(ended_alert(copy.reference, (8.4, 28.4), (20.1, 40.1)), copy) == pytest.approx(1.0)
    assert overlap(ended_alert(copy.reference, (8.4, 28.4), (30.1, 50.1)), copy) == pytest.approx(1 / 3)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This tree as links, with the environment of these tests, marked as installed."""
    for name in ("scripts", "monitor", "reference_db", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if not part.name.startswith(".installed-"):
            (tmp_path / ".venv" / part.name).symlink_to(part)
    mark = 'source scripts/venv.sh && touch "$(stamp_of dev,train)"'
    subprocess.run(["bash", "-c", mark], cwd=tmp_path, check=True)
    return tmp_path


def test_the_demo_finds_every_copy_and_nothing_else(demo_folder: Path, demo_media: Media, clone: Path) -> None:
    """Runs scripts/demo with an installed environment and rendered media, which takes seconds."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
    done = subprocess.run(
        [clone / "scripts/demo", "--fast", "--exit", "--data-dir", str(demo_folder.parent)],
        env={**known, "PIP_NO_INDEX": "1"},  # an attempt to install fails and changes nothing
        cwd="/",
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 copies found, 0 false alarms." in done.stdout
    assert done.stderr == ""
    assert str(demo_folder) in done.stdout
    alerts = [json.loads(line) for line in (demo_folder / "alerts.jsonl").read_text().splitlines()]
    ended = [alert for alert in alerts if alert["type"] == ENDED]
    assert {alert["reference"] for alert in ended} == {copy.reference for copy in COPIES}
    by_speed = {round(alert["speed"], 1) for alert in ended}
    assert max(by_speed) >= 1.2
    log = [json.loads(line) for line in (demo_folder / "demo.log").read_text().splitlines()]
    assert not [line for line in log if line["level"] == "error"]


def test_an_interrupted_demo_prints_no_result(demo_folder: Path, demo_media: Media) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "monitor.cli", "demo", "--data-dir", str(demo_folder.parent)],
        env={name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if "[4/4]" in line:
            demo.send_signal(signal.SIGINT)
    assert demo.wait() == 0
    assert lines[-1] == "Stopped before the end of the broadcast; the result is not checked.\n"
    assert "MISSED" not in "".join(lines)
