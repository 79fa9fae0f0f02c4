"""The README and its pages say what the code does: tables, commands, configuration and links are checked."""

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
from pydantic_core import PydanticUndefined

from monitor.cli import app
from monitor.config.settings import ChannelSettings, Settings, load_settings
from monitor.ops.metrics import Metrics

ROOT = Path(__file__).parent.parent
ROOMS = [
    page
    for folder in ("deploy", "monitor", "reference_db", "scripts", "tests")
    for page in sorted((ROOT / folder).rglob("README.md"))
]
CONTRIBUTING, SECURITY = ROOT / ".github/CONTRIBUTING.md", ROOT / ".github/SECURITY.md"
PAGES = {page: page.read_text() for page in [ROOT / "README.md", CONTRIBUTING, SECURITY, *ROOMS]}
BLOCKS = [block for words in PAGES.values() for block in re.findall(r"^```(\w+)\n(.*?)^```", words, re.M | re.S)]
LINKS = [(page, link) for page, words in PAGES.items() for link in re.findall(r"\]\(([^)]+)\)", words)]
COMMANDS = [
    line.removeprefix("$ ")
    for kind, body in BLOCKS
    if kind == "console"
    for line in body.splitlines()
    if line.startswith("$ ")
]
CHEAP = {"copywatch version", "copywatch refs list", "copywatch config show"}


def section(title: str) -> str:
    """A page, or a section of one, by its heading."""
    for words in PAGES.values():
        if found := re.search(rf"^(##?) {title}\n(.*?)(?=^\1 |\Z)", words, re.M | re.S):
            return found.group(2)
    raise AssertionError(f"no page has a section {title}")


def table(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def settings_table() -> str:
    """What the code says about its settings, as its page should have it."""
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
    """What the code says about its metrics, as its page should have it."""
    rows = ["| Metric | Kind | Labels | What it counts |", "|---|---|---|---|"]
    for family in Metrics(CollectorRegistry()).families:
        rows.append(f"| `{family.name}` | {family.kind} | {', '.join(family.labels) or '-'} | {family.help} |")
    return "\n".join(rows)


def test_the_table_of_settings_is_the_code_s() -> None:
    assert table(section("Settings")) == settings_table()


def test_the_table_of_metrics_is_the_code_s() -> None:
    assert table(section("Metrics")) == metrics_table()


def test_the_table_of_commands_is_whole() -> None:
    named = {tuple(re.findall(r"[a-z]+", row)[1:3]) for row in table(section("Commands")).splitlines()}
    for path in _commands(typer.main.get_command(app)):
        assert any(words[: len(path)] == path for words in named), (
            f"copywatch {' '.join(path)} is not in monitor/commands/README.md"
        )


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


@pytest.mark.parametrize(("page", "link"), [(page, link) for page, link in LINKS if "://" not in link])
def test_each_link_leads_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).is_file()


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        reached |= new
        targets = {(page.parent / link).resolve() for page, link in LINKS if page in new and "://" not in link}
        new = targets & PAGES.keys() - reached
    assert PAGES.keys() <= reached


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
