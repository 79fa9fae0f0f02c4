"""`copywatch alerts`: the emitted alerts, read from the outbox whether or not a monitor runs."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from monitor.commands.audited import audited
from monitor.commands.terminal import (
    FAILED,
    ConfigOption,
    DataDirOption,
    IdArgument,
    JsonOption,
    NoteOption,
    clock,
    print_error,
    print_json,
    print_table,
    settings_of,
)

POLL_S = 0.5

app = typer.Typer(no_args_is_help=True, help="Alerts, their evidence and their reviews.")

ChannelOption = Annotated[str | None, typer.Option(help="Only alerts of this channel.")]
ReferenceOption = Annotated[str | None, typer.Option(help="Only alerts of this reference.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only this type: started, updated, ended or retracted.")]


@app.command("list")
def alerts_list(
    context: typer.Context,
    channel: ChannelOption = None,
    reference: ReferenceOption = None,
    type_: TypeOption = None,
    before: Annotated[
        int | None, typer.Option(metavar="N", help="Only alerts before this number: the next page.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of alerts.")] = 50,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List alerts with their latest state, newest first."""
    from monitor.alerting.outbox import History
    from monitor.rights.store import RightsStore

    folder = settings_of(context, config_file, data_dir).data_dir
    found = History(folder).alerts(before=before, limit=limit, channel=channel, reference=reference, type=_type(type_))
    reviews = RightsStore(folder).latest_reviews([event.alert.id for _, event in found])
    if as_json:
        decisions = {alert_id: review.as_dict() for alert_id, review in reviews.items()}
        print_json([{"first_n": n, **event.as_dict(), "review": decisions.get(event.alert.id)} for n, event in found])
        return
    rows = []
    for first_n, event in found:
        review = reviews.get(event.alert.id)
        rows.append((first_n, *_row(event.as_dict()), event.alert.licence or "-", review.decision if review else "-"))
    columns = ("N", "ID", "STATE", "CHANNEL", "SINCE", "ON AIR", "REFERENCE", "IN REFERENCE", "CONFIDENCE")
    print_table((*columns, "LICENCE", "REVIEW"), rows)


