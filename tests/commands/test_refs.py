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

from tests.commands.conftest import Ended, Run
from tests.support.media import write_film, write_sound


def ids(run: Run) -> list[str]:
    said = run("refs", "list", "--json").said
    assert isinstance(said, list)
    return [one["id"] for one in said]


def test_a_library_that_is_not_there_is_empty(run: Run) -> None:
    ended = run("refs", "list")
    assert (ended.code, ended.out.split(), ended.err) == (0, ["ID", "LENGTH", "OWNER", "TITLE", "ADDED"], "")
    assert run("refs", "list", "--json").said == []


def test_a_video_is_added_listed_shown_and_removed(run: Run, films: Path) -> None:
    added = run("refs", "add", films / "one.mp4", "--title", "One", "--owner", "ACME", "--tag", "a=b", "--tag", "c=d=e")
    assert (added.code, added.out, added.err) == (0, "added: one (6 s)\n", "")
    row = run("refs", "list").out.splitlines()[1].split()
    assert row[:4] == ["one", "00:00:06", "ACME", "One"]
    shown = run("refs", "show", "one", "--json").said
    assert isinstance(shown, dict)
    assert (shown["title"], shown["owner"], shown["n_seconds"]) == ("One", "ACME", 6)
    assert shown["tags"] == {"a": "b", "c": "d=e"}
    assert shown["added_at"].endswith("Z")
    assert "a=b, c=d=e" in run("refs", "show", "one").out
    assert run("refs", "rm", "one") == Ended(0, "removed: one\n", "")
    assert ids(run) == []


def test_the_same_bytes_are_one_reference_and_other_bytes_of_the_name_another(
    run: Run, films: Path, tmp_path: Path
) -> None:
    assert run("refs", "add", films / "one.mp4").out == "added: one (6 s)\n"
    assert run("refs", "add", films / "one.mp4").out == "already there: one (6 s)\n"
    write_film(tmp_path / "one.mp4", 3, 4)
    assert run("refs", "add", tmp_path / "one.mp4").out == "added: one-2 (4 s)\n"
    assert ids(run) == ["one", "one-2"]


