"""`copywatch channels`: which broadcasts are watched, and whether one can be.

The list is that of the configuration file; a running `serve` follows the file within seconds. An address on a command
line shows up in the process list while the command runs: `-` takes it from stdin instead.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from monitor.commands.terminal import ConfigOption, JsonOption, print_json, print_table, settings_of
from monitor.config.settings import ChannelSettings, Settings
from monitor.errors import ConfigError
from reference_db.media.addresses import redact_url, shown

app = typer.Typer(no_args_is_help=True, help="The broadcasts that are watched.")

KafkaOption = Annotated[bool, typer.Option("--kafka", help="In the topic that `ingest --shared` reads, not the file.")]
TEST_S = 10.0  # some key pictures come in that time
ASK_S = 1.0


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Letters, digits, dot, dash, underscore.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where it airs, or - to read it from stdin.")],
    mode: Annotated[str, typer.Option(help="auto, exact or economy.")] = "auto",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Private host or network it may lead to; may be given often."),
    ] = None,
    shared: KafkaOption = False,
    config_file: ConfigOption = None,
) -> None:
    """Add a channel to the configuration; a running `serve` starts it within seconds."""
    channel = _channel(name, _read(url), mode, allow or [])
    if shared:
        from monitor.kafka.channel_assignment import put_channel, refuse_files

        refuse_files(channel)
        asyncio.run(put_channel(settings_of(context, config_file).kafka, name, channel))
        typer.echo(f"shared: {channel.name} ({shown(channel.url)})")
        return
    config = _named(context, config_file)
    from monitor.config.config_file import add_channel

    add_channel(config, channel)
    typer.echo(f"added: {channel.name} ({shown(channel.url)})")


@app.command("list")
def list_channels(
    context: typer.Context, shared: KafkaOption = False, config_file: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """List the channels and, while `serve` runs, the state of each."""
    settings = settings_of(context, config_file)
    states = _states(settings)
    channels = settings.channels
    if shared:
        from monitor.kafka.channel_assignment import shared_channels

        channels = asyncio.run(shared_channels(settings.kafka))
    found = [
        {"name": one.name, "state": states.get(one.name), "mode": one.mode, "url": redact_url(one.url)}
        for one in channels
    ]
    if as_json:
        print_json(found)
    else:
        print_table(("NAME", "STATE", "MODE", "URL"), [[value or "-" for value in one.values()] for one in found])


@app.command("rm")
def remove(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    shared: KafkaOption = False,
    config_file: ConfigOption = None,
) -> None:
    """Remove channels from the configuration; a running `serve` ends them, with the last word on their alerts."""
    from monitor.config.config_file import remove_channel

    if shared:
        from monitor.kafka.channel_assignment import remove_channels

        asyncio.run(remove_channels(settings_of(context, config_file).kafka, names))
        typer.echo(f"removed: {', '.join(names)}")
        return
    config = _named(context, config_file)
    for name in names:
        remove_channel(config, name)
        typer.echo(f"removed: {name}")


@app.command("test")
def try_channel(
    context: typer.Context,
    name_or_url: Annotated[str, typer.Argument(metavar="NAME|URL", help="A channel, an address, or - for stdin.")],
    seconds: Annotated[float, typer.Option(min=1, help="How long to watch.")] = TEST_S,
    thumbnail: Annotated[
        Path | None, typer.Option(metavar="FILE.jpg", help="Where its first picture is saved.")
    ] = None,
    config_file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a channel for some seconds and say what it is; exit 4 where it cannot be opened."""
    config_file = config_file or context.obj[0]
    known = {one.name: one for one in settings_of(context, config_file).channels} if config_file else {}
    channel = known.get(name_or_url) or _channel("test", _read(name_or_url), "exact", [])
    from monitor.ingest.channel_probe import look_at
    from reference_db.media.jpeg import encode_jpeg

    found, picture = look_at(channel, seconds)
    thumbnail = thumbnail or Path(f"{channel.name}.jpg")
    thumbnail.write_bytes(encode_jpeg(picture, quality=85))
    found["thumbnail"] = str(thumbnail)
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        typer.echo(f"{key.replace('_', ' '):20} {'not known' if value is None else value}")


def _named(context: typer.Context, config_file: Path | None) -> Path:
    config: Path | None = config_file or context.obj[0]
    if config is None:
        raise ConfigError("channels live in a configuration file; name it by --config or COPYWATCH_CONFIG.")
    return config


def _read(url: str) -> str:
    return sys.stdin.readline().strip() if url == "-" else url


def _channel(name: str, url: str, mode: str, allow: list[str]) -> ChannelSettings:
    try:
        return ChannelSettings.model_validate({"name": name, "url": url, "mode": mode, "allow": allow})
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg'].removeprefix('Value error, ')}" for one in error.errors()
        ]
        raise ConfigError("\n".join(wrong)) from None  # pydantic's own text is not ours to vouch for


def _states(settings: Settings) -> dict[str, str]:
    """The state of each channel, as a running `serve` tells it; empty where none answers."""
    from prometheus_client.parser import text_string_to_metric_families

    host = f"[{settings.web.host}]" if ":" in settings.web.host else settings.web.host
    try:
        with urllib.request.urlopen(f"http://{host}:{settings.web.port}/metrics", timeout=ASK_S) as reply:
            text = reply.read().decode()
    except (OSError, ValueError):
        return {}
    return {
        sample.labels["channel"]: sample.labels["state"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "copywatch_channel_state" and sample.value == 1
    }
