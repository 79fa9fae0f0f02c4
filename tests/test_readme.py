"""The README says what the code does: its tables, its commands and its configuration are checked against it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic_core import PydanticUndefined

from monitor.cli import app
from monitor.metrics import Metrics
from monitor.settings import ChannelSettings, Settings, load_settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = [(kind, body) for kind, body in re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)]
COMMANDS = [
    line.removeprefix("$ ")
    for kind, body in BLOCKS
    if kind == "console"
    for line in body.splitlines()
    if line.startswith("$ ")
]
CHEAP = {"copywatch version", "copywatch refs list", "copywatch config show"}


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found, f"the README has no section {title}"
    return found.group(1)


def table(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def settings_table() -> str:
    """What the code says about its settings, as the README should have it."""
    rows = ["| Key | Default | What it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if name == "channels":
            rows.append(f"| `channels` | none | {field.description} |")
            keys = ChannelSettings.model_fields.items()
            rows += [f"| `channels[].{key}` | {_default(one.default)} | {one.description} |" for key, one in keys]
        elif isinstance(section, type) and hasattr(section, "model_fields"):
            keys = section.model_fields.items()
            rows += [f"| `{name}.{key}` | {_default(one.default)} | {one.description} |" for key, one in keys]
        else:
            default = "`copywatch` in the user's data folder" if name == "data_dir" else _default(field.default)
            rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows)


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "must be given"
    return "none" if value in (None, ()) else f"`{value}`"


def metrics_table() -> str:
    """What the code says about its metrics, as the README should have it."""
    rows = ["| Metric | Kind | Labels | What it counts |", "|---|---|---|---|"]
    for family in vars(Metrics(CollectorRegistry())).values():
        if isinstance(family, MetricWrapperBase):
            (described,) = family.describe()
            name = described.name + ("_total" if described.type == "counter" else "")
            labels = ", ".join(family._labelnames) or "-"
            rows.append(f"| `{name}` | {described.type} | {labels} | {described.documentation} |")
    return "\n".join(rows)


def test_the_table_of_settings_is_the_code_s() -> None:
    assert table(section("Settings")) == settings_table()


def test_the_table_of_metrics_is_the_code_s() -> None:
    assert table(section("Metrics")) == metrics_table()


def test_the_table_of_commands_is_whole() -> None:
    named = {
        tuple(re.findall(r"[a-z]+", row)[1:3]) for row in table(section("Your own videos and channels")).splitlines()
    }
    for path in _commands(typer.main.get_command(app)):
        assert any(words[: len(path)] == path for words in named), f"copywatch {' '.join(path)} is not in the README"


def _commands(command: object) -> list[tuple[str, ...]]:
    if not isinstance(command, typer.core.TyperGroup):
        return [()]
    return [(name, *rest) for name, one in command.commands.items() for rest in _commands(one)]


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_is_one_that_there_is(line: str) -> None:
    program, *arguments = shlex.split(line)
    if program != "copywatch":
        assert os.access(ROOT / program, os.X_OK), f"{program} cannot be run"
        return
    command = typer.main.get_command(app)
    while isinstance(command, typer.core.TyperGroup):
        name, *arguments = arguments
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(command.name, arguments)  # fails on an option that there is not


def test_the_readme_shows_commands_that_can_be_run_here() -> None:
    assert CHEAP & set(COMMANDS)


@pytest.mark.parametrize("line", sorted(CHEAP & set(COMMANDS)))
def test_the_cheap_ones_run(line: str, tmp_path: Path) -> None:
    _, *arguments = shlex.split(line)
    environment = {**os.environ, "COPYWATCH_DATA_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "monitor.cli", *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("body", [body for kind, body in BLOCKS if kind == "yaml"])
def test_each_piece_of_configuration_is_right(body: str, tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text(body)
    assert load_settings(config).model_fields_set >= set(yaml.safe_load(body))


def test_the_example_that_is_shipped_is_right() -> None:
    assert len(load_settings(ROOT / "deploy/copywatch.example.yaml").channels) == 2
