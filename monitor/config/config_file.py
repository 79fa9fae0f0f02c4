"""Changing the configuration file by program: its channels, while every other line stays as it is.

The text itself is changed, at the places that YAML's own reader names, so comments, order and quotes are kept. The file
is written aside, checked to say exactly what was meant, and renamed: whoever reads it sees the old or the new one. Its
permissions stay, since an address in it may hold a password. A running `serve` follows it within seconds.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from monitor.config.settings import ChannelSettings, load_settings
from monitor.errors import ConfigError
from reference_db.store.disk import atomic_file


def add_channel(config: Path, channel: ChannelSettings) -> None:
    """Appends the channel; raises ConfigError where its name is taken. A file that is not there is made."""
    with _text_of(config) as text:
        channels = _channels(config)
        if channel.name in [one.name for one in channels]:
            raise ConfigError(f"{config}: there is a channel {channel.name} already; choose another name or remove it.")
        _write(config, _with(text, channel), [*channels, channel])


def remove_channel(config: Path, name: str) -> None:
    """Takes the channel out; raises ConfigError where there is none of this name."""
    with _text_of(config) as text:
        channels = _channels(config)
        place = next((n for n, one in enumerate(channels) if one.name == name), None)
        if place is None:
            raise ConfigError(f"{config}: there is no channel {name}; `copywatch channels list` shows those there are.")
        _write(config, _without(text, place), channels[:place] + channels[place + 1 :])


# --- the text --------------------------------------------------------------------------------------------------------


def _with(text: str, channel: ChannelSettings) -> str:
    parts = [f"name: {_scalar(channel.name)}", f"url: {_scalar(channel.url)}"]
    parts += [f"mode: {channel.mode}"] if channel.mode != "auto" else []
    parts += [f"allow: [{', '.join(map(_scalar, channel.allow))}]"] if channel.allow else []
    key, node = _find(text)
    if key is None:
        return text + ("" if text.endswith("\n") or not text else "\n") + "channels:\n" + _item(parts, 2)
    if isinstance(node, yaml.SequenceNode) and node.value and node.flow_style:
        end = node.end_mark.index - 1
        return f"{text[:end].rstrip()}, {{{', '.join(parts)}}}{text[end:]}"
    lines = text.splitlines(keepends=True)
    if isinstance(node, yaml.SequenceNode) and node.value:
        indent, at = len(_dash(lines, node.value[0])[1]), _last_line(node.value[-1]) + 1
    else:  # nothing there yet: `channels:`, `channels: []` or `channels: null`
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
    """The value in YAML, quoted where it must be."""
    return yaml.safe_dump([value], default_flow_style=True, width=1 << 20, allow_unicode=True).strip()[1:-1]


def _find(text: str) -> tuple[yaml.Node | None, yaml.Node]:
    """The key `channels` and its value in the tree of nodes, which know their places."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else []:
        if key.value == "channels":
            return key, value
    return None, yaml.ScalarNode("", "")


def _dash(lines: list[str], item: yaml.Node) -> tuple[int, str]:
    """The line with the dash of an item, and what stands before the dash."""
    number = item.start_mark.line
    while not lines[number].lstrip().startswith("-"):
        number -= 1
    return number, lines[number][: lines[number].index("-")]


def _last_line(node: yaml.Node) -> int:
    """The last line that belongs to a node; the reader's own end lies behind the comments that follow."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        return max(_last_line(value) for _, value in node.value)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return max(_last_line(value) for value in node.value)
    return node.end_mark.line - (node.end_mark.column == 0 and node.end_mark.line > node.start_mark.line)


# --- the file --------------------------------------------------------------------------------------------------------


@contextmanager
def _text_of(config: Path) -> Iterator[str]:
    """What is in the file; while open, nobody else changes it by this program."""
    if os.environ.get("COPYWATCH_CHANNELS"):
        raise ConfigError("COPYWATCH_CHANNELS is set and wins over the file; unset it or change it there.")
    folder = config.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; make it first.")
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        _channels(config)  # a file that is wrong is not made worse
        yield config.read_text(encoding="utf-8") if config.exists() else ""
    finally:
        os.close(number)


def _channels(config: Path) -> list[ChannelSettings]:
    return load_settings(config).channels if config.exists() else []


def _write(config: Path, text: str, meant: list[ChannelSettings]) -> None:
    config = config.resolve()  # a link stays a link
    mode = config.stat().st_mode & 0o777 if config.exists() else 0o600
    with atomic_file(config, mode=mode) as file:
        file.write(text.encode())
        file.flush()
        if _channels(Path(file.name)) != meant:
            raise ConfigError(f"{config}: its channels are written in a way that only an editor can change.")
