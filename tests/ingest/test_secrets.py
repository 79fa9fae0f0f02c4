"""One secret in every form of URL, opened by real sources: it is written nowhere."""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from monitor.config.settings import ChannelSettings, LoggingSettings
from monitor.ingest.live_source import LiveSource
from monitor.ops.logs import configure_logging
from monitor.ops.metrics import Metrics
from tests.support.running_source import SHORT_TIMEOUTS, WAIT_S, RunningSource
from tests.support.secret_addresses import FORMS, SECRET, filled

pytestmark = pytest.mark.slow  # retries of a live source

HOSTS = r"(?<=[/@\\])(10\.0\.0\.5|cam|cdn|host|a\.rtmp\.example\.com|239\.0\.0\.1|\[fe80::1\])(?=[:/?]|$)"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, stream = list(root.handlers), root.level, io.StringIO()
    configure_logging(LoggingSettings(level="debug", format="json"), stream)
    yield stream
    root.handlers, root.level = handlers, level


def test_the_secret_is_in_no_log_metric_error_or_process_list(log: io.StringIO) -> None:
    metrics = Metrics(CollectorRegistry())
    running, refusals = [], []
    for n, form in enumerate(FORMS):
        url = re.sub(HOSTS, "127.0.0.1", filled(form))
        try:
            settings = ChannelSettings.model_validate({"name": f"form-{n}", "url": url})
        except ValidationError as error:
            refusals.append(str(error))
            continue
        running.append(
            RunningSource(LiveSource(settings, metrics, timeouts=replace(SHORT_TIMEOUTS, opening_s=15)), metrics)
        )
    assert len(running) >= 30
    processes = ""
    try:
        deadline = time.monotonic() + 2 * WAIT_S
        while any(one.source.state == "starting" for one in running) and time.monotonic() < deadline:
            processes += process_list()
            time.sleep(0.2)  # polls the process list
        states = {one.source.channel: one.source.state for one in running}
        assert set(states.values()) <= {"failed", "stalled", "denied"}, states
    finally:
        for one in running:
            one.close()
    assert "reference_db.media.decoder" in processes
    assert "reconnecting" in log.getvalue()
    for text in (processes, log.getvalue(), generate_latest(metrics.registry).decode(), *refusals, repr(running)):
        assert SECRET not in text


def process_list() -> str:
    """What other users of this machine can read about our processes."""
    found = ""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "reference_db.media.decoder" in line:
                found += line + (place / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
    return found
