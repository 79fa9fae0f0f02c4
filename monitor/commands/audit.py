"""`copywatch audit`: the audit log, read from disk whether or not a monitor runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monitor.commands.terminal import (
    FAILED,
    ConfigOption,
    DataDirOption,
    JsonOption,
    print_json,
    print_table,
    settings_of,
)

if TYPE_CHECKING:
    from monitor.audit.chain import ChainCheck
    from monitor.audit.log import AuditLog

app = typer.Typer(no_args_is_help=True, help="The audit log: who changed what, when and from where.")


def _log(context: typer.Context, config_file: Path | None, data_dir: Path | None) -> AuditLog:
    from monitor.audit.log import AuditLog

    return AuditLog(settings_of(context, config_file, data_dir).data_dir)


@app.command("list")
def list_entries(
    context: typer.Context,
    who: Annotated[str | None, typer.Option(metavar="NAME", help="Only entries by or about this person.")] = None,
    action: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Only this action, such as `licences add`, or its first word.")
    ] = None,
    result: Annotated[str | None, typer.Option(help="Only done, failed, refused or unknown.")] = None,
    alert: Annotated[str | None, typer.Option(metavar="ID", help="Only entries that concern this alert.")] = None,
    before: Annotated[int | None, typer.Option(metavar="N", help="Only entries before this number.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of entries.")] = 50,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List entries, newest first."""
    log = _log(context, config_file, data_dir)
    if alert is not None:
        records = log.of_alert(alert)[::-1][:limit]
    else:
        records = log.entries(before=before, limit=limit, who=who, action=action, result=result)
    found = [record.as_dict() for record in records]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["n"],
            one["at"],
            "(erased)" if one["erased"] else one["who"] or "-",
            one["address"] or "-",
            one["via"],
            one["action"],
            one["object"] or "-",
            one["about"] or "-",
            one["result"] if one["status"] is None else f"{one['result']} ({one['status']})",
            ", ".join(f"{name}={value}" for name, value in one["details"].items()),
        )
        for one in found
    ]
    print_table(("N", "AT", "WHO", "ADDRESS", "VIA", "ACTION", "OBJECT", "ABOUT", "RESULT", "DETAILS"), rows)


@app.command("export")
def export(
    context: typer.Context,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.")] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write the whole log as JSON lines, oldest entry first; `audit verify FILE` checks such a file."""
    from reference_db.store.disk import atomic_file

    lines = (f"{record.as_line()}\n".encode() for record in _log(context, config_file, data_dir).records())
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.writelines(lines)
        return
    with atomic_file(output, mode=0o600) as file:
        file.writelines(lines)
    typer.echo(output)


@app.command("verify")
def verify(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="An export; it is compared with the log.")
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="N:HASH", help="An entry's number and hash, noted earlier: the log must contain it."),
    ] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that no entry was changed, removed or moved; exit 1 if one was."""
    log = _log(context, config_file, data_dir)
    found = log.verify()
    if file is not None:
        _compare_export(found, log, file)
    if expect is not None:
        _expect(found, log, expect)
    if as_json:
        print_json(found.as_dict())
    else:
        for fault in found.faults:
            typer.echo(f"fault: {fault}")
        state = "OK" if found.is_whole else "CHANGED"
        typer.echo(f"{state}: {found.n_entries} entries, {found.n_erased} with erased names; newest:")
        typer.echo(f"{found.last or 0}:{found.last_hash}")
    if not found.is_whole:
        raise typer.Exit(FAILED)


def _compare_export(found: ChainCheck, log: AuditLog, file: Path) -> None:
    """Adds the faults of an exported file, and where it differs from the log."""
    from monitor.audit.chain import record_of, verify_chain

    try:
        with open(file, encoding="utf-8") as lines:
            exported = [record_of(line) for line in lines]
    except ValueError:
        raise typer.BadParameter(f"{file} is not an exported audit log.", param_hint="FILE") from None
    found.faults += [f"{file}: {fault}" for fault in verify_chain(exported).faults]
    stored = {record.n: record.hash for record in log.records()}
    first = min(stored, default=1)
    differing = [one.n for one in exported if one.n >= first and stored.get(one.n) != one.hash]
    if differing:
        found.faults.append(f"the log differs from {file} in {len(differing)} entries, the first is {differing[0]}")


def _expect(found: ChainCheck, log: AuditLog, expect: str) -> None:
    number, _, hash = expect.partition(":")
    if not number.isdigit() or not hash:
        raise typer.BadParameter(f"expected N:HASH, got {expect!r}.", param_hint="--expect")
    n = int(number)
    if n and (found.first is None or n >= found.first) and log.hash_of(n) != hash:
        found.faults.append(f"entry {n} is not the expected one")
