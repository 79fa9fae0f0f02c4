"""The command line: output, exit codes, and one sentence instead of a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from monitor import __version__
from tests.support.command_result import Result, Run


def test_version(run: Run) -> None:
    assert run("version") == Result(0, f"copywatch {__version__}\n", "")
    versions = run("version", "--json").json
    assert isinstance(versions, dict)
    assert versions["copywatch"] == __version__
    assert {"python", "torch", "av"} <= versions.keys()


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
def test_invalid_usage_exits_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert "Usage" in result.err


# --- config ----------------------------------------------------------------------------------------------------------


def test_config_check_counts_the_channels(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("channels:\n  - {name: five, url: 'http://h/5.ts'}\n")
    assert run("config", "check", "--config", "c.yaml") == Result(0, "c.yaml: OK (1 channel)\n", "")
    assert run("--config", "c.yaml", "config", "check").out == "c.yaml: OK (1 channel)\n"


@pytest.mark.parametrize(
    "command", [("config", "check"), ("config", "show"), ("serve",), ("refs", "list"), ("doctor",)]
)
def test_every_command_refuses_an_invalid_configuration_with_3(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "c.yaml").write_text("web:\n  prot: 80\n")
    assert run(*command, "--config", "c.yaml") == Result(
        3, "", "copywatch: c.yaml:2: unknown key web.prot; did you mean port?\n"
    )


def test_a_missing_configuration_exits_with_3(run: Run) -> None:
    result = run("serve", "--config", "none.yaml")
    assert (result.code, result.err) == (3, "copywatch: none.yaml: no such file; give an existing one with --config.\n")


def test_serve_without_channels_exits_with_3(run: Run) -> None:
    result = run("serve")
    assert result.code == 3
    assert "no channel is configured" in result.err


def test_init_prints_every_setting_with_its_default(run: Run, tmp_path: Path) -> None:
    text = run("init").out
    config = tmp_path / "copywatch.yaml"
    config.write_text(text)
    assert run("config", "check", "--config", config).out == f"{config}: OK (0 channels)\n"
    settings = re.findall(r"^# ( *(?:- )?[a-z_]+:.*)$", text.partition("\n\n")[2], re.M)  # below the introduction
    config.write_text("\n".join(settings))
    values = json.loads(run("config", "show", "--json", "--config", config).out)
    assert [one["name"] for one in values.pop("channels")] == ["channel-5"]
    defaults = json.loads(run("config", "show", "--json").out)
    assert defaults.pop("channels") == []
    assert values == defaults


def test_the_schema_accepts_a_valid_file_and_refuses_an_invalid_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(run("config", "schema").out)
    (tmp_path / "valid.yaml").write_text("channels: [{name: a, url: 'http://192.0.2.1/'}]\nweb: {port: 9000}\n")
    (tmp_path / "invalid.yaml").write_text("web: {prot: 9000}\n")
    check = [sys.executable, "-m", "check_jsonschema", "--schemafile", "schema.json"]
    codes = [subprocess.run([*check, name], cwd=tmp_path).returncode for name in ("valid.yaml", "invalid.yaml")]
    assert codes == [0, 1]


def test_config_show_prints_the_settings_in_force_without_credentials(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("channels:\n  - {name: a, url: 'rtsp://u:hunter2@h/a'}\nweb: {port: 9}\n")
    shown = run("config", "show", "--config", "c.yaml")
    assert "hunter2" not in shown.out
    assert "url: rtsp://***@h/a" in shown.out
    values = run("config", "show", "--config", "c.yaml", "--data-dir", "/x", "--json").json
    assert isinstance(values, dict)
    assert values["web"].items() >= {"host": "127.0.0.1", "port": 9}.items()
    assert values["data_dir"] == "/x"
    assert values["channels"][0]["url"] == "rtsp://***@h/a"
