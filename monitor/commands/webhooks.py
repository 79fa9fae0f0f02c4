"""`copywatch webhooks`: who is told of alerts over the web. A running `serve` heeds each change within a second."""

from __future__ import annotations

import sys
from typing import Annotated

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

app = typer.Typer(no_args_is_help=True, help="Who is told of alerts over the web.")

IdArgument = Annotated[str, typer.Argument(metavar="ID")]


@app.command("add")
def add(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to post, or - to read it from stdin.")],
    types: Annotated[
        list[str] | None, typer.Option("--type", help="Only such events, as alert.ended; may be given often.")
    ] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell somebody from now on, and print its secret: this once."""
    from monitor.alerting.webhooks import WebhookStore

    url = sys.stdin.readline().strip() if url == "-" else url
    made = WebhookStore(settings_of(context, config_file, data_dir).data_dir).add(url, types or ())
    if as_json:
        print_json({**made.as_dict(), "secret": made.secret})
    else:
        typer.echo(f"added: {made.id}\nsecret: {made.secret}")


@app.command("list")
def list_webhooks(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who is told."""
    from monitor.alerting.webhooks import WebhookStore

    found = [one.as_dict() for one in WebhookStore(settings_of(context, config_file, data_dir).data_dir).all()]
    if as_json:
        print_json(found)
        return
    rows = [(one["id"], one["url"], ", ".join(one["types"]) or "all", one["disabled_reason"] or "on") for one in found]
    print_table(("ID", "URL", "EVENTS", "STATE"), rows)


@app.command("test")
def send_test(
    context: typer.Context,
    webhook_id: IdArgument,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a test message now, once, and say what came of it; exit 1 where it was not taken."""
    import asyncio

    from monitor.alerting.webhook_delivery import send
    from monitor.alerting.webhooks import DONE, WebhookStore

    settings = settings_of(context, config_file, data_dir)
    webhooks = WebhookStore(settings.data_dir)
    delivery = webhooks.ping(webhook_id)
    attempt = asyncio.run(send(webhooks.get(webhook_id), delivery, settings.webhooks.allow))
    done = webhooks.record_attempt(delivery, attempt, 1.0)
    if as_json:
        print_json(done.as_dict())
    else:
        typer.echo(f"taken: it answered {attempt.status}" if attempt.succeeded else f"not taken: {attempt.error}")
    if done.state != DONE:
        raise typer.Exit(FAILED)


@app.command("deliveries")
def deliveries(
    context: typer.Context,
    webhook_id: IdArgument,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what was sent and what became of it, the newest first."""
    from monitor.alerting.webhooks import WebhookStore

    webhooks = WebhookStore(settings_of(context, config_file, data_dir).data_dir)
    found = [one.as_dict() for one in webhooks.deliveries(webhook_id, limit=limit)]
    if as_json:
        print_json(found)
        return
    names = ("id", "event", "alert", "state", "tries", "last_status", "last_error", "next_at")
    rows = [["-" if one[name] is None else one[name] for name in names] for one in found]
    print_table(("ID", "EVENT", "ALERT", "STATE", "TRIES", "STATUS", "ERROR", "NEXT"), rows)


@app.command("replay")
def replay(
    context: typer.Context,
    webhook_id: IdArgument,
    delivery: Annotated[int, typer.Argument(metavar="DELIVERY")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Send one again; a running `serve` does so within a second."""
    from monitor.alerting.webhooks import WebhookStore

    WebhookStore(settings_of(context, config_file, data_dir).data_dir).replay(webhook_id, delivery)
    typer.echo(f"waits: {delivery}")


@app.command("enable")
def enable(
    context: typer.Context, webhook_id: IdArgument, config_file: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Switch one on again that was switched off; what waited goes out."""
    from monitor.alerting.webhooks import WebhookStore

    WebhookStore(settings_of(context, config_file, data_dir).data_dir).enable(webhook_id)
    typer.echo(f"on: {webhook_id}")


@app.command("rotate")
def rotate(
    context: typer.Context,
    webhook_id: IdArgument,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="The old secret signs no more, not even for a day.")
    ] = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give it a new secret and print that: this once. For a day messages are signed with both."""
    from monitor.alerting.webhooks import WebhookStore

    made = WebhookStore(settings_of(context, config_file, data_dir).data_dir).rotate(webhook_id, at_once=at_once)
    if as_json:
        print_json({**made.as_dict(), "secret": made.secret})
    else:
        typer.echo(f"secret: {made.secret}")


@app.command("rm")
def remove(
    context: typer.Context, webhook_id: IdArgument, config_file: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Tell it nothing more; what it is owed is forgotten."""
    from monitor.alerting.webhooks import WebhookStore

    WebhookStore(settings_of(context, config_file, data_dir).data_dir).remove(webhook_id)
    typer.echo(f"removed: {webhook_id}")
