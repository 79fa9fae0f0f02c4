"""`/system`: what runs here and how it fares, on one page; `/session` and `/tokens`: who may use it."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import FastAPI, Request, Response
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample
from pydantic import BaseModel, Field

from monitor import __version__
from monitor.ops.metrics import Metrics
from monitor.ops.timestamps import rfc3339
from monitor.web.auth.gatekeeper import COOKIE, LOCAL, SCOPES_OF, Caller, Gatekeeper
from monitor.web.auth.tokens import Tokens
from monitor.web.channel_board import ChannelBoard
from monitor.web.context import AppContext
from monitor.web.requests.paging import Cursor, Limit, Page, page_of
from monitor.web.requests.problems import MAY_FAIL, Problem
from reference_db.search.index_shards import FlatShard


class IndexOut(BaseModel):
    """What is searched."""

    kind: str = Field(description="`exact`, or `coded` for a large library.")
    generation: int
    seconds: int
    refreshed_at: str | None = Field(description="When a generation was last found to be up to date.")


class EvidenceOut(BaseModel):
    """What evidence uses of the disk."""

    bytes: int
    quota_bytes: int


class FiguresOut(BaseModel):
    """Two figures of the metrics."""

    detection_latency_p95_s: float | None = Field(description="Upper bound by the histogram; null before any alert.")
    dropped_total: int


class SystemOut(BaseModel):
    """All of it."""

    version: str
    model: str
    encoder_id: str
    started_at: str
    references: int
    reference_seconds: int
    index: IndexOut
    channels: dict[str, int]
    backlog: dict[str, int] = Field(description="Alert events that each sink has not taken.")
    problems: dict[str, str]
    evidence: EvidenceOut
    metrics: FiguresOut
    time_zone: str


class SessionOut(BaseModel):
    """Who asks."""

    name: str
    scopes: list[str]


class SessionIn(BaseModel):
    """A token to log in with."""

    token: str = Field(min_length=1, max_length=200)


class TokenOut(BaseModel):
    """A token, without the token."""

    name: str
    scope: str
    created_at: str


def add_system(api: FastAPI, station: AppContext, board: ChannelBoard) -> None:
    @api.get("/api/v1/system", responses=MAY_FAIL, tags=["system"])
    def system() -> SystemOut:
        """What runs here and how it fares."""
        index = station.library.index
        owed = {one.labels["sink"]: int(one.value) for one in _samples(station.metrics.outbox_owed)}
        stale_s = next((one.value for one in _samples(station.metrics.index_stale)), None)
        refreshed = None if stale_s is None else datetime.fromtimestamp(datetime.now(UTC).timestamp() - stale_s, UTC)
        return SystemOut(
            version=__version__,
            model=station.model,
            encoder_id=station.encoder_id,
            started_at=rfc3339(station.started_at),
            references=len(index.references),
            reference_seconds=sum(reference.n_seconds for reference in index.references),
            index=IndexOut(
                kind="exact" if all(isinstance(part, FlatShard) for part in index.parts) else "coded",
                generation=index.generation,
                seconds=len(index),
                refreshed_at=None if refreshed is None else rfc3339(refreshed),
            ),
            channels=board.counts(),
            backlog=owed,
            problems=station.health.complaints,
            evidence=EvidenceOut(
                bytes=int(sum(one.value for one in _samples(station.metrics.evidence_bytes))),
                quota_bytes=station.settings.evidence.quota_bytes,
            ),
            metrics=FiguresOut(
                detection_latency_p95_s=latency_p95_s(station.metrics),
                dropped_total=int(sum(one.value for one in _samples(station.metrics.frames_dropped))),
            ),
            time_zone=datetime.now().astimezone().tzname() or "UTC",
        )


def add_session(api: FastAPI, gatekeeper: Gatekeeper, tokens: Tokens) -> None:
    @api.get("/api/v1/session", responses=MAY_FAIL, tags=["session"])
    async def session(request: Request) -> SessionOut:
        """What the caller may do."""
        return _session(request.state.caller)

    @api.post("/api/v1/session", responses=MAY_FAIL, tags=["session"])
    async def log_in(asked: SessionIn, request: Request, response: Response) -> SessionOut:
        """Keeps the token in a cookie that scripts cannot read and other sites cannot use."""
        if not tokens.any():
            return _session(LOCAL)
        caller = gatekeeper.caller_of(asked.token, request.client.host if request.client else "")
        response.set_cookie(
            COOKIE, asked.token, httponly=True, samesite="strict", secure=request.url.scheme == "https", path="/"
        )
        return _session(caller)

    @api.delete("/api/v1/session", status_code=204, responses=MAY_FAIL, tags=["session"])
    async def log_out(response: Response) -> None:
        """Forgets the cookie."""
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")

    @api.get("/api/v1/tokens", responses=MAY_FAIL, tags=["session"])
    def list_tokens(limit: Limit = 50, cursor: Cursor = None) -> Page[TokenOut]:
        """Who has a token; the tokens themselves are known to nobody here."""
        found = sorted(tokens.all(), key=lambda one: one.name)
        part, following = page_of(found, limit, cursor, lambda one: one.name)
        items = [TokenOut(name=one.name, scope=one.scope, created_at=one.created_at) for one in part]
        return Page(items=items, next=following)


def latency_p95_s(metrics: Metrics) -> float | None:
    """The bound under which 95 % of the alerts came."""
    counts = {one.labels["le"]: one.value for one in _samples(metrics.detection_latency) if "le" in one.labels}
    n = counts.get("+Inf", 0.0)
    if not n:
        return None
    bounds = sorted((float(bound), count) for bound, count in counts.items() if bound != "+Inf")
    return next((bound for bound, count in bounds if count >= 0.95 * n), bounds[-1][0])


def _session(caller: Caller | None) -> SessionOut:
    if caller is None:
        raise Problem(401, "A token is needed.", {"WWW-Authenticate": "Bearer"})
    return SessionOut(name=caller.name, scopes=list(SCOPES_OF[caller.scope]))


def _samples(family: MetricWrapperBase) -> list[Sample]:
    return [one for metric in family.collect() for one in metric.samples if not one.name.endswith("_created")]
