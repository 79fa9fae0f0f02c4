"""`copywatch licences`, `refs exclude` and `alerts review`: the desk in words; a running monitor heeds it."""

from __future__ import annotations

import getpass
import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from monitor.commands.alerts import app as alerts
from monitor.commands.refs import IdArgument
from monitor.commands.refs import app as refs
from monitor.commands.terminal import (
    FAILED,
    ConfigOption,
    DataDirOption,
    JsonOption,
    clock,
    complain,
    print_json,
    print_table,
    settings_of,
)
from monitor.rights.rules import ANY_CHANNEL, Licence
from monitor.rights.store import RightsStore

app = typer.Typer(no_args_is_help=True, help="Who may air what; a licensed play is told as such, never hidden.")

NoteOption = Annotated[str, typer.Option(help="Why, in your words.")]


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(f"expected a time with its zone such as 2026-11-16T20:00:00Z, got {text!r}.")


def _seconds(text: str) -> float:
    """Seconds, or minutes and hours before them: 90, 1:30 and 0:01:30 are the same."""
    if not re.fullmatch(r"(\d+:){0,2}\d+(\.\d+)?", text):
        raise typer.BadParameter(f"expected seconds or hours:minutes:seconds, got {text!r}.")
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


# --- licences --------------------------------------------------------------------------------------------------------


@app.command("add")
def licences_add(
    context: typer.Context,
    reference: Annotated[str | None, typer.Option(metavar="ID", help="Of this reference.")] = None,
    owner: Annotated[str | None, typer.Option(help="Of all references of this owner.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="K=V", help="Of all references with this tag.")] = None,
    channel: Annotated[str, typer.Option(metavar="NAME", help="On this channel.")] = ANY_CHANNEL,
    from_: Annotated[
        datetime | None, typer.Option("--from", parser=_moment, metavar="TIME", help="From 2026-11-16T20:00:00Z on.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=_moment, metavar="TIME", help="Until then; for good when left out.")
    ] = None,
    note: NoteOption = "",
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Permit plays of a reference, an owner or a tag; where several are named, all must fit."""
    licence = RightsStore(settings_of(context, config_file, data_dir).data_dir).add_licence(
        reference=reference, owner=owner, tag=tag, channel=channel, from_=from_, until=until, note=note
    )
    if as_json:
        print_json(licence.as_dict())
    else:
        typer.echo(f"{licence.id}: {_of(licence)} may be aired {_where(licence)}")


@app.command("list")
def licences_list(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List all licences."""
    licences = RightsStore(settings_of(context, config_file, data_dir).data_dir).licences()
    if as_json:
        print_json([licence.as_dict() for licence in licences])
        return
    rows = []
    for licence in licences:
        values = licence.as_dict()
        rows.append(
            (licence.id, _of(licence), licence.channel, values["from"] or "-", values["until"] or "-", licence.note)
        )
    print_table(("ID", "OF", "CHANNEL", "FROM", "UNTIL", "NOTE"), rows)


@app.command("rm")
def licences_rm(
    context: typer.Context, licence: IdArgument, config_file: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Remove a licence; what was told as licensed stays so."""
    RightsStore(settings_of(context, config_file, data_dir).data_dir).remove_licence(licence)
    typer.echo(f"removed {licence}")


def _of(licence: Licence) -> str:
    named = (("reference", licence.reference), ("owner", licence.owner), ("tag", licence.tag))
    return ", ".join(f"{what} {value}" for what, value in named if value is not None)


def _where(licence: Licence) -> str:
    values = licence.as_dict()
    where = "on every channel" if licence.channel == ANY_CHANNEL else f"on {licence.channel}"
    since = f" from {values['from']}" if values["from"] else ""
    return where + since + (f" until {values['until']}" if values["until"] else "")


# --- exclusions ------------------------------------------------------------------------------------------------------


@refs.command("exclude")
def exclude(
    context: typer.Context,
    reference: IdArgument,
    start: Annotated[str, typer.Argument(metavar="START", help="Second, or hours:minutes:seconds.")],
    end: Annotated[str, typer.Argument(metavar="END")],
    note: NoteOption = "",
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a span of a reference from alerting: an ident, end credits."""
    from reference_db.store.catalog import Catalog, check_id

    start_s, end_s = _seconds(start), _seconds(end)
    folder = settings_of(context, config_file, data_dir).data_dir
    with Catalog.open(folder) as catalog:
        catalog.get(check_id(reference))  # a misspelt id would silently exclude nothing
    exclusion = RightsStore(folder).exclude(reference, start_s, end_s, note)
    if as_json:
        print_json(exclusion.as_dict())
    else:
        typer.echo(f"{exclusion.id}: {clock(start_s)}-{clock(end_s)} of {reference} never alerts")


@refs.command("exclusions")
def exclusions(
    context: typer.Context,
    reference: Annotated[str | None, typer.Argument(metavar="[ID]", help="Of this reference only.")] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the spans that never alert."""
    found = RightsStore(settings_of(context, config_file, data_dir).data_dir).exclusions(reference)
    if as_json:
        print_json([exclusion.as_dict() for exclusion in found])
        return
    rows = [(one.id, one.reference, f"{clock(one.start_s)}-{clock(one.end_s)}", one.note) for one in found]
    print_table(("N", "REFERENCE", "ITS SECONDS", "NOTE"), rows)


@refs.command("include")
def include(
    context: typer.Context,
    reference: IdArgument,
    number: Annotated[int, typer.Argument(metavar="N", help="As `refs exclusions` shows it.")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Let an excluded span alert again."""
    RightsStore(settings_of(context, config_file, data_dir).data_dir).remove_exclusion(reference, number)
    typer.echo(f"exclusion {number} of {reference} is removed")


# --- reviews ---------------------------------------------------------------------------------------------------------


@alerts.command("review")
def review(
    context: typer.Context,
    alert_id: IdArgument,
    decision: Annotated[str, typer.Argument(metavar="confirmed|false|licensed")],
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Who says so; the user's name when left out.")] = None,
    note: NoteOption = "",
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what an alert is; `false` retracts it. Who said what and when is kept."""
    from monitor.alerting.outbox import History
    from monitor.evidence.store import EvidenceStore

    folder = settings_of(context, config_file, data_dir).data_dir
    if not History(folder).alert(alert_id) and not EvidenceStore(folder).has(alert_id):
        complain(f"There is no alert {alert_id}; `copywatch alerts list` shows those there are.")
        raise typer.Exit(FAILED)
    kept = RightsStore(folder).review(alert_id, decision, by or getpass.getuser(), note)
    if as_json:
        print_json(kept.as_dict())
    else:
        typer.echo(f"{alert_id}: {kept.decision}, says {kept.by}")
