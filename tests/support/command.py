"""`copywatch` as a process of its own, without the settings of the test's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def copywatch(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
    command = [sys.executable, "-m", "monitor.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, cwd=cwd)
