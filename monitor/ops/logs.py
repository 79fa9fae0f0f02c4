"""Logs: every module's `logging` in, one line per event on stderr out.

A console format on a terminal, else JSON lines. Each line has timestamp (UTC), level, event and logger, and `channel`
where one is bound. URLs are redacted in every field, in tracebacks too, but for the link that logs a user in.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from monitor.config.settings import LoggingSettings
from reference_db.media.addresses import redact_text

UNREDACTED = "unredacted"  # `extra` of a line whose URL is meant to be read


def configure_logging(settings: LoggingSettings, stream: TextIO | None = None) -> None:
    """Writes the logs of all modules to the stream (by default stderr); replaces an earlier configuration."""
    stream = stream if stream is not None else sys.stderr
    console = settings.format == "console" or (settings.format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_common_processors(),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(console, stream)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    # A line per scrape and probe would hide the rest.
    logging.getLogger("uvicorn.access").setLevel("DEBUG" if settings.level == "debug" else "WARNING")
    # aiokafka logs several times a second that a broker is down, which our code logs once; its debug lines contain
    # whole records.
    logging.getLogger("aiokafka").setLevel("INFO" if settings.level == "debug" else "CRITICAL")
    structlog.configure(
        processors=[*_common_processors(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


@contextmanager
def channel_logs(channel: str) -> Iterator[None]:
    """While open, every line that this task or thread logs, in any module, has the channel."""
    with structlog.contextvars.bound_contextvars(channel=channel):
        yield


def _common_processors() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers(console: bool, stream: TextIO) -> list[Processor]:
    # The traceback is formatted before URLs are redacted, because it quotes them.
    redacting: list[Processor] = [structlog.processors.format_exc_info, _redact]
    if console:
        plain = structlog.dev.plain_traceback
        return [*redacting, structlog.dev.ConsoleRenderer(colors=_has_colours(stream), exception_formatter=plain)]
    return [*redacting, structlog.processors.JSONRenderer(default=str)]


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event.pop("color_message", None)  # uvicorn's copy of the event
    if event.pop(UNREDACTED, False):
        return event
    for key, value in event.items():
        if isinstance(value, str) and "://" in value:
            event[key] = redact_text(value)
    return event
