"""The endpoints that every role serves, by default without a token: /livez, /readyz, /channelz and /metrics.

`/livez` is 503 only where a restart would help: the event loop or a vital worker hangs. `/readyz` is 503 with the
reasons while matching or alerting cannot be relied on; `?verbose` lists every check. A channel that is down is no
reason. `/channelz` has the state of each channel, for `copywatch channels list`. With `web.metrics_token` those that
name channels or describe the process need a token: /metrics, /channelz and `?verbose`.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import choose_encoder

from monitor.ops.health import Health
from monitor.ops.metrics import Metrics
from monitor.ops.timestamps import rfc3339
from monitor.web.requests.problems import EXCEPTION_HANDLERS

CheckReader = Callable[[Request], None]


def probes(metrics: Metrics, health: Health, check_reader: CheckReader | None = None) -> APIRouter:
    """The four routes. `health` and the channel statuses are read on the event loop; that does not block.

    `check_reader` raises Problem for a request that may not read metrics; None lets everyone.
    """
    router = APIRouter(include_in_schema=False)

    async def check(request: Request) -> None:
        if check_reader is not None:
            check_reader(request)

    readers = [Depends(check)]

    @router.get("/livez")
    async def livez() -> PlainTextResponse:
        hangs = health.stuck_worker
        return PlainTextResponse("ok\n" if hangs is None else f"{hangs}\n", status_code=200 if hangs is None else 503)

    @router.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        problems = health.problems
        reply: dict[str, object] = {"status": "not ready" if problems else "ready"}
        if problems:
            reply["problems"] = problems
        if "verbose" in request.query_params:
            await check(request)
            reply["checks"] = {name: complaint or "ok" for name, complaint in health.checks.items()}
        return JSONResponse(reply, status_code=503 if problems else 200)

    @router.get("/channelz", dependencies=readers)
    async def channelz() -> JSONResponse:
        channels = {
            report.channel: {"state": report.state, "reason": report.reason, "since": rfc3339(report.since)}
            for report in metrics.channels.reports()
        }
        return JSONResponse({"channels": channels})

    @router.get("/metrics", dependencies=readers)
    def scrape(request: Request) -> Response:  # a plain def: rendering runs in a thread, not on the loop
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), media_type=content_type)

    return router


def create_probes(metrics: Metrics, health: Health, check_reader: CheckReader | None = None) -> FastAPI:
    """An application with these routes only, for a port of its own."""
    app = FastAPI(
        title="Copywatch",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.include_router(probes(metrics, health, check_reader))
    return app
