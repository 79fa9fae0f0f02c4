"""`copywatch channels`: the watched broadcasts, and a test whether one can be opened.

The list is stored in the configuration file; a running `serve` applies changes within seconds. An address on a command
line is visible in the process list while the command runs: `-` reads it from stdin instead.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from monitor.commands.audited import audited
from monitor.commands.terminal import ConfigOption, JsonOption, print_json, print_table, settings_of
from monitor.config.settings import NO_ADDRESS, ChannelSettings, Settings, is_bare_word, load_settings
from monitor.errors import ConfigError
from reference_db.media.addresses import display_name, redact_url

app = typer.Typer(no_args_is_help=True, help="The watched broadcasts.")

KafkaOption = Annotated[bool, typer.Option("--kafka", help="Use the topic that `ingest --shared` reads, not the file.")]
PrivateOption = Annotated[bool, typer.Option("--private", help="Its host name may have a private address.")]
TEST_S = 10.0  # long enough for several key frames
STATE_TIMEOUT_S = 1.0


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Letters, digits, dot, dash, underscore.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the stream, or - to read it from stdin.")],
    mode: Annotated[str, typer.Option(help="auto, exact or economy.")] = "auto",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Private host or network that it may use; repeatable."),
    ] = None,
    private: PrivateOption = False,
    shared: KafkaOption = False,
    config_file: ConfigOption = None,
) -> None:
    """Add a channel to the configuration; a running `serve` starts it within seconds."""
    channel = _channel(name, _url(url), mode, allow or [], private)
    if is_bare_word(channel.url):
        raise ConfigError(f"url: {NO_ADDRESS}, and there is no such file")
    if shared:
        from monitor.kafka.channel_assignment import refuse_files, write_channel

        refuse_files(channel)
        settings = settings_of(context, config_file)
        with audited(settings.data_dir, "channels add", name, url=redact_url(channel.url), shared=True):
            asyncio.run(write_channel(settings.kafka, name, channel))
        typer.echo(f"shared: {channel.name} ({display_name(channel.url)})")
        return
    config = _config(context, config_file)
    from monitor.config.config_file import add_channel

    with audited(_data_dir(context, config), "channels add", name, url=redact_url(channel.url)):
        add_channel(config, channel)
    typer.echo(f"added: {channel.name} ({display_name(channel.url)})")


@app.command("list")
def list_channels(
    context: typer.Context, shared: KafkaOption = False, config_file: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """List the channels, with the state of each and its reason while `serve` runs."""
    settings = settings_of(context, config_file)
    statuses = _statuses(settings)
    channels = settings.channels
    if shared:
        from monitor.kafka.channel_assignment import shared_channels

        channels = asyncio.run(shared_channels(settings.kafka))
    found = [
        {
            "name": one.name,
            "state": statuses.get(one.name, {}).get("state"),
            "mode": one.mode,
            "url": redact_url(one.url),
            "reason": statuses.get(one.name, {}).get("reason"),
        }
        for one in channels
    ]
    if as_json:
        print_json(found)
    else:
        titles = ("NAME", "STATE", "MODE", "URL", "REASON")
        print_table(titles, [[value or "-" for value in one.values()] for one in found])


@app.command("rm")
def remove(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    shared: KafkaOption = False,
    config_file: ConfigOption = None,
) -> None:
    """Remove channels from the configuration; a running `serve` stops them and ends their alerts."""
    from monitor.config.config_file import remove_channel

    if shared:
        from monitor.kafka.channel_assignment import remove_channels

        settings = settings_of(context, config_file)
        with audited(settings.data_dir, "channels rm", ", ".join(names), shared=True):
            asyncio.run(remove_channels(settings.kafka, names))
        typer.echo(f"removed: {', '.join(names)}")
        return
    config = _config(context, config_file)
    for name in names:
        with audited(_data_dir(context, config), "channels rm", name):
            remove_channel(config, name)
        typer.echo(f"removed: {name}")


@app.command("test")
def probe(
    context: typer.Context,
    name_or_url: Annotated[str, typer.Argument(metavar="NAME|URL", help="A channel, an address, or - for stdin.")],
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to watch.")] = TEST_S,
    thumbnail: Annotated[Path | None, typer.Option(metavar="FILE.jpg", help="File for the first picture.")] = None,
    private: PrivateOption = False,
    config_file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a channel for some seconds and describe it; exit 4 if it cannot be opened."""
    config_file = config_file or context.obj[0]
    known = {one.name: one for one in settings_of(context, config_file).channels} if config_file else {}
    channel = known.get(name_or_url) or _unlisted(_url(name_or_url), private)
    from monitor.ingest.channel_probe import probe_channel
    from reference_db.media.jpeg import encode_jpeg

    found, picture = probe_channel(channel, seconds)
    thumbnail = thumbnail or Path(f"{channel.name}.jpg")
    thumbnail.write_bytes(encode_jpeg(picture, quality=85))
    found["thumbnail"] = str(thumbnail)
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        typer.echo(f"{key.replace('_', ' '):20} {'unknown' if value is None else value}")


def _config(context: typer.Context, config_file: Path | None) -> Path:
    config: Path | None = config_file or context.obj[0]
    if config is None:
        raise ConfigError("channels are stored in a configuration file; name it with --config or COPYWATCH_CONFIG.")
    return config


def _data_dir(context: typer.Context, config: Path) -> Path:
    """The data folder, also of a configuration file that does not exist yet."""
    return load_settings(config if config.exists() else None, data_dir=context.obj[1]).data_dir


def _url(url: str) -> str:
    return sys.stdin.readline().strip() if url == "-" else url


def _channel(name: str, url: str, mode: str, allow: list[str], private: bool) -> ChannelSettings:
    values = {"name": name, "url": url, "mode": mode, "allow": allow, "private": private}
    try:
        return ChannelSettings.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg'].removeprefix('Value error, ')}" for one in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None  # pydantic's own text might hold the password


def _unlisted(url: str, private: bool) -> ChannelSettings:
    """A channel of this address, to test it."""
    if is_bare_word(url):
        raise ConfigError(f"there is no channel {url} and no such file; {NO_ADDRESS}")
    return _channel("test", url, "exact", [], private)


def _statuses(settings: Settings) -> dict[str, dict[str, str | None]]:
    """State and reason of each channel in a running `serve`; empty if none answers."""
    host = f"[{settings.web.host}]" if ":" in settings.web.host else settings.web.host
    try:
        with urllib.request.urlopen(f"http://{host}:{settings.web.port}/channelz", timeout=STATE_TIMEOUT_S) as reply:
            channels: dict[str, dict[str, str | None]] = json.load(reply)["channels"]
            return {name: {key: one[key] for key in ("state", "reason")} for name, one in channels.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # nothing listens there, or another program
        return {}
