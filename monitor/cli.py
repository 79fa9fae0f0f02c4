"""The command line: words in, calls out.

Results go to stdout, progress and complaints to stderr. Exit codes: 0 all is well, 1 something failed (or `check
--fail-on-match` found a copy), 2 wrong usage, 3 wrong configuration, 4 an address that cannot be reached. What costs
seconds to import (torch, FAISS) is imported by the command that needs it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from monitor import __version__
from monitor.errors import ConfigError, MonitorError, SourceError, Unreachable
from monitor.settings import Settings, load_settings
from reference_db.errors import CatalogError

if TYPE_CHECKING:
    from reference_db.catalog import Reference

FAILED, USAGE, CONFIG, UNREACHABLE = 1, 2, 3, 4

app = typer.Typer(
    name="copywatch",
    help="Finds copies of registered videos in live broadcasts while they are on air.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
refs = typer.Typer(no_args_is_help=True, help="The library of references.")
config = typer.Typer(no_args_is_help=True, help="The configuration.")
app.add_typer(refs, name="refs")
app.add_typer(config, name="config")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="Configuration file.", envvar="COPYWATCH_CONFIG")
]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Where all state lives; wins over the configuration.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits. Our own errors become one sentence on stderr."""
    try:
        app(arguments, prog_name="copywatch")
    except ConfigError as error:
        _fail(error, CONFIG)
    except (Unreachable, SourceError) as error:
        _fail(error, UNREACHABLE)
    except (MonitorError, CatalogError) as error:
        _fail(error, FAILED)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        _fail(f"{named}{error.strerror or error}", FAILED)
    sys.exit(0)


def _fail(complaint: object, code: int) -> NoReturn:
    _complain(complaint)
    sys.exit(code)


def _complain(complaint: object) -> None:
    for line in str(complaint).splitlines():
        typer.echo(f"copywatch: {line}", err=True)


@app.callback()
def common(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    context.obj = (config_file, data_dir)


def _settings(context: typer.Context, config_file: Path | None = None, data_dir: Path | None = None) -> Settings:
    """The settings; options after the command win over those before it."""
    outer_config, outer_data_dir = context.obj
    return load_settings(config_file or outer_config, data_dir=data_dir or outer_data_dir)


# --- what is printed -------------------------------------------------------------------------------------------------


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds").replace("+00:00", "Z")
    return str(value)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns; on a terminal they are folded to its width, in a pipe nothing is cut."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = int(seconds)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float, float | None], None]]:
    """A bar on stderr while open, and what moves it (seconds done, of how many); no bar where nobody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda at, total: progress.update(task, completed=int(at), total=total and int(total))


# --- refs ------------------------------------------------------------------------------------------------------------


@refs.command("add")
def refs_add(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Videos to register.")],
    reference_id: Annotated[
        str | None, typer.Option("--id", help="Id of the reference; the file's name without its ending when left out.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title for people.")] = None,
    owner: Annotated[str, typer.Option(help="Who holds the rights.")] = "",
    tag: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A tag; may be given often.")] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register videos: decode, encode, store. The same file twice is one reference."""
    if len(files) > 1 and (reference_id or title):
        raise typer.BadParameter("--id and --title name one video; register the files one by one.")
    tags = _tags(tag or [])
    settings = _settings(context, config_file, data_dir)
    from reference_db.catalog import Catalog
    from reference_db.encoder import load_encoder
    from reference_db.registration import register

    encoder = load_encoder(settings.encoder, threads=settings.compute.threads)
    added, n_failed = [], 0
    with Catalog.open(settings.data_dir, write=True) as catalog:
        for file in files:
            try:
                with _progress(file.name) as step:
                    done = register(
                        file, catalog, encoder, id=reference_id, title=title, owner=owner, tags=tags, progress=step
                    )
            except CatalogError as error:
                _complain(error)
                n_failed += 1
                continue
            added.append({"file": str(file), **dataclasses.asdict(done)})
            if not as_json:
                typer.echo(_added(done.reference, done.already_there))
                for warning in done.report.warnings:
                    typer.echo(f"  note: {warning}")
    if as_json:
        _print_json(added)
    if n_failed:
        raise typer.Exit(FAILED)


def _added(reference: Reference, already_there: bool) -> str:
    words = "already there" if already_there else "added"
    dull = f", {reference.n_uninformative} s of them black or flat" if reference.n_uninformative else ""
    return f"{words}: {reference.id} ({reference.n_seconds} s{dull})"


def _tags(pairs: Sequence[str]) -> dict[str, str]:
    tags = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}.", param_hint="--tag")
        tags[key] = value
    return tags


@refs.command("list")
def refs_list(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the references."""
    from reference_db.catalog import Catalog

    with Catalog.open(_settings(context, config_file, data_dir).data_dir) as catalog:
        references = catalog.references()
    if as_json:
        _print_json([dataclasses.asdict(reference) for reference in references])
        return
    rows = [(one.id, clock(one.n_seconds), one.owner, one.title, _plain(one.added_at)) for one in references]
    _print_table(("ID", "LENGTH", "OWNER", "TITLE", "ADDED"), rows)


@refs.command("show")
def refs_show(
    context: typer.Context,
    reference_id: Annotated[str, typer.Argument(metavar="ID")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one reference."""
    from reference_db.catalog import Catalog, ReferenceId

    with Catalog.open(_settings(context, config_file, data_dir).data_dir) as catalog:
        shown = dataclasses.asdict(catalog.get(ReferenceId(reference_id)))
    if as_json:
        _print_json(shown)
        return
    for name, value in shown.items():
        value = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name:16} {_plain(value)}")


