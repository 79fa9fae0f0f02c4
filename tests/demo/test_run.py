"""The demo's verdict, and the demo itself from end to end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monitor.alerting.alerts import ENDED, Alert
from monitor.demo.media import AIRED, Media
from monitor.demo.run import Verdict, overlap
from reference_db.store.catalog import ReferenceId

ROOT = Path(__file__).parents[2]


def told(reference: str, channel: tuple[float, float], ref: tuple[float, float], id: str = "a") -> Alert:
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
        score=0.9,
        matched_seconds=10,
        coverage_channel=1.0,
        coverage_reference=0.3,
        gaps=(),
        licence=None,
        model="test",
        evidence=None,
    )


def right() -> list[Alert]:
    return [
        told(
            copy.reference,
            (int(copy.channel_start), int(copy.channel_end)),
            (int(copy.reference_start), int(copy.reference_end)),
            id=str(number),
        )
        for number, copy in enumerate(AIRED)
    ]


def test_all_found_and_nothing_else_is_right() -> None:
    verdict = Verdict(list(AIRED), right())
    assert verdict.is_right
    assert [alert.id for _, alert in verdict.found if alert] == ["0", "1", "2", "3"]


def test_a_copy_that_nobody_told_is_missed() -> None:
    verdict = Verdict(list(AIRED), right()[1:])
    assert not verdict.is_right
    assert verdict.found[0] == (AIRED[0], None)
    assert verdict.strays == []


@pytest.mark.parametrize(
    "stray",
    [
        told("paper-planets", (9, 28), (20, 39), id="s"),  # another film was on air then
        told("harbour-nights", (30, 48), (20, 38), id="s"),  # nothing of it was on air then
        told("harbour-nights", (9, 28), (45, 64), id="s"),  # another part of it was
        told("harbour-nights", (9, 12), (20, 23), id="s"),  # too little of it to be called the copy
    ],
)
def test_what_was_not_aired_is_a_stray(stray: Alert) -> None:
    verdict = Verdict(list(AIRED), [*right(), stray])
    assert verdict.strays == [stray]
    assert not verdict.is_right


def test_overlap_is_the_smaller_of_both_sides() -> None:
    copy = AIRED[0]  # on air 8.4-28.4, its seconds 20.1-40.1
    assert overlap(told(copy.reference, (8.4, 28.4), (20.1, 40.1)), copy) == pytest.approx(1.0)
    assert overlap(told(copy.reference, (8.4, 28.4), (30.1, 50.1)), copy) == pytest.approx(1 / 3)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This tree by links, with the environment that these tests run in as its own, which says that it is installed."""
    for name in ("scripts", "monitor", "reference_db", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if not part.name.startswith(".installed-"):
            (tmp_path / ".venv" / part.name).symlink_to(part)
    says_so = 'source scripts/venv.sh && touch "$(stamp_of dev,train)"'
    subprocess.run(["bash", "-c", says_so], cwd=tmp_path, check=True)
    return tmp_path


def test_the_demo_finds_every_copy_and_nothing_else(demo_folder: Path, demo_media: Media, clone: Path) -> None:
    """By its script, as a machine would run it; environment and media are there, so that this takes seconds."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
    done = subprocess.run(
        [clone / "scripts/demo", "--fast", "--exit", "--data-dir", str(demo_folder.parent)],
        env={**known, "PIP_NO_INDEX": "1"},  # should it install all the same, it fails and changes nothing
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
    assert {alert["reference"] for alert in ended} == {copy.reference for copy in AIRED}
    by_speed = {round(alert["speed"], 1) for alert in ended}
    assert max(by_speed) >= 1.2
    log = [json.loads(line) for line in (demo_folder / "demo.log").read_text().splitlines()]
    assert not [line for line in log if line["level"] == "error"]


def test_who_leaves_before_the_end_is_told_no_verdict(demo_folder: Path, demo_media: Media) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "monitor.cli", "demo", "--data-dir", str(demo_folder.parent)],
        env={name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout
    said = []
    for line in demo.stdout:
        said.append(line)
        if "[4/4]" in line:
            demo.send_signal(signal.SIGINT)
    assert demo.wait() == 0
    assert said[-1] == "Stopped before the broadcast was over, so what was found is not judged.\n"
    assert "MISSED" not in "".join(said)
