"""The configuration file that `copywatch init` prints: every setting with its default and its description."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from monitor.config.settings import ChannelSettings, Settings

HEAD = """\
# yaml-language-server: $schema=copywatch.schema.json
# With that line editors check the file; `copywatch config schema > copywatch.schema.json` creates the schema.
#
# Every setting with its default. To change one, remove the `#` before it and before the name of its section,
# then run: copywatch config check --config copywatch.yaml
# The environment overrides the file: COPYWATCH_<KEY> or COPYWATCH_<SECTION>__<KEY>.
"""
CHANNELS = """\
# channels:
#   - name: channel-5
#     url: http://192.0.2.1:8000/channel-5.m3u8
"""


def config_template() -> str:
    """The text of the file; unedited it means the defaults."""
    return "\n".join([HEAD, *(_part(name, field) for name, field in Settings.model_fields.items())])


def _part(name: str, field: FieldInfo) -> str:
    if name == "channels":
        more = "".join(f"#     {line}\n" for line in _lines(ChannelSettings, skip=("name", "url")))
        return f"# {field.description}\n{CHANNELS}{more}"
    if isinstance(field.default, BaseModel):
        lines = "".join(f"#   {line}\n" for line in _lines(type(field.default)))
        return f"# {name}:\n{lines}"
    return f"# {_line(name, field)}\n"


def _lines(section: type[BaseModel], skip: tuple[str, ...] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if name not in skip:
            yield _line(name, field)


def _line(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    plain = default if isinstance(default, bool | int | float | tuple | None) else str(default)
    return f"{name}: {json.dumps(plain)}  # {field.description}"
