"""`copywatch config` and `copywatch init`: the configuration, checked, shown and described."""

from __future__ import annotations

import typer
import yaml

from monitor.commands.terminal import ConfigOption, DataDirOption, JsonOption, print_json, settings_of

app = typer.Typer(no_args_is_help=True, help="The configuration.")


@app.command("check")
def check(context: typer.Context, config_file: ConfigOption = None) -> None:
    """Check that the configuration is valid."""
    settings = settings_of(context, config_file)
    source = config_file or context.obj[0] or "the environment"
    n_channels = len(settings.channels)
    typer.echo(f"{source}: OK ({n_channels} channel{'s' * (n_channels != 1)})")


@app.command("show")
def show(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every setting in force, credentials hidden."""
    values = settings_of(context, config_file, data_dir).model_dump(mode="json")
    if as_json:
        print_json(values)
    else:
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of the configuration, for completion and checks in editors."""
    from monitor.config.settings import Settings

    print_json(Settings.model_json_schema())


def init() -> None:
    """Print a configuration to start from: every setting with its default and its meaning."""
    from monitor.config.template import config_template

    typer.echo(config_template(), nl=False)
