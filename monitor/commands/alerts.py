"""`copywatch alerts`: what was told, read from the outbox while the monitor runs or rests."""

from __future__ import annotations

import json
import time
from pathlib import Path
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
    from monitor.rights.store import RightsStore

    folder = settings_of(context, config_file, data_dir).data_dir
    found = History(folder).alerts(before=before, limit=limit, channel=channel, reference=reference, type=_type(type_))
    reviews = RightsStore(folder).latest_reviews([event.alert.id for _, event in found])
    if as_json:
        said = {alert_id: review.as_dict() for alert_id, review in reviews.items()}
        print_json(
            [{"first_n": first_n, **event.as_dict(), "review": said.get(event.alert.id)} for first_n, event in found]
        )
        return
    rows = []
    for first_n, event in found:
        review = reviews.get(event.alert.id)
        rows.append((first_n, *_row(event.as_dict()), event.alert.licence or "-", review.decision if review else "-"))
    copy = ("N", "ID", "STATE", "CHANNEL", "SINCE", "ON AIR", "REFERENCE", "ITS SECONDS", "SCORE")
    print_table((*copy, "LICENCE", "REVIEW"), rows)


@app.command("show")
def alerts_show(
    context: typer.Context,
    alert_id: Annotated[str, typer.Argument(metavar="ID")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one alert: how it came to be, what was said of it, and its evidence."""
    from monitor.alerting.outbox import History
    from monitor.evidence.store import EvidenceStore
    from monitor.rights.store import RightsStore

    folder = settings_of(context, config_file, data_dir).data_dir
    told, store = [event.as_dict() for event in History(folder).alert(alert_id)], EvidenceStore(folder)
    evidence = store.report(alert_id)
    if not told and evidence is not None:  # of a member of a fleet, which keeps no history
        told = [{"n": 0, "emitted_at": evidence["made_at"], **evidence["alert"]}]
    if not told:
        complain(f"There is no alert {alert_id}; `copywatch alerts list` shows those there are.")
        raise typer.Exit(FAILED)
    reviews = RightsStore(folder).reviews(alert_id)
    if as_json:
        said = [review.as_dict() for review in reviews]
        print_json({"alert": told[-1], "events": told, "reviews": said, "evidence": evidence})
        return
    for name, value in told[-1].items():
        typer.echo(f"{name:18} {_shown(value)}")
    typer.echo("")
    rows = [(one["n"], one["emitted_at"], _state(one), _span(one, "channel"), f"{one['score']:.2f}") for one in told]
    print_table(("N", "TOLD", "STATE", "ON AIR", "SCORE"), rows)
    if reviews:
        typer.echo("")
        print_table(
            ("REVIEWED", "DECISION", "BY", "NOTE"),
            [(one.as_dict()["at"], one.decision, one.by, one.note) for one in reviews],
        )
    typer.echo("")
    if evidence is None:
        typer.echo("There is no evidence: it was not kept, or had to make room.")
        return
    _print_evidence(evidence)
    for path in store.paths(alert_id):
        typer.echo(path)


def _print_evidence(evidence: dict[str, Any]) -> None:
    numbers = ", ".join(f"{name} {value:g}" for name, value in evidence["numbers"].items())
    typer.echo(f"evidence           {'complete' if evidence['complete'] else evidence['note']}; times in UTC")
    typer.echo(f"numbers            {numbers}")
    rows: list[tuple[object, ...]] = [
        (
            one["at"],
            clock(one["stream_s"]),
            clock(one["ref_s"]),
            one["air"] or "-",
            one["reference"] or "-",
            one["note"] or "",
        )
        for one in evidence["frames"]
    ]
    print_table(("FRAME", "ON AIR", "REFERENCE", "AIR'S PICTURE", "REFERENCE'S", "NOTE"), rows)
    rows = []
    for tile in evidence["tiles"]:
        along = [(tile["similarity"][i][j], tile["mask"][i][j]) for i, j in tile["path"]]
        means = [sum(values) / len(along) for values in zip(*along, strict=True)]
        rows.append(
            (
                f"{tile['name']}.png",
                _seconds(tile, "live_s", "rows"),
                _seconds(tile, "ref_s", "columns"),
                *(f"{mean:.2f}" for mean in means),
            )
        )
    print_table(("TILE", "ON AIR", "REFERENCE", "SIMILARITY", "MASK ALONG THE PATH"), rows)


def _seconds(tile: dict[str, Any], first: str, n: str) -> str:
    return f"{clock(tile[first])}-{clock(tile[first] + tile[n])}"


@app.command("export")
def alerts_export(
    context: typer.Context,
    alert_id: Annotated[str, typer.Argument(metavar="ID")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; ID.zip when left out.")
    ] = None,
    time_zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Tell the times in this zone as well, as Europe/Berlin.")
    ] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write one archive with all that is known of an alert, and the SHA-256 sum of each of its files."""
    from monitor.evidence.store import EvidenceStore, zone_of
    from reference_db.store.disk import write_file

    zone = None if time_zone is None else zone_of(time_zone)
    if time_zone is not None and zone is None:
        raise typer.BadParameter("it is not known here; name one like Europe/Berlin.", param_hint="--time-zone")
    content = EvidenceStore(settings_of(context, config_file, data_dir).data_dir).zip(alert_id, zone)
    if content is None:
        complain(f"There is no alert {alert_id}; `copywatch alerts list` shows those there are.")
        raise typer.Exit(FAILED)
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
                typer.echo(f"{one['n']:6} {one['emitted_at']} {_state(one):9} {where}  {score}  {one['id']}")
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
        return ", ".join(map(_stretch, value)) or "-"
    return "-" if value is None else str(value)


def _stretch(one: dict[str, Any]) -> str:
    """A gap, with its reason, or a pause."""
    reason = f" ({one['reason']})" if "reason" in one else ""
    return f"{one['seconds']:.0f} s at {clock(one['at'])}{reason}"