@app.command("show")
def alerts_show(
    context: typer.Context,
    alert_id: IdArgument,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one alert: its events, its reviews and its evidence."""
    from monitor.alerting.outbox import History
    from monitor.evidence.store import EvidenceStore
    from monitor.rights.store import RightsStore

    folder = settings_of(context, config_file, data_dir).data_dir
    events, store = [event.as_dict() for event in History(folder).alert(alert_id)], EvidenceStore(folder)
    evidence = store.report(alert_id)
    if not events and evidence is not None:  # of a Kafka matcher, which stores no history
        events = [{"n": 0, "emitted_at": evidence["made_at"], **evidence["alert"]}]
    if not events:
        _exit_unknown(alert_id)
    reviews = RightsStore(folder).reviews(alert_id)
    if as_json:
        decisions = [review.as_dict() for review in reviews]
        print_json({"alert": events[-1], "events": events, "reviews": decisions, "evidence": evidence})
        return
    for name, value in events[-1].items():
        typer.echo(f"{name:18} {_text(value)}")
    typer.echo("")
    rows = [
        (one["n"], one["emitted_at"], _state(one), _span(one, "channel"), _confidence(one), f"{one['score']:.2f}")
        for one in events
    ]
    print_table(("N", "EMITTED", "STATE", "ON AIR", "CONFIDENCE", "SCORE"), rows)
    if reviews:
        typer.echo("")
        print_table(
            ("REVIEWED", "DECISION", "BY", "NOTE"),
            [(one.as_dict()["at"], one.decision, one.by, one.note) for one in reviews],
        )
    typer.echo("")
    if evidence is None:
        typer.echo("There is no evidence: it was not stored, or was deleted to free space.")
        return
    _print_evidence(evidence)
    for path in store.paths(alert_id):
        typer.echo(path)


def _exit_unknown(alert_id: str) -> NoReturn:
    print_error(f"There is no alert {alert_id}; `copywatch alerts list` shows all alerts.")
    raise typer.Exit(FAILED)


def _print_evidence(evidence: dict[str, Any]) -> None:
    numbers = ", ".join(f"{name} {value:g}" for name, value in evidence["numbers"].items() if value is not None)
    typer.echo(f"evidence           {'complete' if evidence['complete'] else evidence['note']}; times in UTC")
    typer.echo(f"numbers            {numbers}")
    rows: list[tuple[object, ...]] = [
        (
            one["at"],
            _tenths(one["stream_s"]),
            one.get("aired_at") or "-",
            _tenths(one["ref_s"]),
            one["air"] or "-",
            one["reference"] or "-",
            one["note"] or "",
        )
        for one in evidence["frames"]
    ]
    print_table(("FRAME", "ON AIR", "AT", "REFERENCE", "BROADCAST PICTURE", "REFERENCE PICTURE", "NOTE"), rows)
    rows = []
    for tile in evidence["tiles"]:
        cells = [(tile["similarity"][i][j], tile["mask"][i][j]) for i, j in tile["path"]]
        means = [sum(values) / len(cells) for values in zip(*cells, strict=True)]
        rows.append(
            (
                f"{tile['name']}.png",
                _tile_span(tile, "live_s", "rows"),
                _tile_span(tile, "ref_s", "columns"),
                *(f"{mean:.2f}" for mean in means),
            )
        )
    print_table(("TILE", "ON AIR", "REFERENCE", "SIMILARITY ON PATH", "MASK ON PATH"), rows)


def _tenths(seconds: float) -> str:
    """A position with tenths of a second, as the dashboard writes it."""
    tenths = round(10 * seconds)
    return f"{clock(tenths // 10)}.{tenths % 10}"


def _tile_span(tile: dict[str, Any], first: str, n: str) -> str:
    return f"{clock(tile[first])}-{clock(tile[first] + tile[n])}"


@app.command("export")
def alerts_export(
    context: typer.Context,
    alert_id: IdArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: ID.zip.")] = None,
    time_zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Print times in this zone too, such as Europe/Berlin.")
    ] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write one archive with everything stored about an alert, and the SHA-256 sum of each file."""
    from monitor.evidence.store import EvidenceStore, find_time_zone
    from reference_db.store.disk import write_file

    zone = None if time_zone is None else find_time_zone(time_zone)
    if time_zone is not None and zone is None:
        raise typer.BadParameter("unknown time zone; use a name such as Europe/Berlin.", param_hint="--time-zone")
    content = EvidenceStore(settings_of(context, config_file, data_dir).data_dir).zip(alert_id, zone)
    if content is None:
        _exit_unknown(alert_id)
    path = output or Path(f"{alert_id}.zip")
    write_file(path, content)
    typer.echo(path)


@app.command("tail")
def alerts_tail(
    context: typer.Context,
    channel: ChannelOption = None,
    reference: ReferenceOption = None,
    type_: TypeOption = None,
    after: Annotated[
        int | None, typer.Option(metavar="N", help="Continue after this event number; default: new events only.")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Wait for new events until interrupted.")] = True,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print alert events as they are emitted, one per line."""
    from monitor.alerting.outbox import History

    history = History(settings_of(context, config_file, data_dir).data_dir)
    last_n, wanted = history.newest() if after is None else after, _type(type_)
    while True:
        events = history.events(after=last_n, limit=500, channel=channel, reference=reference, type=wanted)
        for event in events:
            last_n, one = event.n, event.as_dict()
            if as_json:
                typer.echo(json.dumps(one, ensure_ascii=False))
            else:
                copy = f"{one['channel']} {_span(one, 'channel')} shows {one['reference']} {_span(one, 'reference')}"
                sure = f"confidence {_confidence(one)}"
                typer.echo(f"{one['n']:6} {one['emitted_at']} {_state(one):9} {copy}  {sure}  {one['id']}")
        if not events:
            if not follow:
                return
            time.sleep(POLL_S)


@app.command("review")
def review(
    context: typer.Context,
    alert_id: IdArgument,
    decision: Annotated[str, typer.Argument(metavar="confirmed|false|licensed")],
    by: Annotated[str | None, typer.Option(metavar="NAME", help="The reviewer; default: the user's name.")] = None,
    note: NoteOption = "",
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Review an alert; `false` retracts it. Every review is stored with its author and time."""
    from monitor.alerting.outbox import History
    from monitor.evidence.store import EvidenceStore
    from monitor.rights.store import RightsStore

    folder = settings_of(context, config_file, data_dir).data_dir
    if not History(folder).alert(alert_id) and not EvidenceStore(folder).has(alert_id):
        _exit_unknown(alert_id)
    with audited(folder, "alerts review", alert_id, about=by, alerts=[alert_id], decision=decision):
        stored = RightsStore(folder).review(alert_id, decision, by or getpass.getuser(), note)
    if as_json:
        print_json(stored.as_dict())
    else:
        typer.echo(f"{alert_id}: reviewed as {stored.decision} by {stored.by}")


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
        _confidence(one),
    )


def _confidence(one: dict[str, Any]) -> str:
    """The confidence; alerts of older versions have none."""
    return "-" if one["confidence"] is None else f"{one['confidence']:.2f}"


def _state(one: dict[str, Any]) -> str:
    return str(one["type"]).removeprefix("alert.")


def _span(one: dict[str, Any], side: str) -> str:
    return f"{clock(one[f'{side}_start'])}-{clock(one[f'{side}_end'])}"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(_interval, value)) or "-"
    return "-" if value is None else str(value)


def _interval(one: dict[str, Any]) -> str:
    """A gap with its reason, or a pause."""
    reason = f" ({one['reason']})" if "reason" in one else ""
    return f"{one['seconds']:.0f} s at {clock(one['at'])}{reason}"