@refs.command("rm")
def refs_rm(
    context: typer.Context,
    reference_ids: Annotated[list[str], typer.Argument(metavar="ID...")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Remove references; monitors that run drop them within seconds."""
    from reference_db.catalog import Catalog, ReferenceId

    n_failed = 0
    with Catalog.open(_settings(context, config_file, data_dir).data_dir, write=True) as catalog:
        for reference_id in reference_ids:
            try:
                catalog.remove(ReferenceId(reference_id))
                typer.echo(f"removed: {reference_id}")
            except CatalogError as error:
                _complain(error)
                n_failed += 1
    if n_failed:
        raise typer.Exit(FAILED)


# --- check, serve, demo ----------------------------------------------------------------------------------------------


@app.command()
def check(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recordings of a channel.")],
    channel: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The channel's name; the file's without its ending when left out."),
    ] = None,
    segments: Annotated[
        Path | None, typer.Option(metavar="OUT.jsonl", help="Write one JSON object per copy to this file.")
    ] = None,
    fail_on_match: Annotated[bool, typer.Option(help="Exit with 1 when a copy is found.")] = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search recordings for copies, by the same pipeline as `serve`, as fast as it goes."""
    if channel is not None and len(files) > 1:
        raise typer.BadParameter("--channel names one recording; check the files one by one.")
    if segments is not None and not segments.parent.is_dir():  # said now, not after hours of work
        raise typer.BadParameter(f"there is no folder {segments.parent}; make it first.", param_hint="--segments")
    settings = _settings(context, config_file, data_dir)
    from monitor.pipeline import check_file

    found: list[dict[str, Any]] = []
    n_failed = 0
    for file in files:
        try:
            with _progress(file.name) as step:
                found += check_file(file, channel or file.stem, settings=settings, progress=step)
        except CatalogError as error:
            _complain(error)
            n_failed += 1
    if segments is not None:
        _write_lines(segments, found)
    if as_json:
        _print_json(found)
    else:
        _print_segments(found)
    if n_failed or (fail_on_match and found):
        raise typer.Exit(FAILED)


def _print_segments(found: list[dict[str, Any]]) -> None:
    if not found:
        typer.echo("no copy found")
        return
    rows = [
        (
            one["channel"],
            f"{clock(one['channel_start'])}-{clock(one['channel_end'])}",
            one["reference"],
            f"{clock(one['reference_start'])}-{clock(one['reference_end'])}",
            f"{one['speed']:.2f}x",
            f"{one['score']:.2f}",
        )
        for one in found
    ]
    _print_table(("CHANNEL", "ON AIR", "REFERENCE", "ITS SECONDS", "SPEED", "SCORE"), rows)


def _write_lines(path: Path, values: Iterable[object]) -> None:
    """Writes aside, then renames: a reader sees the whole file or none of it."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
    aside.replace(path)


@app.command()
def serve(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Watch every configured channel until told to stop."""
    settings = _settings(context, config_file, data_dir)
    if not settings.channels:
        raise ConfigError(
            "no channel is configured; add `channels:` with a name and a url to the file given by --config."
        )
    import asyncio

    from monitor.logs import configure_logging
    from monitor.supervisor import serve as watch

    configure_logging(settings.logging)
    asyncio.run(watch(settings, config=config_file or context.obj[0]))


@app.command()
def demo(
    context: typer.Context,
    fast: Annotated[bool, typer.Option("--fast", help="Air as fast as it is matched, not in real time.")] = False,
    leave: Annotated[
        bool, typer.Option("--exit", help="End after the broadcast: 0 if every copy was found and nothing else.")
    ] = False,
    data_dir: DataDirOption = None,
) -> None:
    """See it work: films and a broadcast are made, the broadcast is aired, and copies are found live."""
    settings = _settings(context, None, data_dir)
    from monitor.demo.run import run_demo

    if not run_demo(settings, fast=fast, leave=leave):
        raise typer.Exit(FAILED)


# --- config, doctor, version -----------------------------------------------------------------------------------------


@config.command("check")
def config_check(context: typer.Context, config_file: ConfigOption = None) -> None:
    """Say whether the configuration is right."""
    settings = _settings(context, config_file)
    named = config_file or context.obj[0]
    typer.echo(f"{named or 'the environment'}: right, {len(settings.channels)} channels")


@config.command("show")
def config_show(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every setting as it is in force, credentials hidden."""
    values = _settings(context, config_file, data_dir).model_dump(mode="json")
    if as_json:
        _print_json(values)
    else:
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def doctor(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Examine this machine and the configuration; each fault says what to do."""
    from monitor.doctor import examine

    findings = list(examine(_settings(context, config_file, data_dir)))
    if as_json:
        _print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        _print_table(("", "WHAT", "FOUND"), [("ok" if one.ok else "FAULT", one.what, one.found) for one in findings])
    faults = [finding for finding in findings if not finding.ok]
    if faults:
        raise typer.Exit(UNREACHABLE if all(fault.unreachable for fault in faults) else FAILED)


@app.command()
def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    if as_json:
        names = ("torch", "av", "faiss-cpu", "apsw", "numpy")
        _print_json({"copywatch": __version__, "python": sys.version.split()[0], **{n: installed(n) for n in names}})
    else:
        typer.echo(f"copywatch {__version__}")


if __name__ == "__main__":
    main()
