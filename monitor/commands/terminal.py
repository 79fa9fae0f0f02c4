"""What every command shares: options, settings, and how results, progress and errors are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from monitor.config.settings import Settings, load_settings
from monitor.ops.timestamps import rfc3339
from reference_db import text

FAILED, CONFIG, UNREACHABLE = 1, 3, 4  # exit codes; invalid usage is 2, by Click

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="Configuration file.", envvar="COPYWATCH_CONFIG")
]
DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Folder of all stored data; overrides the configuration."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoteOption = Annotated[str, typer.Option(help="Reason, in your words.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID")]


def settings_of(context: typer.Context, config_file: Path | None = None, data_dir: Path | None = None) -> Settings:
    """The settings; options after the command override those before it."""
    outer_config, outer_data_dir = context.obj
    return load_settings(config_file or outer_config, data_dir=data_dir or outer_data_dir)


def print_error(error: object) -> None:
    for line in str(error).splitlines():
        typer.echo(f"copywatch: {line}", err=True)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=printable))


def printable(value: object) -> str:
    """The text of a value; characters that would control the terminal are replaced."""
    return rfc3339(value) if isinstance(value, datetime) else text.printable(str(value))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints aligned columns: folded to the width of a terminal, never cut in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # not markup: titles are of others
    console.print(table)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = int(seconds)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"


@contextmanager
def progress_bar(label: str, unit: str = "s") -> Iterator[Callable[[float, float | None], None]]:
    """Shows a bar on stderr while open, if that is a terminal; yields its update(done, total)."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=int(done), total=total and int(total))
