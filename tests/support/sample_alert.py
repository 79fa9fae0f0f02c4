"""An alert, for tests of those who tell it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monitor.alerting.alerts import STARTED, Alert
from reference_db.store.references import ReferenceId


def alert(n: int = 0, **more: Any) -> Alert:
    told = Alert(
        id=f"{n:024x}",
        type=STARTED,
        seq=1,
        channel="ch5",
        reference=ReferenceId("film"),
        title="<b>The Film</b>",
        owner="ACME",
        channel_start=61.0,
        channel_end=83.0,
        started_at="2026-11-16T08:00:12Z",
        ended_at=None,
        detected_at=68.0,
        reference_start=10.0,
        reference_end=32.0,
        speed=1.0,
        score=0.94,
        matched_seconds=22,
        coverage_channel=0.97,
        coverage_reference=0.24,
        gaps=(),
        licence=None,
        model="test",
        evidence=None,
    )
    return replace(told, **more)
