"""`copywatch check`: copies in recordings, printed and written to a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monitor.demo.films import Film
from tests.support.command import copywatch
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
    # A process of its own: `refs add` limits its memory, and this one may have allocated more in other tests.
    added = copywatch("refs", "add", str(folder / "harbour.mp4"), "--data-dir", str(archive.data_dir))
    assert added.returncode == 0, added.stderr
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


def the_copy(result: Result) -> dict[str, Any]:
    assert isinstance(result.json, list)
    (found,) = result.json
    return dict(found)


def test_check_stores_the_evidence_of_each_copy_in_the_named_folder(
    check: Run, archive: Archive, tmp_path: Path
) -> None:
    result = check(archive.copied, "--evidence", "case/7", "--json")
    assert (result.code, result.err) == (0, "")
    found = the_copy(result)
    folder = tmp_path / found["evidence"]
    assert folder == tmp_path / "case" / "7" / found["id"]
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert {"report.json", "events.json", "reviews.json", "tile-start.png", "air-start.jpg", "ref-start.jpg"} <= names
    assert {file["name"] for file in manifest["files"]} == names
    for file in manifest["files"]:
        content = (folder / file["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
    report = json.loads((folder / "report.json").read_text())
    assert (report["complete"], report["note"]) == (True, None)
    assert report["alert"] == found
    assert json.loads((folder / "events.json").read_text())[-1] == found
    assert not (archive.data_dir / "evidence").exists()


def test_a_second_check_replaces_the_evidence_and_leaves_other_files_alone(
    check: Run, archive: Archive, tmp_path: Path
) -> None:
    (tmp_path / "case").mkdir()
    (tmp_path / "case" / "notes.txt").write_text("mine")
    reports = []
    for _ in range(2):
        found = the_copy(check(archive.copied, "--evidence", "case", "--json"))
        report = json.loads((tmp_path / found["evidence"] / "report.json").read_text())
        reports.append({name: value for name, value in report.items() if name != "made_at"})
    assert reports[0] == reports[1]
    assert (tmp_path / "case" / "notes.txt").read_text() == "mine"


def test_an_evidence_folder_that_cannot_be_created_is_reported_before_any_work(
    check: Run, archive: Archive, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = check(archive.copied, "--evidence", "file/case")
    assert result.code == 2
    assert "cannot create the folder" in result.err


def test_evidence_that_cannot_be_stored_fails_the_check_but_not_its_result(
    check: Run, archive: Archive, tmp_path: Path
) -> None:
    found = the_copy(check(archive.copied, "--evidence", "case", "--json"))
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / found["id"]).write_text("not a folder")
    result = check(archive.copied, "--evidence", "blocked", "--json")
    assert result.code == 1
    assert "evidence of 1 of 1 cop" in result.err
    assert result.json == [found | {"evidence": None}]
