"""`/system`: version, library, channels, backlog, problems and disk use of this monitor."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample
from pydantic import BaseModel, Field

from monitor import __version__
from monitor.ops.metrics import Metrics
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


@router.get("/api/v1/system")
def system(context: Context) -> SystemOut:
    """The state of this monitor."""
    index = context.library.index
    owed = {one.labels["sink"]: int(one.value) for one in _samples(context.metrics.outbox_owed)}
    stale_s = next((one.value for one in _samples(context.metrics.index_stale)), None)
    refreshed = None if stale_s is None else datetime.fromtimestamp(datetime.now(UTC).timestamp() - stale_s, UTC)
    return SystemOut(
        version=__version__,
        model=context.model,
        encoder_id=context.encoder_id,
        started_at=rfc3339(context.started_at),
        references=len(index.references),
        reference_seconds=sum(reference.n_seconds for reference in index.references),
        index=IndexOut(
            kind="exact" if all(isinstance(part, FlatShard) for part in index.parts) else "coded",
            generation=index.generation,
            seconds=len(index),
            refreshed_at=None if refreshed is None else rfc3339(refreshed),
        ),
        channels=context.board.counts(),
        backlog=owed,
        problems=context.health.complaints,
        evidence=EvidenceOut(
            bytes=int(sum(one.value for one in _samples(context.metrics.evidence_bytes))),
            quota_bytes=context.settings.evidence.quota_bytes,
        ),
        metrics=FiguresOut(
            detection_latency_p95_s=latency_p95_s(context.metrics),
            dropped_total=int(sum(one.value for one in _samples(context.metrics.frames_dropped))),
        ),
        time_zone=datetime.now().astimezone().tzname() or "UTC",
    )


def latency_p95_s(metrics: Metrics) -> float | None:
    """The upper bound of the latency of 95 % of the alerts."""
    counts = {one.labels["le"]: one.value for one in _samples(metrics.detection_latency) if "le" in one.labels}
    n = counts.get("+Inf", 0.0)
    if not n:
        return None
    bounds = sorted((float(bound), count) for bound, count in counts.items() if bound != "+Inf")
    return next((bound for bound, count in bounds if count >= 0.95 * n), bounds[-1][0])


def _samples(family: MetricWrapperBase) -> list[Sample]:
    return [one for metric in family.collect() for one in metric.samples if not one.name.endswith("_created")]
