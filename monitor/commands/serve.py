"""`copywatch serve`: the monitor in one process."""

from __future__ import annotations

import asyncio

import typer

from monitor.commands.terminal import ConfigOption, DataDirOption, settings_of
from monitor.errors import ConfigError


def serve(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Watch every configured channel until stopped."""
    settings = settings_of(context, config_file, data_dir)
    config = config_file or context.obj[0]  # channels may be added to the file while it is served
    if not (settings.channels or config or settings.kafka.follow_alerts):
        raise ConfigError(
            "no channel is configured; add `channels:` with a name and a url to the file given by --config."
        )
    from monitor.ops.logs import configure_logging
    from monitor.roles.serve import serve as run

    configure_logging(settings.logging)
    asyncio.run(run(settings, config=config))
