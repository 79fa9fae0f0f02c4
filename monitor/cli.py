"""The command line: words in, calls out.

Results go to stdout, progress and complaints to stderr. Exit codes: 0 all is well, 1 something failed (or `check
--fail-on-match` found a copy), 2 wrong usage, 3 wrong configuration, 4 an address that cannot be reached. What costs
seconds to import (torch, FAISS) is imported by the command that needs it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from monitor import __version__
from monitor.commands import alerts, channels, kafka_roles, licences, refs, tokens, webhooks
from monitor.commands.terminal import (
    CONFIG,
    FAILED,
    UNREACHABLE,
    ConfigOption,
    DataDirOption,
    JsonOption,
    clock,
    complain,
    print_json,
    print_table,
    progress_bar,
    settings_of,
)
from monitor.errors import ConfigError, MonitorError, Unreachable
from reference_db.errors import CatalogError
from reference_db.store.disk import write_file

app = typer.Typer(
    name="copywatch",
    help="Finds copies of registered videos in live broadcasts while they are on air.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config = typer.Typer(no_args_is_help=True, help="The configuration.")
app.add_typer(refs.app, name="refs")
app.add_typer(channels.app, name="channels")
app.add_typer(alerts.app, name="alerts")
app.add_typer(licences.app, name="licences")
app.add_typer(tokens.app, name="tokens")
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(config, name="config")
app.command()(kafka_roles.ingest)
app.command()(kafka_roles.match)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits. Our own errors become one sentence on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be no text
    try:
        app(arguments, prog_name="copywatch")
    except ConfigError as error:
        _fail(error, CONFIG)
    except Unreachable as error:
        _fail(error, UNREACHABLE)
    except (MonitorError, CatalogError) as error:
        _fail(error, FAILED)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        _fail(f"{named}{error.strerror or error}", FAILED)
    sys.exit(0)


def _fail(complaint: object, code: int) -> NoReturn:
    complain(complaint)
    sys.exit(code)


@app.callback()
def common(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    context.obj = (config_file, data_dir)


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
    settings = settings_of(context, config_file, data_dir)
    from monitor.runtime.check import check_file

    found: list[dict[str, Any]] = []
    n_failed = 0
    for file in files:
        try:
            with progress_bar(file.name) as step:
                found += check_file(file, channel or file.stem, settings=settings, progress=step)
        except CatalogError as error:
            complain(error)
            n_failed += 1
    if segments is not None:
        _write_lines(segments, found)
    if as_json:
        print_json(found)
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
            one["licence"] or "-",
        )
        for one in found
    ]
    print_table(("CHANNEL", "ON AIR", "REFERENCE", "ITS SECONDS", "SPEED", "SCORE", "LICENCE"), rows)


def _write_lines(path: Path, values: Iterable[object]) -> None:
    lines = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    write_file(path, lines.encode())


@app.command()
def serve(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Watch every configured channel until told to stop."""
    settings = settings_of(context, config_file, data_dir)
    has_file = config_file or context.obj[0]  # which may get its channels while it is served
    if not (settings.channels or has_file or settings.kafka.follow_alerts):
        raise ConfigError(
            "no channel is configured; add `channels:` with a name and a url to the file given by --config."
        )
    import asyncio

    from monitor.ops.logs import configure_logging
    from monitor.roles.serve import serve as watch

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
    settings = settings_of(context, None, data_dir)
    from monitor.demo.run import run_demo

    if not run_demo(settings, fast=fast, leave=leave):
        raise typer.Exit(FAILED)


# --- config, doctor, version -----------------------------------------------------------------------------------------


@config.command("check")
def config_check(context: typer.Context, config_file: ConfigOption = None) -> None:
    """Say whether the configuration is right."""
    settings = settings_of(context, config_file)
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
    values = settings_of(context, config_file, data_dir).model_dump(mode="json")
    if as_json:
        print_json(values)
    else:
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the configuration, by which editors complete and check what is typed."""
    from monitor.config.settings import Settings

    print_json(Settings.model_json_schema())


@app.command("init")
def init() -> None:
    """Print a configuration to begin with: every setting with its default and its meaning."""
    from monitor.config.template import first_config

    typer.echo(first_config(), nl=False)


@app.command()
def doctor(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Examine this machine and the configuration; each fault says what to do."""
    from monitor.commands.doctor import examine

    findings = list(examine(settings_of(context, config_file, data_dir)))
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        print_table(("", "WHAT", "FOUND"), [("ok" if one.ok else "FAULT", one.what, one.found) for one in findings])
    faults = [finding for finding in findings if not finding.ok]
    if faults:
        raise typer.Exit(UNREACHABLE if all(fault.unreachable for fault in faults) else FAILED)


@app.command()
def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    if as_json:
        names = ("torch", "av", "faiss-cpu", "apsw", "numpy")
        print_json({"copywatch": __version__, "python": sys.version.split()[0], **{n: installed(n) for n in names}})
    else:
        typer.echo(f"copywatch {__version__}")


if __name__ == "__main__":
    main()
