"""`copywatch` as a process of its own, without the settings of the test's environment and the user's data folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_DATA_HOME = tempfile.TemporaryDirectory(prefix="copywatch-")  # of commands without a data folder


def copywatch(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
    environment["XDG_DATA_HOME"] = _DATA_HOME.name
    command = [sys.executable, "-m", "monitor.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, cwd=cwd)
