"""Thousands of generated calls to the API of a running monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import recorded_channel
from tests.support.schema_calls import call_everything, existing_resources
from tests.support.web_server import MonitorServer, write_config


def run(folder: Path, calls_each: int, seed: int) -> dict[str, Any]:
    """Calls every operation `calls_each` times in each way; an invalid response or a dead server is a failure."""
    serving = MonitorServer(write_config(recorded_channel.record_channel(folder / "recorded"), folder / "web"))
    try:
        serving.wait_for("the stream ended")
        client = serving.client()
        done = call_everything(client, existing_resources(client), calls_each, seed)
        ready = client("GET", "/readyz")
        failures = done.failures + ([] if ready.status == 200 else [f"unready: {ready.body!r}"])
        if serving.stop() != 0:
            failures.append("serve did not exit with 0")
    finally:
        serving.kill()
    return {
        "operations": len(done.operations),
        "calls": done.n_calls,
        "fewest": min(done.operations.values()),
        "statuses": {str(status): n for status, n in sorted(done.statuses.items())},
        "failures": len(failures),
        "examples": failures[:20],
    }
