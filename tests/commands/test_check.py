"""`copywatch check`: copies in recordings, printed and written to a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from monitor.cli import main
from monitor.demo.films import Film
from tests.support.command_result import Result, Run
from tests.support.media import write_clip

HARBOUR = Film("harbour", "Harbour", 11, ("hills", "face", "city", "card"), 40.0)
OTHER = Film("other", "Other", 33, ("pitch", "chart", "bubbles", "map"), 3600.0)


@dataclass(frozen=True)
class Archive:
    """A library with one film, a recording that shows 20 s of it, and one that does not."""

    data_dir: Path
    copied: Path
    clean: Path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    folder = tmp_path_factory.mktemp("archive")
    archive = Archive(folder / "data", folder / "monday.ts", folder / "tuesday.ts")
    moments = [number / 5 for number in range(250)]
    write_clip(folder / "harbour.mp4", ((at, HARBOUR.picture(at)) for at in moments[:200]), fps=5)
    write_clip(archive.clean, ((at, OTHER.picture(at)) for at in moments[:100]), fps=5)
    # seconds of the recording: 0 other 12.4 the film from its 10.0 on 32.4 other 50
    pictures = ((at, HARBOUR.picture(at - 2.4) if 12.4 <= at < 32.4 else OTHER.picture(at)) for at in moments)
    write_clip(archive.copied, pictures, fps=5)
    with pytest.raises(SystemExit) as exit:
        main(["refs", "add", str(folder / "harbour.mp4"), "--data-dir", str(archive.data_dir)])
    assert exit.value.code == 0
    return archive


@pytest.fixture
def check(run: Run, archive: Archive, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`copywatch check` with the shipped encoder and the archive's library."""
    monkeypatch.delenv("COPYWATCH_ENCODER")
    return lambda *arguments: run("check", "--data-dir", archive.data_dir, *arguments)


def test_check_writes_each_copy_in_the_recordings_own_seconds(check: Run, archive: Archive, tmp_path: Path) -> None:
    result = check(archive.copied, "--channel", "five", "--segments", "found.jsonl")
    assert (result.code, result.err) == (0, "")
    (line,) = (tmp_path / "found.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["channel"], found["reference"]) == ("five", "harbour")
    near = {"channel_start": 12.4, "channel_end": 32.4, "reference_start": 10.0, "reference_end": 30.0}
    assert {key: found[key] for key in near} == pytest.approx(near, abs=3.0)
    assert found["channel_start"] < found["detected_at"] <= found["channel_end"]
    assert 0 < found["score"] <= 1
    assert "five" in result.out
    assert "harbour" in result.out
    assert not list(tmp_path.glob("*.tmp"))


def test_check_of_several_files_names_each_channel_after_its_file(check: Run, archive: Archive) -> None:
    result = check(archive.clean, archive.copied, "none.ts", "--json", "--fail-on-match")
    assert result.code == 1
    assert isinstance(result.json, list)
    assert [one["channel"] for one in result.json] == ["monday"]
    assert result.err.count("\n") == 1
    assert "none.ts" in result.err


def test_check_of_a_recording_without_copies_exits_with_0(check: Run, archive: Archive, tmp_path: Path) -> None:
    result = check(archive.clean, "--fail-on-match", "--segments", "found.jsonl")
    assert result == Result(0, "no copy found\n", "")
    assert (tmp_path / "found.jsonl").read_text() == ""
