"""`copywatch licences`: permitted broadcasts. A running monitor applies each change within a second."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monitor.commands.audited import audited
from monitor.commands.terminal import (
    ConfigOption,
    DataDirOption,
    IdArgument,
    JsonOption,
    NoteOption,
    print_json,
    print_table,
    settings_of,
)
from monitor.rights.rules import ANY_CHANNEL

if TYPE_CHECKING:
    from monitor.rights.rules import Licence
    from monitor.rights.store import RightsStore

app = typer.Typer(no_args_is_help=True, help="Permitted broadcasts: their alerts are marked as licensed, never hidden.")


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(f"expected a time with its zone such as 2026-11-16T20:00:00Z, got {text!r}.")


def _store(context: typer.Context, config_file: Path | None, data_dir: Path | None) -> RightsStore:
    from monitor.rights.store import RightsStore

    return RightsStore(settings_of(context, config_file, data_dir).data_dir)


@app.command("add")
def add(
    context: typer.Context,
    reference: Annotated[str | None, typer.Option(metavar="ID", help="Permit this reference.")] = None,
    owner: Annotated[str | None, typer.Option(help="Permit all references of this owner.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="K=V", help="Permit all references with this tag.")] = None,
    channel: Annotated[str, typer.Option(metavar="NAME", help="Only on this channel.")] = ANY_CHANNEL,
    from_: Annotated[
        datetime | None,
        typer.Option("--from", parser=_moment, metavar="TIME", help="Start, such as 2026-11-16T20:00:00Z."),
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=_moment, metavar="TIME", help="End; default: no end.")
    ] = None,
    note: NoteOption = "",
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Permit broadcasts of a reference, an owner or a tag; where several are given, all must match."""
    with audited(settings_of(context, config_file, data_dir).data_dir, "licences add") as recording:
        licence = _store(context, config_file, data_dir).add_licence(
            reference=reference, owner=owner, tag=tag, channel=channel, from_=from_, until=until, note=note
        )
        recording.object, recording.details = licence.id, {**licence.terms}
    if as_json:
        print_json(licence.as_dict())
    else:
        typer.echo(f"{licence.id}: {_subject(licence)} is permitted {_scope(licence)}")


@app.command("list")
def list_licences(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List all licences."""
    licences = _store(context, config_file, data_dir).licences()
    if as_json:
        print_json([licence.as_dict() for licence in licences])
        return
    rows = []
    for licence in licences:
        values = licence.as_dict()
        rows.append(
            (
                licence.id,
                _subject(licence),
                licence.channel,
                values["from"] or "-",
                values["until"] or "-",
                licence.note,
            )
        )
    print_table(("ID", "PERMITS", "CHANNEL", "FROM", "UNTIL", "NOTE"), rows)


@app.command("rm")
def remove(
    context: typer.Context, licence: IdArgument, config_file: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Remove a licence; alerts already emitted as licensed stay licensed."""
    with audited(settings_of(context, config_file, data_dir).data_dir, "licences rm", licence):
        _store(context, config_file, data_dir).remove_licence(licence)
    typer.echo(f"removed: {licence}")


def _subject(licence: Licence) -> str:
    parts = (("reference", licence.reference), ("owner", licence.owner), ("tag", licence.tag))
    return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


def _scope(licence: Licence) -> str:
    values = licence.as_dict()
    where = "on every channel" if licence.channel == ANY_CHANNEL else f"on {licence.channel}"
    since = f" from {values['from']}" if values["from"] else ""
    return where + since + (f" until {values['until']}" if values["until"] else "")
