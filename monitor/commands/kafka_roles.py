"""`copywatch ingest` and `copywatch match`: the two halves of a monitor that is spread over machines by Kafka."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from monitor.commands.terminal import ConfigOption, DataDirOption, settings_of
from monitor.errors import ConfigError


def ingest(
    context: typer.Context,
    features: Annotated[bool, typer.Option("--features", help="Send feature rows instead of pictures.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Take a share of the channels in the topic, not those of the file.")
    ] = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Publish one picture a second of every channel to Kafka, until told to stop."""
    settings = settings_of(context, config_file, data_dir)
    if not settings.channels and not shared:
        raise ConfigError("no channel is configured; add `channels:` to the file given by --config, or use --shared.")
    from monitor.kafka.broker import connection
    from monitor.ops.logs import configure_logging
    from monitor.roles.kafka_ingest import ingest as publish

    connection(settings.kafka)
    configure_logging(settings.logging)
    config = None if shared else config_file or context.obj[0]
    asyncio.run(publish(settings, config=config, features=features, shared=shared))


def match(context: typer.Context, config_file: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Match the pictures of a Kafka topic, as one of any number of members, until told to stop."""
    settings = settings_of(context, config_file, data_dir)
    from monitor.kafka.broker import connection
    from monitor.ops.logs import configure_logging
    from monitor.roles.kafka_match import match as work

    connection(settings.kafka)
    configure_logging(settings.logging)
    asyncio.run(work(settings))
