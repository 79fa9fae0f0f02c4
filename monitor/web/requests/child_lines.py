"""A child process that works on one request beside the monitoring: JSON on its stdin, lines of JSON from its stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from monitor.config.settings import Settings


def match_settings(settings: Settings) -> dict[str, Any]:
    """The settings by which a child measures how well a reference is found."""
    return {
        "matching": settings.matching.model_dump(),
        "alerting": settings.alerting.model_dump(include={"min_confidence"}),
    }


async def run_child(module: str, request: Mapping[str, Any], on_line: Callable[[dict[str, Any]], None]) -> None:
    """Runs this module as a process of its own and calls `on_line` for each line; returns when it has ended.

    However it ends, what it has sent counts, and the caller judges what is missing. It dies with this call.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        process_group=0,  # Ctrl-C goes to us; we stop the child ourselves
    )
    assert child.stdin
    assert child.stdout
    try:
        child.stdin.write(json.dumps({**request, "parent": os.getpid()}).encode())
        child.stdin.close()
        async for line in child.stdout:
            on_line(json.loads(line))
        await child.wait()
    except (BrokenPipeError, ConnectionResetError, ValueError):
        pass  # the child died at once, or in the middle of a line
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()  # returns at once after the kill; no zombie is left
