"""The command line: what goes where, which code it ends with, and no traceback whatever is wrong."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monitor import __version__
from monitor.cli import main
from monitor.demo.films import Film
from tests.media import write_clip, write_film, write_sound


class Grid(nn.Module):
    """A small honest encoder: the colours of 13 x 13 parts of the picture, and five constants."""

    def forward(self, pictures: Tensor) -> Tensor:
        parts = torch.nn.functional.adaptive_avg_pool2d(pictures, 13).flatten(1)
        return torch.cat([parts, torch.full((parts.shape[0], 5), 0.01)], dim=1)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def said(self) -> object:
        return json.loads(self.out)


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "grid.pt"
    torch.jit.script(Grid()).save(str(path))  # type: ignore[no-untyped-call]
    return path


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    write_film(folder / "one.mp4", 1, 6)
    write_film(folder / "two.mp4", 2, 5)
    return folder


@pytest.fixture
def run(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, in a library of its own."""
    for name in [name for name in os.environ if name.startswith("COPYWATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COPYWATCH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COPYWATCH_ENCODER", str(encoder))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Ended:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        assert "\x1b" not in out + err, "colour, and nobody watches"
        code = ended.value.code
        assert isinstance(code, int)
        return Ended(code, out, err)

    return call


def test_version(run: Run) -> None:
    assert run("version") == Ended(0, f"copywatch {__version__}\n", "")
    said = run("version", "--json").said
    assert isinstance(said, dict)
    assert said["copywatch"] == __version__
    assert {"python", "torch", "av"} <= said.keys()


@pytest.mark.parametrize("arguments", [("--help",), ("version",), ("config", "show"), ("refs", "list")])
def test_what_needs_no_network_does_not_wait_for_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from monitor.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    assert not {'torch', 'faiss', 'av', 'fastapi'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "COPYWATCH_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("fly",),
        ("refs", "add"),
        ("refs", "add", "a.mp4", "b.mp4", "--id", "x"),
        ("refs", "add", "a.mp4", "--tag", "no-equals-sign"),
        ("check", "a.ts", "b.ts", "--channel", "five"),
        ("check", "a.ts", "--nonsense"),
        ("check", "a.ts", "--segments", "none/found.jsonl"),
    ],
)
def test_wrong_usage_is_2(run: Run, arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert "Usage" in ended.err


# --- config ----------------------------------------------------------------------------------------------------------


def test_config_check_counts_the_channels(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("channels:\n  - {name: five, url: 'http://h/5.ts'}\n")
    assert run("config", "check", "--config", "c.yaml") == Ended(0, "c.yaml: right, 1 channels\n", "")
    assert run("--config", "c.yaml", "config", "check").out == "c.yaml: right, 1 channels\n"


@pytest.mark.parametrize(
    "command", [("config", "check"), ("config", "show"), ("serve",), ("refs", "list"), ("doctor",)]
)
def test_a_wrong_configuration_is_3_wherever_it_is_read(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "c.yaml").write_text("web:\n  prot: 80\n")
    assert run(*command, "--config", "c.yaml") == Ended(
        3, "", "copywatch: c.yaml:2: unknown key web.prot; did you mean port?\n"
    )


def test_a_missing_configuration_is_3(run: Run) -> None:
    ended = run("serve", "--config", "none.yaml")
    assert (ended.code, ended.err) == (3, "copywatch: none.yaml: no such file; name an existing one with --config.\n")


def test_serve_without_channels_is_3(run: Run) -> None:
    ended = run("serve")
    assert ended.code == 3
    assert "no channel is configured" in ended.err


def test_init_prints_every_setting_with_its_default(run: Run, tmp_path: Path) -> None:
    text = run("init").out
    config = tmp_path / "copywatch.yaml"
    config.write_text(text)
    assert run("config", "check", "--config", config).out == f"{config}: right, 0 channels\n"  # as it stands
    settings = re.findall(r"^# ( *(?:- )?[a-z_]+:.*)$", text.partition("\n\n")[2], re.M)  # below what it is about
    config.write_text("\n".join(settings))
    shown = json.loads(run("config", "show", "--json", "--config", config).out)
    assert [one["name"] for one in shown.pop("channels")] == ["channel-5"]
    default = json.loads(run("config", "show", "--json").out)
    assert default.pop("channels") == []
    assert shown == default


def test_the_schema_knows_what_is_right_and_what_is_not(run: Run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(run("config", "schema").out)
    (tmp_path / "right.yaml").write_text("channels: [{name: a, url: 'http://192.0.2.1/'}]\nweb: {port: 9000}\n")
    (tmp_path / "wrong.yaml").write_text("web: {prot: 9000}\n")
    check = [sys.executable, "-m", "check_jsonschema", "--schemafile", "schema.json"]
    codes = [subprocess.run([*check, name], cwd=tmp_path).returncode for name in ("right.yaml", "wrong.yaml")]
    assert codes == [0, 1]


def test_config_show_hides_credentials_and_says_what_is_in_force(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("channels:\n  - {name: a, url: 'rtsp://u:hunter2@h/a'}\nweb: {port: 9}\n")
    shown = run("config", "show", "--config", "c.yaml")
    assert "hunter2" not in shown.out
    assert "url: rtsp://***@h/a" in shown.out
    said = run("config", "show", "--config", "c.yaml", "--data-dir", "/x", "--json").said
    assert isinstance(said, dict)
    assert said["web"].items() >= {"host": "127.0.0.1", "port": 9}.items()
    assert said["data_dir"] == "/x"
    assert said["channels"][0]["url"] == "rtsp://***@h/a"


# --- refs ------------------------------------------------------------------------------------------------------------


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


# --- check -----------------------------------------------------------------------------------------------------------

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
    aired = ((at, HARBOUR.picture(at - 2.4) if 12.4 <= at < 32.4 else OTHER.picture(at)) for at in moments)
    write_clip(archive.copied, aired, fps=5)
    with pytest.raises(SystemExit) as ended:
        main(["refs", "add", str(folder / "harbour.mp4"), "--data-dir", str(archive.data_dir)])
    assert ended.value.code == 0
    return archive


@pytest.fixture
def check(run: Run, archive: Archive, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`copywatch check` with the shipped encoder and the archive's library."""
    monkeypatch.delenv("COPYWATCH_ENCODER")
    return lambda *arguments: run("check", "--data-dir", archive.data_dir, *arguments)


def test_check_writes_each_copy_in_the_recordings_own_seconds(check: Run, archive: Archive, tmp_path: Path) -> None:
    ended = check(archive.copied, "--channel", "five", "--segments", "found.jsonl")
    assert (ended.code, ended.err) == (0, "")
    (line,) = (tmp_path / "found.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["channel"], found["reference"]) == ("five", "harbour")
    near = {"channel_start": 12.4, "channel_end": 32.4, "reference_start": 10.0, "reference_end": 30.0}
    assert {key: found[key] for key in near} == pytest.approx(near, abs=3.0)
    assert found["channel_start"] < found["detected_at"] <= found["channel_end"]
    assert 0 < found["score"] <= 1
    assert "five" in ended.out
    assert "harbour" in ended.out
    assert not list(tmp_path.glob("*.tmp"))


def test_check_of_several_names_each_by_its_file(check: Run, archive: Archive) -> None:
    ended = check(archive.clean, archive.copied, "none.ts", "--json", "--fail-on-match")
    assert ended.code == 1
    assert isinstance(ended.said, list)
    assert [one["channel"] for one in ended.said] == ["monday"]
    assert ended.err.count("\n") == 1
    assert "none.ts" in ended.err


def test_check_of_a_clean_recording_is_0_whatever_is_asked(check: Run, archive: Archive, tmp_path: Path) -> None:
    ended = check(archive.clean, "--fail-on-match", "--segments", "found.jsonl")
    assert ended == Ended(0, "no copy found\n", "")
    assert (tmp_path / "found.jsonl").read_text() == ""


# --- doctor ----------------------------------------------------------------------------------------------------------


def findings(ended: Ended) -> dict[str, dict[str, object]]:
    assert isinstance(ended.said, list)
    return {finding["what"]: finding for finding in ended.said}


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_doctor_names_what_does_not_answer(
    run: Run, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "c.yaml").write_text(
            f"web: {{port: 0}}\nchannels:\n  - {{name: up, url: 'http://127.0.0.1:{port}/x.ts'}}\n"
            f"  - {{name: down, url: 'rtsp://u:hunter2@127.0.0.1:{free_port}/x'}}\n"
            "  - {name: gone, url: none.ts}\n  - {name: air, url: 'udp://239.0.0.1:9'}\n"
        )
        monkeypatch.delenv("COPYWATCH_ENCODER")
        ended = run("doctor", "--config", "c.yaml", "--json")
    found = findings(ended)
    assert [found[f"channel {name}"]["ok"] for name in ("up", "down", "gone", "air")] == [True, False, False, True]
    assert "hunter2" not in ended.out
    assert ended.code == 4
    assert all(found[what]["ok"] for what in ("libraries", "data folder", "web port", "models", "library"))


def test_doctor_finds_a_port_that_is_taken_and_a_folder_that_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file in the way")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "c.yaml").write_text(f"web: {{port: {server.getsockname()[1]}}}\n")
        ended = run("doctor", "--config", "c.yaml")
    assert ended.code == 1
    faults = [line for line in ended.out.splitlines() if line.startswith("FAULT")]
    assert [line.split()[1] for line in faults][:2] == ["data", "web"]
    assert "set COPYWATCH_DATA_DIR" in faults[0]
    assert "set web.port" in faults[1]
