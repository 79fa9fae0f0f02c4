"""`copywatch` whose patience with its own workers is short: python -m tests.support.impatient_serve ARGUMENTS..."""

from __future__ import annotations

import sys

from monitor import cli
from monitor.ops import health

if __name__ == "__main__":
    health.PATIENCE_S = 3.0
    cli.main(sys.argv[1:])
