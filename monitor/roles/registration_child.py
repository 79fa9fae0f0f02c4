"""Registers one video in a child process: one request on stdin, lines of JSON on stdout, then exit.

It runs at a low priority, so that it does not delay the watched channels, under a memory limit of its own, and dies
with its parent. `Registrar` in web/requests/jobs.py starts it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monitor.config.settings import Settings
from monitor.ops.memory_cap import capped_memory, registration_bytes
from monitor.runtime.findability_meter import FindabilityMeter
from reference_db.errors import CatalogError, CatalogLocked
from reference_db.library import ReferenceLibrary
from reference_db.media.child_process import receive_request
from reference_db.registration import Registration

LOW_PRIORITY = 10  # a nice value


def main() -> None:
    """Handles one request."""
    request, lines = receive_request()
    os.nice(LOW_PRIORITY)

    def send(**values: Any) -> None:
        lines.write(json.dumps(values).encode() + b"\n")
        lines.flush()

    encoder = Path(request["encoder"]) if request["encoder"] else None
    meter = FindabilityMeter(Settings(**request["settings"]))
    library = ReferenceLibrary(Path(request["data_dir"]), encoder, threads=request["threads"], findability=meter)
    try:
        with capped_memory(registration_bytes(request["memory_bytes"], library.n_seconds())):
            if request["kind"] == "import":
                done = library.import_(Path(request["path"]), id=request["id"])
            else:
                done = _register(library, request, lambda done_s, total_s: send(done_s=done_s, total_s=total_s))
    except CatalogLocked:
        send(locked=True)
        return
    except CatalogError as error:
        send(error=str(error), kind=type(error).__name__)
        return
    warnings = list(done.report.warnings) if done.report is not None else []
    send(result={"reference": done.reference.id, "outcome": done.outcome, "warnings": warnings})


def _register(
    library: ReferenceLibrary, request: dict[str, Any], progress: Callable[[int, int | None], None]
) -> Registration:
    (added,) = library.add(
        [Path(request["path"])],
        id=request["id"],
        title=request["title"],
        owner=request["owner"],
        tags=request["tags"],
        thumbnails=request["thumbnails"],
        progress=progress,
    )
    if added.error is not None:
        raise added.error
    assert added.registration is not None
    return added.registration


if __name__ == "__main__":
    main()
