"""Edits the channels of the configuration file and leaves every other line as it is.

The text is changed at the positions that the YAML parser reports, so comments, order and quotes survive. The new file
is checked to contain exactly the intended channels and replaces the old one atomically, with the same permissions: a
URL in it may contain a password. A running `serve` applies it within seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from monitor.config.settings import ChannelSettings, load_settings
from monitor.errors import ConfigError
from reference_db.store.disk import atomic_file, wait_for_lock


def add_channel(config: Path, channel: ChannelSettings, *, at_most: int | None = None) -> None:
    """Appends the channel; raises ConfigError if its name is taken or there are `at_most`. Creates a missing file."""
    with _locked_text(config) as text:
        channels = _channels(config)
        if channel.name in [one.name for one in channels]:
            raise ConfigError(f"{config}: channel {channel.name} already exists; choose another name or remove it.")
        if at_most is not None and len(channels) >= at_most:
            raise ConfigError(f"The limit of {at_most} channels is reached; remove one, or set web.max_channels.")
        _write(config, _with(text, channel), [*channels, channel])


def remove_channel(config: Path, name: str) -> None:
    """Removes the channel; raises ConfigError if there is none of this name."""
    with _locked_text(config) as text:
        channels = _channels(config)
        place = next((n for n, one in enumerate(channels) if one.name == name), None)
        if place is None:
            raise ConfigError(f"{config}: there is no channel {name}; `copywatch channels list` lists the channels.")
        _write(config, _without(text, place), channels[:place] + channels[place + 1 :])


# --- the text --------------------------------------------------------------------------------------------------------


def _with(text: str, channel: ChannelSettings) -> str:
    parts = [f"name: {_scalar(channel.name)}", f"url: {_scalar(channel.url)}"]
    parts += [f"mode: {channel.mode}"] if channel.mode != "auto" else []
    parts += [f"allow: [{', '.join(map(_scalar, channel.allow))}]"] if channel.allow else []
    parts += ["private: true"] if channel.private else []
    key, node = _find(text)
    if key is None:
        return text + ("" if text.endswith("\n") or not text else "\n") + "channels:\n" + _item(parts, 2)
    if isinstance(node, yaml.SequenceNode) and node.value and node.flow_style:
        end = node.end_mark.index - 1
        return f"{text[:end].rstrip()}, {{{', '.join(parts)}}}{text[end:]}"
    lines = text.splitlines(keepends=True)
    if isinstance(node, yaml.SequenceNode) and node.value:
        indent, at = len(_dash(lines, node.value[0])[1]), _last_line(node.value[-1]) + 1
    else:  # no channel yet: `channels:`, `channels: []` or `channels: null`
        text = text[: node.start_mark.index].rstrip(" ") + text[node.end_mark.index :]
        lines, indent, at = text.splitlines(keepends=True), 2, key.start_mark.line + 1
    if lines[at - 1][-1:] != "\n":
        lines[at - 1] += "\n"
    return "".join([*lines[:at], _item(parts, indent), *lines[at:]])


def _without(text: str, place: int) -> str:
    _, node = _find(text)
    assert isinstance(node, yaml.SequenceNode)
    item = node.value[place]
    if node.flow_style:
        begin, end = item.start_mark.index, item.end_mark.index
        if place + 1 < len(node.value):
            end = node.value[place + 1].start_mark.index
        elif place:
            begin = node.value[place - 1].end_mark.index
        return text[:begin] + text[end:]
    lines = text.splitlines(keepends=True)
    return "".join(lines[: _dash(lines, item)[0]] + lines[_last_line(item) + 1 :])


def _item(parts: list[str], indent: int) -> str:
    return "".join(f"{' ' * indent}{'  ' if n else '- '}{part}\n" for n, part in enumerate(parts))


def _scalar(value: str) -> str:
    """The value in YAML, quoted if necessary."""
    return yaml.safe_dump([value], default_flow_style=True, width=1 << 20, allow_unicode=True).strip()[1:-1]


def _find(text: str) -> tuple[yaml.Node | None, yaml.Node]:
    """The node of the key `channels` and that of its value; nodes have their positions in the text."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else []:
        if key.value == "channels":
            return key, value
    return None, yaml.ScalarNode("", "")


def _dash(lines: list[str], item: yaml.Node) -> tuple[int, str]:
    """The number of the line with the dash of an item, and the text before the dash."""
    number = item.start_mark.line
    while not lines[number].lstrip().startswith("-"):
        number -= 1
    return number, lines[number][: lines[number].index("-")]


def _last_line(node: yaml.Node) -> int:
    """The last line of a node; the end that the parser reports includes the comments after it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        return max(_last_line(value) for _, value in node.value)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return max(_last_line(value) for value in node.value)
    return node.end_mark.line - (node.end_mark.column == 0 and node.end_mark.line > node.start_mark.line)


# --- the file --------------------------------------------------------------------------------------------------------


@contextmanager
def _locked_text(config: Path) -> Iterator[str]:
    """The text of the file, locked against other processes of Copywatch while open."""
    if os.environ.get("COPYWATCH_CHANNELS"):
        raise ConfigError("COPYWATCH_CHANNELS is set and overrides the file; unset it, or change the channels there.")
    folder = config.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; create it first.")
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            wait_for_lock(number)
        except TimeoutError as error:
            raise ConfigError(f"{folder} is {error.strerror}; end that process and try again.") from error
        _channels(config)  # refuses an invalid file
        yield config.read_text(encoding="utf-8") if config.exists() else ""
    finally:
        os.close(number)


def _channels(config: Path) -> list[ChannelSettings]:
    return load_settings(config).channels if config.exists() else []


def _write(config: Path, text: str, expected: list[ChannelSettings]) -> None:
    config = config.resolve()  # a symbolic link stays one
    mode = config.stat().st_mode & 0o777 if config.exists() else 0o600
    with atomic_file(config, mode=mode) as file:
        file.write(text.encode())
        file.flush()
        if _channels(Path(file.name)) != expected:
            raise ConfigError(f"{config}: the format of its channels cannot be edited automatically; use an editor.")
