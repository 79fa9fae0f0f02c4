"""The API of a running monitor, called in thousands of ways that nobody would think of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import recorded_channel
from tests.support.schema_calls import call_everything, what_is_there
from tests.support.web_server import Serving, furnish


def run(folder: Path, calls_each: int, seed: int) -> dict[str, Any]:
    """Calls every operation so often in each way; a wrong answer, a dead server or an unready one is wrong."""
    serving = Serving(furnish(recorded_channel.build(folder / "studio"), folder / "web"))
    try:
        serving.wait_for("the stream ended")
        client = serving.client()
        done = call_everything(serving.address, what_is_there(client), calls_each, seed)
        ready = client("GET", "/readyz")
        wrong = done.wrong + ([] if ready.status == 200 else [f"unready: {ready.body!r}"])
        if serving.stop() != 0:
            wrong.append("it did not end as it should")
    finally:
        serving.kill()
    return {
        "operations": len(done.operations),
        "calls": done.n_calls,
        "fewest": min(done.operations.values()),
        "statuses": {str(status): n for status, n in sorted(done.statuses.items())},
        "wrong": len(wrong),
        "what": wrong[:20],
    }
