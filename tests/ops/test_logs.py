"""Logs: one JSON object per line unless a terminal reads them, and no credential in any of them."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import pytest
import structlog

from monitor.config.settings import LoggingSettings
from monitor.ops.logs import channel_logs, configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def logged(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_time_level_event_logger_and_channel() -> None:
    stream = io.StringIO()
    configure_logging(LoggingSettings(), stream)
    with channel_logs("five"):
        logging.getLogger("monitor.ingest.live_source").warning("stalled after %d s", 12, extra={"attempt": 3})
    logging.getLogger("monitor.roles.serve").info("up")
    first, second = logged(stream)
    age = datetime.now(UTC) - datetime.fromisoformat(first.pop("timestamp"))
    assert 0 <= age.total_seconds() < 60
    assert first == {
        "level": "warning",
        "event": "stalled after 12 s",
        "logger": "monitor.ingest.live_source",
        "channel": "five",
        "attempt": 3,
    }
    assert "channel" not in second


def test_structlog_and_logging_write_the_same_lines() -> None:
    stream = io.StringIO()
    configure_logging(LoggingSettings(), stream)
    structlog.get_logger("monitor.x").info("hello", channel="five")
    logging.getLogger("monitor.x").info("hello", extra={"channel": "five"})
    ours, theirs = logged(stream)
    assert ours.keys() == theirs.keys()
    assert ours["event"] == theirs["event"] == "hello"


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure_logging(LoggingSettings(level="warning"), stream)
    logging.getLogger("monitor.x").info("quiet")
    logging.getLogger("monitor.x").error("loud")
    assert [line["event"] for line in logged(stream)] == ["loud"]


def test_the_web_server_logs_each_event_once_and_no_requests() -> None:
    stream = io.StringIO()
    configure_logging(LoggingSettings(), stream)
    logging.getLogger("uvicorn.access").info('127.0.0.1:9 - "GET /metrics HTTP/1.1" 200')
    logging.getLogger("uvicorn.error").info("Started", extra={"color_message": "\x1b[36mStarted"})
    (line,) = logged(stream)
    assert (line["event"], "color_message" in line) == ("Started", False)


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_credential_is_logged_even_in_a_traceback(form: Literal["json", "console"]) -> None:
    stream = io.StringIO()
    configure_logging(LoggingSettings(format=form), stream)
    try:
        raise OSError("cannot open rtsp://admin:hunter2@cam/1")
    except OSError:
        logging.getLogger("monitor.x").exception(
            "lost %s", "http://h/a?token=hunter2", extra={"url": "http://u:hunter2@h"}
        )
    assert "cannot open rtsp://***@cam/1" in stream.getvalue()
    assert "lost http://h/a?token=***" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_a_terminal_gets_plain_lines_with_colour_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    configure_logging(LoggingSettings(), coloured)
    logging.getLogger("monitor.x").info("hello")
    monkeypatch.setenv("NO_COLOR", "1")
    configure_logging(LoggingSettings(), plain)
    logging.getLogger("monitor.x").info("hello")
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert not plain.getvalue().startswith("{")
    assert "hello" in plain.getvalue()
