"""What orchestrators and Prometheus ask of any role, without a token: /livez, /readyz and /metrics.

`/livez` is 503 only where a restart would mend it: the event loop or a vital worker hangs. `/readyz` is 503 with the
reasons while matching or telling is not to be relied on; `?verbose` lists every check. One dead channel is no reason.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from monitor.ops.health import Health


def probes(registry: CollectorRegistry, health: Health) -> APIRouter:
    """The three routes; `health` is asked on the event loop and does not block."""
    router = APIRouter(include_in_schema=False)

    @router.get("/livez")
    async def livez() -> PlainTextResponse:
        hangs = health.hangs
        return PlainTextResponse("ok\n" if hangs is None else f"{hangs}\n", status_code=200 if hangs is None else 503)

    @router.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        problems = health.complaints
        reply: dict[str, object] = {"status": "not ready" if problems else "ready"}
        if problems:
            reply["problems"] = problems
        if "verbose" in request.query_params:
            reply["checks"] = {name: complaint or "ok" for name, complaint in health.checks.items()}
        return JSONResponse(reply, status_code=503 if problems else 200)

    @router.get("/metrics")
    def metrics(request: Request) -> Response:  # a plain def: rendering runs in a thread, not on the loop
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return router


def create_probes(registry: CollectorRegistry, health: Health) -> FastAPI:
    """An application of nothing else, for an address of its own."""
    app = FastAPI(title="Copywatch", openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(probes(registry, health))
    return app
