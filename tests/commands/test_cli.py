"""The command line: what goes where, which code it ends with, and no traceback whatever is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from monitor import __version__
from tests.commands.conftest import Ended, Run


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
