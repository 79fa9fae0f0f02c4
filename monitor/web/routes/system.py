"""`/system`: version, library, channels, backlog, problems and disk use of this monitor."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from fastapi import APIRouter
from pydantic import BaseModel, Field

from monitor import __version__
from monitor.ops.timestamps import rfc3339
from monitor.web.context import Context
from monitor.web.requests.problems import ERROR_RESPONSES
from reference_db.search.index_shards import FlatShard

router = APIRouter(tags=["system"], responses=ERROR_RESPONSES)


class IndexOut(BaseModel):
    """The index that is searched."""

    kind: str = Field(description="`exact`, or `coded` for a large library.")
    generation: int
    seconds: int
    refreshed_at: str | None = Field(description="When the index was last known to be up to date.")


class EvidenceOut(BaseModel):
    """Disk use of evidence."""

    bytes: int
    quota_bytes: int


class FiguresOut(BaseModel):
    """Two figures of the metrics."""

    detection_latency_p95_s: float | None = Field(description="Upper bound by the histogram; null before any alert.")
    dropped_total: int


class SystemOut(BaseModel):
    """The state of this monitor."""

    version: str
    model: str
    encoder_id: str
    started_at: str
    references: int
    reference_seconds: int
    index: IndexOut
    channels: dict[str, int]
    backlog: dict[str, int] = Field(description="Alert events not yet delivered, by sink.")
    problems: dict[str, str]
    evidence: EvidenceOut
    metrics: FiguresOut
    time_zone: str
    min_confidence: float = Field(description="Confidence from which on this monitor emits alerts.")


@router.get("/api/v1/system")
def system(context: Context) -> SystemOut:
    """The state of this monitor."""
    index = context.library.index
    process, channels = context.metrics.process, context.metrics.channels.reports()
    refreshed_at = datetime.now(UTC) - timedelta(seconds=process.index_stale_s)
    return SystemOut(
        version=__version__,
        model=context.model,
        encoder_id=context.encoder_id,
        started_at=rfc3339(context.started_at),
        references=len(index.references),
        reference_seconds=sum(reference.n_seconds for reference in index.references),
        index=IndexOut(
            kind="exact" if all(isinstance(shard, FlatShard) for shard in index.shards) else "coded",
            generation=index.generation,
            seconds=len(index),
            refreshed_at=rfc3339(refreshed_at),
        ),
        channels=context.channel_views.counts(),
        backlog=dict(process.backlog),
        problems=context.health.problems,
        evidence=EvidenceOut(
            bytes=process.evidence_bytes,
            quota_bytes=context.settings.evidence.quota_bytes,
        ),
        metrics=FiguresOut(
            detection_latency_p95_s=process.detection_latency.bound_s(0.95),
            dropped_total=sum(report.n_dropped for report in channels),
        ),
        time_zone=datetime.now().astimezone().tzname() or "UTC",
        min_confidence=context.settings.alerting.min_confidence,
    )
