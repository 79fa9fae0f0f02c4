"""Wall-clock times as text: RFC 3339 in UTC, as every file, API answer and log line of Copywatch writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal


def rfc3339(moment: datetime, timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """An aware time in UTC, such as 2026-11-16T20:00:00Z."""
    return moment.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