def test_one_bad_file_does_not_stop_the_others(run: Run, films: Path, tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video at all")
    write_sound(tmp_path / "sound.m4a")
    ended = run("refs", "add", films / "one.mp4", "none.mp4", "text.mp4", "sound.m4a", films / "two.mp4")
    assert ended.code == 1
    assert ended.out == "added: one (6 s)\nadded: two (5 s)\n"
    complaints = ended.err.splitlines()
    words = ("none.mp4", "text.mp4", "sound.m4a", "3 of 5 were not registered.")
    assert [word in line for word, line in zip(words, complaints, strict=True)] == [True] * 4
    assert ids(run) == ["one", "two"]


def test_an_id_that_is_taken_or_cannot_be_one_is_refused(run: Run, films: Path) -> None:
    run("refs", "add", films / "one.mp4", "--id", "x")
    taken = run("refs", "add", films / "two.mp4", "--id", "x")
    assert (taken.code, taken.out) == (1, "")
    assert "x is taken" in taken.err
    assert run("refs", "add", films / "two.mp4", "--id", "../x").code == 1
    assert ids(run) == ["x"]


@pytest.mark.parametrize("command", [("refs", "show", "nobody"), ("refs", "rm", "nobody")])
def test_an_unknown_reference_is_said_to_be_one(run: Run, command: tuple[str, ...]) -> None:
    ended = run(*command)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "copywatch: There is no reference nobody; `copywatch refs list` shows those there are.\n"


@pytest.mark.parametrize("command", [("refs", "rm", "x"), ("refs", "add", "one.mp4")])
def test_a_data_folder_that_cannot_be_one_is_one_sentence(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "data").write_text("a file in the way")
    ended = run(*command)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert str(tmp_path / "data") in ended.err


def test_adding_as_json_has_the_report(run: Run, films: Path) -> None:
    said = run("refs", "add", films / "one.mp4", "--json").said
    assert isinstance(said, list)
    assert said[0]["reference"]["id"] == "one"
    assert said[0]["already_there"] is False
    assert said[0]["report"]["n_seconds"] == 6


def test_folders_and_lists_on_stdin_are_registered(
    run: Run, films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (films / "one.srt").write_text("words")
    ended = run("refs", "add", films)
    assert (ended.code, ended.out) == (0, "added: one (6 s)\nadded: two (5 s)\n")
    assert ended.err == "copywatch: 1 files in folders were passed over: they are no videos by their names.\n"
    for between in ("\n", "\0"):
        lines = between.join([str(films / "one.mp4"), str(films / "two.mp4"), ""])
        (tmp_path / "list").write_text(lines)
        with (tmp_path / "list").open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert run("refs", "add", "-").out == "already there: one (6 s)\nalready there: two (5 s)\n"
    (tmp_path / "nothing").mkdir()
    assert run("refs", "add", tmp_path / "nothing") == Ended(1, "", "copywatch: There is no video there.\n")


def test_verify_names_what_is_damaged_and_repair_mends_the_catalogue(run: Run, films: Path, tmp_path: Path) -> None:
    run("refs", "add", films / "one.mp4", films / "two.mp4")
    assert run("refs", "verify").out.startswith("all whole: 2 references, ")
    (path,) = (tmp_path / "data" / "features").glob("one.*")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    ended = run("refs", "verify")
    assert (ended.code, ended.out.splitlines()[0][:12]) == (1, "damaged: one")
    assert "NOT WHOLE" in ended.out
    listed = run("refs", "list")
    assert len(listed.out.splitlines()) == 2
    assert "one is damaged and is not searched" in listed.err
    path.write_bytes(content)
    assert run("refs", "verify").out.startswith("whole again: one\nall whole: 2 references")
    (tmp_path / "data" / "catalog.sqlite").write_bytes(b"no database " * 1000)
    refused = run("refs", "list")
    assert refused.code == 1
    assert "copywatch refs verify --repair" in refused.err
    mended = run("refs", "verify", "--repair", "--json")
    assert mended.code == 0
    assert isinstance(mended.said, dict)
    assert mended.said["whole"] is True
    assert mended.said["repair"]["restored"] == ["one", "two"]
    assert ids(run) == ["one", "two"]


def test_a_reference_is_exported_and_imported(run: Run, films: Path, tmp_path: Path) -> None:
    run("refs", "add", films / "one.mp4", "--title", "One")
    assert run("refs", "export", "one").out == "exported: one.copywatch (7 kB)\n"
    assert run("refs", "export", "one").code == 1
    there = ("--data-dir", tmp_path / "there")
    assert run("refs", "import", "one.copywatch", *there).out == "added: one (6 s)\n"
    said = run("refs", "import", "one.copywatch", *there, "--json").said
    assert isinstance(said, list)
    assert said[0]["already_there"] is True
    shown = run("refs", "show", "one", *there, "--json").said
    assert isinstance(shown, dict)
    assert (shown["title"], shown["imported"], shown["thumbnails_sha256"]) == ("One", True, "")
    (tmp_path / "bad.copywatch").write_text("nothing of ours")
    bad = run("refs", "import", "bad.copywatch", "one.copywatch", *there)
    assert (bad.code, bad.out) == (1, "already there: one (6 s)\n")
    assert bad.err == "copywatch: bad.copywatch is no export of Copywatch, or cut short.\n"


@pytest.mark.slow
def test_adding_on_a_terminal_shows_how_fast_and_how_long_still(encoder: Path, tmp_path: Path) -> None:
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
    with suppress(OSError):  # the terminal is gone once nobody writes to it
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert process.stdout is not None
    assert b"film" in process.stdout.read()
    assert process.wait() == 0
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"film\.mp4 \S+ 00:0\d:\d\d of 00:01:30 +\d+\.\dx +\d:\d\d:\d\d", words), words[-2000:]


def test_thumbnails_are_a_setting(run: Run, films: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("registration: {thumbnails: false}\n")
    run("refs", "add", films / "one.mp4", "--config", "c.yaml")
    run("refs", "add", films / "two.mp4")
    kept = [path.name.partition(".")[0] for path in (tmp_path / "data" / "thumbnails").iterdir()]
    assert kept == ["two"]
