"""`copywatch tokens`: access to the API and the dashboard. A running `serve` applies changes within a second."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from monitor.commands.audited import audited
from monitor.commands.terminal import ConfigOption, DataDirOption, JsonOption, print_json, print_table, settings_of

app = typer.Typer(no_args_is_help=True, help="Access tokens of the API and the dashboard.")


class Scope(StrEnum):
    """Permissions of a token; each scope includes the one before it."""

    read = "read"
    write = "write"
    admin = "admin"


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Its owner: letters, digits and . _ @ -")],
    scope: Annotated[
        Scope, typer.Option(help="`read` views, `write` also changes, `admin` also manages webhooks and tokens.")
    ] = Scope.read,
    days: Annotated[float | None, typer.Option(min=0, help="Days after which it expires; by default never.")] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print it once; only its hash is stored."""
    from monitor.web.auth.tokens import Tokens

    folder = settings_of(context, config_file, data_dir).data_dir
    with audited(folder, "tokens add", about=name, scope=scope.value):
        token = Tokens(folder).add(name, scope.value, days)
    if as_json:
        print_json({"name": name, "scope": scope.value, "token": token})
    else:
        typer.echo(token)


@app.command("list")
def list_tokens(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tokens: name, scope, creation, expiry and last use (to within a minute)."""
    from monitor.web.auth.token_uses import TokenUses
    from monitor.web.auth.tokens import Tokens

    folder = settings_of(context, config_file, data_dir).data_dir
    uses = TokenUses(folder)
    found = [
        {
            "name": one.name,
            "scope": one.scope,
            "created_at": one.created_at,
            "expires_at": one.expires_at,
            "last_used_at": uses.last(one.sha256),
        }
        for one in Tokens(folder).all()
    ]
    if as_json:
        print_json(found)
    else:
        rows = [[value or "-" for value in one.values()] for one in found]
        print_table(("NAME", "SCOPE", "CREATED", "EXPIRES", "LAST USED"), rows)


@app.command("rm")
def remove(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Remove tokens; they stop working within a second, and open streams and uploads end within two."""
    from monitor.web.auth.tokens import Tokens

    folder = settings_of(context, config_file, data_dir).data_dir
    tokens = Tokens(folder)
    for name in names:
        with audited(folder, "tokens rm", about=name):
            tokens.remove(name)
        typer.echo(f"removed: {name}")
