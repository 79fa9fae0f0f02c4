"""`copywatch alerts`: what was told, read from the outbox while the monitor runs or rests."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

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

POLL_S = 0.5

app = typer.Typer(no_args_is_help=True, help="What was told.")

ChannelOption = Annotated[str | None, typer.Option(help="Only of this channel.")]
ReferenceOption = Annotated[str | None, typer.Option(help="Only of this reference.")]
TypeOption = Annotated[
    str | None, typer.Option("--type", help="Only of this type: started, updated, ended or retracted.")
]


@app.command("list")
def alerts_list(
    context: typer.Context,
    channel: ChannelOption = None,
    reference: ReferenceOption = None,
    type_: TypeOption = None,
    before: Annotated[int | None, typer.Option(metavar="N", help="Older than this number: the next page.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List alerts as they were told last, the newest first."""
    from monitor.alerting.outbox import History

    found = History(settings_of(context, config_file, data_dir).data_dir).alerts(
        before=before, limit=limit, channel=channel, reference=reference, type=_type(type_)
    )
    if as_json:
        print_json([{"first_n": first_n, **event.as_dict()} for first_n, event in found])
        return
    rows = [(first_n, *_row(event.as_dict())) for first_n, event in found]
    print_table(("N", "ID", "STATE", "CHANNEL", "SINCE", "ON AIR", "REFERENCE", "ITS SECONDS", "SCORE"), rows)


@app.command("show")
def alerts_show(
    context: typer.Context,
    alert_id: Annotated[str, typer.Argument(metavar="ID")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one alert and how it came to be."""
    from monitor.alerting.outbox import History

    told = [event.as_dict() for event in History(settings_of(context, config_file, data_dir).data_dir).alert(alert_id)]
    if not told:
        complain(f"There is no alert {alert_id}; `copywatch alerts list` shows those there are.")
        raise typer.Exit(FAILED)
    if as_json:
        print_json(told)
        return
    for name, value in told[-1].items():
        typer.echo(f"{name:18} {_shown(value)}")
    typer.echo("")
    rows = [(one["n"], one["told_at"], _state(one), _span(one, "channel"), f"{one['score']:.2f}") for one in told]
    print_table(("N", "TOLD", "STATE", "ON AIR", "SCORE"), rows)


@app.command("tail")
def alerts_tail(
    context: typer.Context,
    channel: ChannelOption = None,
    reference: ReferenceOption = None,
    type_: TypeOption = None,
    after: Annotated[
        int | None, typer.Option(metavar="N", help="Go on after this number; only what is new when left out.")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Wait for more until interrupted.")] = True,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print alert events as they are told, one a line."""
    from monitor.alerting.outbox import History

    history = History(settings_of(context, config_file, data_dir).data_dir)
    at, wanted = history.newest() if after is None else after, _type(type_)
    while True:
        events = history.events(after=at, limit=500, channel=channel, reference=reference, type=wanted)
        for event in events:
            at, one = event.n, event.as_dict()
            if as_json:
                typer.echo(json.dumps(one, ensure_ascii=False))
            else:
                its, score = _span(one, "reference"), f"score {one['score']:.2f}"
                where = f"{one['channel']} {_span(one, 'channel')} shows {one['reference']} {its}"
                typer.echo(f"{one['n']:6} {one['told_at']} {_state(one):9} {where}  {score}  {one['id']}")
        if not events:
            if not follow:
                return
            time.sleep(POLL_S)


def _type(word: str | None) -> str | None:
    if word is None:
        return None
    known = ("started", "updated", "ended", "retracted")
    if word.removeprefix("alert.") not in known:
        raise typer.BadParameter(f"expected one of {', '.join(known)}, got {word!r}.", param_hint="--type")
    return f"alert.{word.removeprefix('alert.')}"


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["id"],
        _state(one),
        one["channel"],
        one["started_at"] or "-",
        _span(one, "channel"),
        one["reference"],
        _span(one, "reference"),
        f"{one['score']:.2f}",
    )


def _state(one: dict[str, Any]) -> str:
    return str(one["type"]).removeprefix("alert.")


def _span(one: dict[str, Any], side: str) -> str:
    return f"{clock(one[f'{side}_start'])}-{clock(one[f'{side}_end'])}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(f"{gap['seconds']:.0f} s at {clock(gap['at'])} ({gap['reason']})" for gap in value) or "-"
    return "-" if value is None else str(value)
