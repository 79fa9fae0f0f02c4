"""`copywatch` that calls a worker stuck after 3 s: python -m tests.support.short_timeout_serve ARGUMENTS..."""

from __future__ import annotations

import sys

from monitor import cli
from monitor.ops import health

if __name__ == "__main__":
    health.STUCK_S = 3.0
    cli.main(sys.argv[1:])
