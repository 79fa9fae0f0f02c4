"""`copywatch purge`: removes what is stored about a person or an alert before its time.

Without `--yes` a command only lists what it would remove. It works beside a running monitor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from monitor.commands.audited import audited, this_user
from monitor.commands.terminal import (
    FAILED,
    ConfigOption,
    DataDirOption,
    IdArgument,
    JsonOption,
    print_error,
    print_json,
    print_table,
    settings_of,
)

app = typer.Typer(no_args_is_help=True, help="Remove what is stored about a person or an alert.")

YesOption = Annotated[bool, typer.Option("--yes", help="Remove it; without this option it is only listed.")]


@dataclass(frozen=True, slots=True)
class Holding:
    """Something that is stored, and what becomes of it."""

    what: str
    n: int
    outcome: str
    remove: Callable[[], object] | None = None  # None: it stays


@app.command("person")
def person(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a token or a reviewer, a system user, or a network address.")],
    yes: YesOption = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a person's token, and the name from reviews, messages and the audit log."""
    folder = settings_of(context, config_file, data_dir).data_dir
    holdings = [one for one in _about_person(folder, name) if one.n]
    if yes:
        with audited(folder, "purge person"):
            _remove(holdings)
    _print(f"about {name}", holdings, yes, as_json)


@app.command("alert")
def alert(
    context: typer.Context,
    alert_id: IdArgument,
    yes: YesOption = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove an alert that is over: its events, evidence, reviews and messages."""
    from monitor.alerting.outbox import History

    folder = settings_of(context, config_file, data_dir).data_dir
    if alert_id in [one.id for one in History(folder).open_alerts()]:
        print_error(f"The alert {alert_id} is still open; purge it after its end.")
        raise typer.Exit(FAILED)
    holdings = [one for one in _about_alert(folder, alert_id) if one.n]
    if yes:
        with audited(folder, "purge alert", alert_id, alerts=[alert_id]):
            _remove(holdings)
    _print(f"about the alert {alert_id}", holdings, yes, as_json)


@app.command("expired")
def expired(
    context: typer.Context,
    yes: YesOption = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove reviews and audit entries that are older than the settings permit, as `serve` does every hour."""
    from monitor.runtime.retention import Retention

    settings = settings_of(context, config_file, data_dir)
    retention = Retention(settings)
    found = retention.expired()
    holdings = [
        Holding("reviewed alerts that are deleted", found.n_reviewed, "reviews removed"),
        Holding("audit entries", found.n_audit_entries, "removed"),
    ]
    holdings = [one for one in holdings if one.n]
    if yes and holdings:
        with audited(settings.data_dir, "purge expired"):
            retention.apply()
    _print("that has expired", holdings, yes, as_json)


def _about_person(folder: Path, name: str) -> Iterator[Holding]:
    from monitor.alerting.webhooks import WebhookStore
    from monitor.audit.log import AuditLog
    from monitor.rights.store import RightsStore
    from monitor.web.auth.tokens import Tokens
    from monitor.web.requests.idempotency import Replies

    tokens, rights, webhooks = Tokens(folder), RightsStore(folder), WebhookStore(folder)
    replies, audit = Replies(folder), AuditLog(folder)
    n_tokens = sum(one.name == name for one in tokens.all())
    yield Holding("tokens", n_tokens, "removed; access ends", lambda: tokens.remove(name))
    yield Holding("reviews", rights.n_reviews_by(name), "name and note erased", lambda: rights.erase_reviewer(name))
    yield Holding("webhook messages", webhooks.n_reviewed_by(name), "removed", lambda: webhooks.erase_reviewer(name))
    yield Holding("stored replies", replies.n_naming(name), "removed", lambda: replies.erase_naming(name))
    yield Holding(
        "audit entries", audit.n_personal(name), "name and address erased", lambda: audit.erase(name, this_user())
    )
    yield from _mentions(folder, name)


def _mentions(folder: Path, name: str) -> Iterator[Holding]:
    """Texts that contain the name; they describe rights, so their owner decides."""
    from monitor.rights.store import RightsStore
    from reference_db.store.catalog import Catalog

    rights = RightsStore(folder)
    licences = [one.id for one in rights.licences() if name in f"{one.owner} {one.note}"]
    yield Holding("licences", len(licences), f"stay; `copywatch licences rm` removes {', '.join(licences)}")
    exclusions = [f"{one.reference}/{one.id}" for one in rights.exclusions() if name in one.note]
    yield Holding("exclusions", len(exclusions), f"stay; `copywatch refs include` removes {', '.join(exclusions)}")
    with Catalog.open(folder) as catalog:
        references = [one.id for one in catalog.contents().references if name in f"{one.owner} {one.title}"]
    yield Holding("references", len(references), f"stay; `copywatch refs rm` removes {', '.join(references)}")


def _about_alert(folder: Path, alert_id: str) -> Iterator[Holding]:
    from monitor.alerting.outbox import History, erase_alert
    from monitor.alerting.webhooks import WebhookStore
    from monitor.audit.log import AuditLog
    from monitor.evidence.store import EvidenceStore
    from monitor.rights.store import RightsStore
    from monitor.web.requests.idempotency import Replies

    history, evidence, rights = History(folder), EvidenceStore(folder), RightsStore(folder)
    webhooks, replies = WebhookStore(folder), Replies(folder)
    yield Holding("evidence files", len(evidence.paths(alert_id)), "removed", lambda: evidence.remove(alert_id))
    yield Holding("events", len(history.alert(alert_id)), "removed", lambda: erase_alert(folder, alert_id))
    yield Holding("reviews", len(rights.reviews(alert_id)), "removed", lambda: rights.remove_reviews([alert_id]))
    yield Holding("webhook messages", webhooks.n_about(alert_id), "removed", lambda: webhooks.erase_alert(alert_id))
    yield Holding("stored replies", replies.n_naming(alert_id), "removed", lambda: replies.erase_naming(alert_id))
    yield Holding("audit entries", len(AuditLog(folder).of_alert(alert_id)), "stay until `audit.keep_days` have passed")


def _remove(holdings: Sequence[Holding]) -> None:
    for holding in holdings:
        if holding.remove is not None:
            holding.remove()


def _print(about: str, holdings: Sequence[Holding], is_removed: bool, as_json: bool) -> None:
    if as_json:
        found = [{"what": one.what, "n": one.n, "outcome": one.outcome} for one in holdings]
        print_json({"removed": is_removed, "found": found})
        return
    if not holdings:
        typer.echo(f"Nothing {about} is stored.")
        return
    print_table(("WHAT", "N", "OUTCOME"), [(one.what, one.n, one.outcome) for one in holdings])
    if not is_removed:
        typer.echo("Nothing was removed; `--yes` removes it.")
