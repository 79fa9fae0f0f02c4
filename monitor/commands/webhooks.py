"""`copywatch webhooks`: HTTP receivers of alerts. A running `serve` applies changes within a second."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from monitor.commands.audited import audited
from monitor.commands.terminal import (
    FAILED,
    ConfigOption,
    DataDirOption,
    IdArgument,
    JsonOption,
    print_json,
    print_table,
    settings_of,
)
from reference_db.media.addresses import redact_url

app = typer.Typer(no_args_is_help=True, help="HTTP receivers of alerts.")


@app.command("add")
def add(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Address to POST to, or - to read it from stdin.")],
    types: Annotated[
        list[str] | None, typer.Option("--type", help="Only this event type, such as alert.ended; repeatable.")
    ] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send future alerts to an address, and print its secret once."""
    from monitor.alerting.webhooks import WebhookStore

    url = sys.stdin.readline().strip() if url == "-" else url
    folder = settings_of(context, config_file, data_dir).data_dir
    with audited(folder, "webhooks add", url=redact_url(url)) as recording:
        webhook = WebhookStore(folder).add(url, types or ())
        recording.object = webhook.id
    if as_json:
        print_json({**webhook.as_dict(), "secret": webhook.secret})
    else:
        typer.echo(f"added: {webhook.id}\nsecret: {webhook.secret}")


@app.command("list")
def list_webhooks(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the webhooks."""
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
    """Send a test message once and print the result; exit 1 if it was not accepted."""
    import asyncio

    from monitor.alerting.webhook_delivery import send
    from monitor.alerting.webhooks import DONE, WebhookStore

    settings = settings_of(context, config_file, data_dir)
    webhooks = WebhookStore(settings.data_dir)
    with audited(settings.data_dir, "webhooks test", webhook_id):
        delivery = webhooks.ping(webhook_id)
        attempt = asyncio.run(send(webhooks.get(webhook_id), delivery, settings.webhooks.allow))
        done = webhooks.record_attempt(delivery, attempt, 1.0)
    if as_json:
        print_json(done.as_dict())
    else:
        typer.echo(f"accepted: HTTP status {attempt.status}" if attempt.succeeded else f"not accepted: {attempt.error}")
    if done.state != DONE:
        raise typer.Exit(FAILED)


@app.command("deliveries")
def deliveries(
    context: typer.Context,
    webhook_id: IdArgument,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of deliveries.")] = 50,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List deliveries and their results, newest first."""
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
    """Send one delivery again; a running `serve` does so within a second."""
    from monitor.alerting.webhooks import WebhookStore

    folder = settings_of(context, config_file, data_dir).data_dir
    with audited(folder, "webhooks replay", f"{webhook_id}/{delivery}"):
        WebhookStore(folder).replay(webhook_id, delivery)
    typer.echo(f"delivery {delivery} queued")


@app.command("enable")
def enable(
    context: typer.Context, webhook_id: IdArgument, config_file: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Enable a disabled webhook; queued deliveries are sent."""
    from monitor.alerting.webhooks import WebhookStore

    folder = settings_of(context, config_file, data_dir).data_dir
    with audited(folder, "webhooks enable", webhook_id):
        WebhookStore(folder).enable(webhook_id)
    typer.echo(f"enabled: {webhook_id}")


@app.command("rotate")
def rotate(
    context: typer.Context,
    webhook_id: IdArgument,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Stop signing with the old secret now, not after a day.")
    ] = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a new secret and print it once. For a day messages are signed with both."""
    from monitor.alerting.webhooks import WebhookStore

    folder = settings_of(context, config_file, data_dir).data_dir
    with audited(folder, "webhooks rotate", webhook_id):
        webhook = WebhookStore(folder).rotate(webhook_id, at_once=at_once)
    if as_json:
        print_json({**webhook.as_dict(), "secret": webhook.secret})
    else:
        typer.echo(f"secret: {webhook.secret}")


@app.command("rm")
def remove(
    context: typer.Context, webhook_id: IdArgument, config_file: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Remove a webhook and its queued deliveries."""
    from monitor.alerting.webhooks import WebhookStore

    folder = settings_of(context, config_file, data_dir).data_dir
    with audited(folder, "webhooks rm", webhook_id):
        WebhookStore(folder).remove(webhook_id)
    typer.echo(f"removed: {webhook_id}")
