"""The command line: assembles the commands, and turns our errors into one sentence and an exit code.

Results go to stdout, progress and errors to stderr. Exit codes: 0 success, 1 failure (or `check --fail-on-match` found
a copy), 2 invalid usage, 3 invalid configuration, 4 an address that cannot be reached. Each command imports slow
libraries (torch, FAISS, FastAPI) itself, inside its function, and only if it needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

import typer

from monitor import __version__
from monitor.commands import (
    alerts,
    audit,
    channels,
    config,
    doctor,
    kafka_roles,
    licences,
    purge,
    refs,
    tokens,
    webhooks,
)
from monitor.commands.check import check
from monitor.commands.demo import demo
from monitor.commands.serve import serve
from monitor.commands.terminal import (
    CONFIG,
    FAILED,
    UNREACHABLE,
    ConfigOption,
    DataDirOption,
    JsonOption,
    print_error,
    print_json,
)
from monitor.errors import ConfigError, MonitorError, Unreachable
from reference_db.errors import CatalogError

VERSIONED = ("torch", "av", "faiss-cpu", "apsw", "numpy")  # libraries that `version --json` names

app = typer.Typer(
    name="copywatch",
    help="Finds copies of registered videos in live broadcasts while they are on air.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits. Our own errors become one sentence on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may be invalid Unicode
    try:
        app(arguments, prog_name="copywatch")
    except ConfigError as error:
        _exit(error, CONFIG)
    except Unreachable as error:
        _exit(error, UNREACHABLE)
    except (MonitorError, CatalogError) as error:
        _exit(error, FAILED)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        _exit(f"{file}{error.strerror or error}", FAILED)
    sys.exit(0)


def _exit(error: object, code: int) -> NoReturn:
    print_error(error)
    sys.exit(code)


@app.callback()
def common(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    context.obj = (config_file, data_dir)


def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    if as_json:
        libraries = {name: installed(name) for name in VERSIONED}
        print_json({"copywatch": __version__, "python": sys.version.split()[0], **libraries})
    else:
        typer.echo(f"copywatch {__version__}")


for command in (kafka_roles.ingest, kafka_roles.match, check, serve, demo, config.init, doctor.doctor, version):
    app.command()(command)
for noun in (refs, channels, alerts, licences, tokens, webhooks, audit, purge, config):
    app.add_typer(noun.app, name=noun.__name__.rpartition(".")[2])


if __name__ == "__main__":
    main()
