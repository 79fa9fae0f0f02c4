"""Logs: every module's `logging` in, one line per event on stderr out.

JSON lines where nobody watches, a console format on a terminal. Each line has timestamp (UTC), level, event and
logger; `channel` where one is bound. Addresses are redacted in every field, tracebacks too.
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


def configure_logging(settings: LoggingSettings, stream: TextIO | None = None) -> None:
    """Sends what any module logs to the stream (stderr when left out); replaces an earlier set-up."""
    stream = stream if stream is not None else sys.stderr
    console = settings.format == "console" or (settings.format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_shared(),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(console, stream)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    # A line for each scrape and probe would drown the rest.
    logging.getLogger("uvicorn.access").setLevel("DEBUG" if settings.level == "debug" else "WARNING")
    # What its clients say of a broker that is away, several times a second, is said once by ours; their debugging
    # lines hold whole records.
    logging.getLogger("aiokafka").setLevel("INFO" if settings.level == "debug" else "CRITICAL")
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


@contextmanager
def channel_logs(channel: str) -> Iterator[None]:
    """While open, every line logged by this task or thread, whichever module writes it, names the channel."""
    with structlog.contextvars.bound_contextvars(channel=channel):
        yield


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _rendering(console: bool, stream: TextIO) -> list[Processor]:
    # The traceback becomes text before addresses are taken out, for it quotes them.
    redacting: list[Processor] = [structlog.processors.format_exc_info, _redacted]
    if console:
        plain = structlog.dev.plain_traceback
        return [*redacting, structlog.dev.ConsoleRenderer(colors=_coloured(stream), exception_formatter=plain)]
    return [*redacting, structlog.processors.JSONRenderer(default=str)]


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _redacted(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event.pop("color_message", None)  # uvicorn says everything twice
    for key, value in event.items():
        if isinstance(value, str) and "://" in value:
            event[key] = redact_text(value)
    return event
