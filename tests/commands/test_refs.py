"""`copywatch refs`: the library on the command line."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command_result import Result, Run
from tests.support.media import write_film, write_sound


def ids(run: Run) -> list[str]:
    listed = run("refs", "list", "--json").json
    assert isinstance(listed, list)
    return [one["id"] for one in listed]


def lengths(result: Result) -> list[str]:
    """The lines of a registration without notes and without the shortest copy that is found."""
    lines = [line for line in result.out.splitlines() if not line.startswith("  note: ")]
    return [re.sub(r"; copies are found from \d+ s on\)$", ")", line) for line in lines]


def test_a_missing_library_is_empty(run: Run) -> None:
    result = run("refs", "list")
    assert (result.code, result.out.split(), result.err) == (0, ["ID", "LENGTH", "OWNER", "TITLE", "ADDED"], "")
    assert run("refs", "list", "--json").json == []


def test_a_video_is_added_listed_shown_and_removed(run: Run, films: Path) -> None:
    added = run("refs", "add", films / "one.mp4", "--title", "One", "--owner", "ACME", "--tag", "a=b", "--tag", "c=d=e")
    assert (added.code, added.err) == (0, "")
    said, note = added.out.splitlines()
    assert re.fullmatch(r"added: one \(6 s; copies are found from \d s on\)", said)
    assert note == "  note: It is only 6 s long; copies this short are easily missed."
    row = run("refs", "list").out.splitlines()[1].split()
    assert row[:4] == ["one", "00:00:06", "ACME", "One"]
    shown = run("refs", "show", "one", "--json").json
    assert isinstance(shown, dict)
    assert (shown["title"], shown["owner"], shown["n_seconds"]) == ("One", "ACME", 6)
    assert shown["tags"] == {"a": "b", "c": "d=e"}
    assert shown["added_at"].endswith("Z")
    in_words = run("refs", "show", "one").out
    assert "a=b, c=d=e" in in_words
    assert f"shortest_findable_s {shown['report']['shortest_findable_s']}\n" in in_words
    assert note.strip() in in_words
    assert run("refs", "rm", "one") == Result(0, "removed: one\n", "")
    assert ids(run) == []


def test_the_same_file_is_one_reference_and_another_file_of_its_name_is_a_second(
    run: Run, films: Path, tmp_path: Path
) -> None:
    assert lengths(run("refs", "add", films / "one.mp4")) == ["added: one (6 s)"]
    assert run("refs", "add", films / "one.mp4").out == "already there: one (6 s)\n"
    write_film(tmp_path / "one.mp4", 3, 4)
    assert lengths(run("refs", "add", tmp_path / "one.mp4")) == ["added: one-2 (4 s)"]
    assert ids(run) == ["one", "one-2"]


def test_one_bad_file_does_not_stop_the_others(run: Run, films: Path, tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video at all")
    write_sound(tmp_path / "sound.m4a")
    result = run("refs", "add", films / "one.mp4", "none.mp4", "text.mp4", "sound.m4a", films / "two.mp4")
    assert result.code == 1
    assert lengths(result) == ["added: one (6 s)", "added: two (5 s)"]
    errors = result.err.splitlines()
    expected = ("none.mp4", "text.mp4", "sound.m4a", "3 of 5 files were not registered.")
    assert [text in line for text, line in zip(expected, errors, strict=True)] == [True] * 4
    assert ids(run) == ["one", "two"]


def test_an_id_in_use_and_an_invalid_id_are_refused(run: Run, films: Path) -> None:
    run("refs", "add", films / "one.mp4", "--id", "x")
    taken = run("refs", "add", films / "two.mp4", "--id", "x")
    assert (taken.code, taken.out) == (1, "")
    assert "Another video has the id x" in taken.err
    assert run("refs", "add", films / "two.mp4", "--id", "../x").code == 1
    assert ids(run) == ["x"]


@pytest.mark.parametrize("command", [("refs", "show", "other"), ("refs", "rm", "other")])
def test_an_unknown_reference_is_reported(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command)
    assert (result.code, result.out) == (1, "")
    assert result.err == "copywatch: There is no reference other; `copywatch refs list` lists all.\n"


@pytest.mark.parametrize("command", [("refs", "rm", "x"), ("refs", "add", "one.mp4")])
def test_an_unusable_data_folder_is_reported_in_one_sentence(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "data").write_text("a file in the way")
    result = run(*command)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert str(tmp_path / "data") in result.err


def test_adding_with_json_prints_the_report(run: Run, films: Path) -> None:
    results = run("refs", "add", films / "one.mp4", "--json").json
    assert isinstance(results, list)
    assert results[0]["reference"]["id"] == "one"
    assert results[0]["already_there"] is False
    assert results[0]["report"]["n_seconds"] == 6


def test_folders_and_lists_on_stdin_are_registered(
    run: Run, films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (films / "one.srt").write_text("words")
    result = run("refs", "add", films)
    assert (result.code, lengths(result)) == (0, ["added: one (6 s)", "added: two (5 s)"])
    assert result.err == "copywatch: Skipped 1 files in folders: their names have no video extension.\n"
    for between in ("\n", "\0"):
        lines = between.join([str(films / "one.mp4"), str(films / "two.mp4"), ""])
        (tmp_path / "list").write_text(lines)
        with (tmp_path / "list").open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert run("refs", "add", "-").out == "already there: one (6 s)\nalready there: two (5 s)\n"
    (tmp_path / "nothing").mkdir()
    assert run("refs", "add", tmp_path / "nothing") == Result(1, "", "copywatch: No video found.\n")


def test_verify_names_damaged_references_and_repair_rebuilds_the_catalogue(
    run: Run, films: Path, tmp_path: Path
) -> None:
    run("refs", "add", films / "one.mp4", films / "two.mp4")
    assert run("refs", "verify").out.startswith("OK: 2 references, ")
    (path,) = (tmp_path / "data" / "features").glob("one.*")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    result = run("refs", "verify")
    assert (result.code, result.out.splitlines()[0][:12]) == (1, "damaged: one")
    assert "DAMAGED: " in result.out
    listed = run("refs", "list")
    assert len(listed.out.splitlines()) == 2
    assert "one is damaged and not searched" in listed.err
    path.write_bytes(content)
    assert run("refs", "verify").out.startswith("OK again: one\nOK: 2 references")
    (tmp_path / "data" / "catalog.sqlite").write_bytes(b"no database " * 1000)
    refused = run("refs", "list")
    assert refused.code == 1
    assert "copywatch refs verify --repair" in refused.err
    repaired = run("refs", "verify", "--repair", "--json")
    assert repaired.code == 0
    assert isinstance(repaired.json, dict)
    assert repaired.json["whole"] is True
    assert repaired.json["repair"]["restored"] == ["one", "two"]
    assert ids(run) == ["one", "two"]


def test_a_reference_is_exported_and_imported(run: Run, films: Path, tmp_path: Path) -> None:
    run("refs", "add", films / "one.mp4", "--title", "One")
    assert run("refs", "export", "one").out == "exported: one.copywatch (7 kB)\n"
    assert run("refs", "export", "one").code == 1
    there = ("--data-dir", tmp_path / "there")
    assert lengths(run("refs", "import", "one.copywatch", *there)) == ["added: one (6 s)"]
    results = run("refs", "import", "one.copywatch", *there, "--json").json
    assert isinstance(results, list)
    assert results[0]["already_there"] is True
    shown = run("refs", "show", "one", *there, "--json").json
    assert isinstance(shown, dict)
    assert (shown["title"], shown["imported"], shown["thumbnails_sha256"]) == ("One", True, "")
    (tmp_path / "bad.copywatch").write_text("nothing of ours")
    bad = run("refs", "import", "bad.copywatch", "one.copywatch", *there)
    assert (bad.code, bad.out) == (1, "already there: one (6 s)\n")
    assert bad.err == "copywatch: bad.copywatch is not a Copywatch export, or is truncated.\n"


@pytest.mark.slow
def test_adding_on_a_terminal_shows_speed_and_time_left(encoder: Path, tmp_path: Path) -> None:
    write_film(tmp_path / "film.mp4", 4, 90)
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
    environment |= {"COPYWATCH_DATA_DIR": str(tmp_path / "data"), "COPYWATCH_ENCODER": str(encoder), "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-m", "monitor.cli", "refs", "add", tmp_path / "film.mp4"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment | {"TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the terminal closes with its last writer
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert process.stdout is not None
    assert b"film" in process.stdout.read()
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"film\.mp4 \S+ 00:0\d:\d\d of 00:01:30 +\d+\.\dx +\d:\d\d:\d\d", text), text[-2000:]


def test_thumbnails_are_a_setting(run: Run, films: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("registration: {thumbnails: false}\n")
    run("refs", "add", films / "one.mp4", "--config", "c.yaml")
    run("refs", "add", films / "two.mp4")
    stored = [path.name.partition(".")[0] for path in (tmp_path / "data" / "thumbnails").iterdir()]
    assert stored == ["two"]
