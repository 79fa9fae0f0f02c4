"""The HTTP face: metrics and the two probes. Loopback only; there is nothing here to log in to yet.

`/livez` answers while the event loop turns, whatever else is broken. `/readyz` is 503 while the readiness it was
given names problems. One dead channel is no such problem: restarting the process would not mend it.
"""

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Readiness = Callable[[], dict[str, str]]  # what is not ready -> why; empty when all is well


def create_app(registry: CollectorRegistry, readiness: Readiness) -> FastAPI:
    """The application; `readiness` is called on the event loop for each probe and must not block."""
    app = FastAPI(title="Copywatch", openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/livez")
    async def livez() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        problems = readiness()
        if problems:
            return JSONResponse({"status": "not ready", "problems": problems}, status_code=503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    def metrics(request: Request) -> Response:  # a plain def: rendering runs in a thread, not on the loop
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return app
