"""Reports the quality of some references in a child process: one request on stdin, a line of JSON for each report.

Searching for overlaps needs an index of the whole library and reads whole references, so it is kept out of the
monitoring process. It runs at a low priority and under a memory limit; `QualityReports` in web/quality_reports.py
starts it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from monitor.config.settings import Settings
from monitor.ops.memory_cap import capped_memory, registration_bytes
from monitor.runtime.findability_meter import FindabilityMeter
from reference_db.library import ReferenceLibrary
from reference_db.media.child_process import receive_request

LOW_PRIORITY = 10  # a nice value


def main() -> None:
    """Answers one request."""
    request, lines = receive_request()
    os.nice(LOW_PRIORITY)
    meter = FindabilityMeter(Settings(**request["settings"]))
    library = ReferenceLibrary(Path(request["data_dir"]), findability=meter)
    with capped_memory(registration_bytes(request["memory_bytes"], library.n_seconds())):
        for id, report in library.reports(request["ids"]):
            lines.write(json.dumps({"id": id, "report": None if report is None else asdict(report)}).encode() + b"\n")
            lines.flush()


if __name__ == "__main__":
    main()
