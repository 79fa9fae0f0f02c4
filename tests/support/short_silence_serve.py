"""`copywatch` whose channels wait less for their sources: python -m tests.support.short_silence_serve ARGUMENTS..."""

from __future__ import annotations

import sys
from functools import partial

from monitor import cli
from monitor.ingest import live_source
from monitor.ingest.live_source import LiveTimeouts

if __name__ == "__main__":
    short = partial(LiveTimeouts, opening_s=60, no_progress_s=4, segments_s=6, silence_s=5, last_retry_s=2)
    live_source.LiveTimeouts = short  # type: ignore[misc, assignment]
    cli.main(sys.argv[1:])
