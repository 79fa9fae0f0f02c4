"""`copywatch ingest` and `copywatch match`: the two halves of a monitor spread over machines with Kafka."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from monitor.commands.terminal import ConfigOption, DataDirOption, settings_of
from monitor.config.settings import Settings
from monitor.errors import ConfigError


def ingest(
    context: typer.Context,
    features: Annotated[bool, typer.Option("--features", help="Send feature rows instead of pictures.")] = False,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared", help="Share the channels of the topic with other processes; ignore those of the file."
        ),
    ] = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Publish one picture per second of every channel to Kafka, until stopped."""
    settings = settings_of(context, config_file, data_dir)
    if not settings.channels and not shared:
        raise ConfigError("no channel is configured; add `channels:` to the file given by --config, or use --shared.")
    _check_connection(settings)
    from monitor.ops.logs import configure_logging
    from monitor.roles.kafka_ingest import ingest as run

    configure_logging(settings.logging)
    config = None if shared else config_file or context.obj[0]
    asyncio.run(run(settings, config=config, features=features, shared=shared))


def match(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Match the pictures of a Kafka topic, as one of any number of matchers, until stopped."""
    settings = settings_of(context, config_file, data_dir)
    _check_connection(settings)
    from monitor.ops.logs import configure_logging
    from monitor.roles.kafka_match import match as run

    configure_logging(settings.logging)
    asyncio.run(run(settings))


def _check_connection(settings: Settings) -> None:
    """Raises ConfigError for invalid settings, before seconds are spent on loading."""
    from monitor.kafka.broker import client_options

    client_options(settings.kafka)
