"""Alerts for tests of what stores, sends or shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monitor.alerting.alerts import ENDED, STARTED, UPDATED, Alert, Gap
from reference_db.store.references import ReferenceId


def sample_alert(n: int = 0, **fields: Any) -> Alert:
    """The `n`th alert, just started, with these fields changed."""
    alert = Alert(
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
        confidence=0.97,
        score=0.94,
        matched_seconds=22,
        coverage_channel=0.97,
        coverage_reference=0.24,
        gaps=(),
        licence=None,
        model="test",
        evidence=None,
    )
    return replace(alert, **fields)


def sample_events(alert_id: str, channel: str = "ch5", reference: str = "film") -> list[Alert]:
    """All events of one alert: started, updated, ended."""
    started = sample_alert(
        id=alert_id,
        channel=channel,
        reference=ReferenceId(reference),
        title="Ä film",
        owner="Studio",
        channel_start=12.0,
        channel_end=40.0,
        reference_start=3.5,
        reference_end=31.5,
        score=0.9,
        gaps=(Gap(20.0, 1.0, "reconnect"),),
    )
    updated = replace(started, type=UPDATED, seq=2)
    return [started, updated, replace(started, type=ENDED, seq=3, ended_at="2026-11-16T08:00:40Z")]
