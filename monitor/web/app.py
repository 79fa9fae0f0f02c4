"""The web application: probes and metrics, the REST API under /api/v1, and the dashboard.

Each resource of the API has a file in routes/; auth/gatekeeper.py lists the scope that each route requires.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI

from monitor import __version__
from monitor.runtime.retention import run_retention
from monitor.web.audit_trail import ChangeRecorder, RefusalRecorder
from monitor.web.auth.gatekeeper import SCOPES
from monitor.web.channel_outages import OutageReporter
from monitor.web.context import AppContext
from monitor.web.middleware import SecurityMiddleware
from monitor.web.probes import probes
from monitor.web.requests.idempotency import PARAMETER, Idempotency, Replies
from monitor.web.requests.problems import EXCEPTION_HANDLERS, ProblemOut
from monitor.web.routes import (
    alerts,
    audit,
    channels,
    dashboard,
    events,
    evidence,
    jobs,
    licences,
    references,
    session,
    system,
    uploads,
    webhooks,
)

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # after an unexpected failure
API_ROUTERS: tuple[APIRouter, ...] = (
    system.router,
    session.router,
    audit.router,
    channels.router,
    references.router,
    uploads.router,
    jobs.router,
    alerts.router,
    evidence.router,
    licences.router,
    webhooks.router,
    events.router,
)


class Api(FastAPI):
    """The application; its OpenAPI document also describes problems and tokens."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            parts = super().openapi()["components"]
            parts["schemas"]["ProblemOut"] = ProblemOut.model_json_schema()
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            assert self.openapi_schema is not None
            self.openapi_schema["security"] = [{"token": []}]
            for path, methods in self.openapi_schema["paths"].items():
                if "post" in methods and SCOPES["POST", path] is not None:
                    methods["post"].setdefault("parameters", []).append(PARAMETER)
        return self.openapi_schema


class WebApp:
    """The application and its background tasks: `run` works until cancelled."""

    def __init__(self, context: AppContext) -> None:
        self.context = context
        self.outages = OutageReporter(context.channel_views, context.webhooks, context.settings.webhooks.channel_down_s)
        self.app = Api(
            title="Copywatch",
            version=__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # a redirect would name whatever host the client sent
            exception_handlers=EXCEPTION_HANDLERS,
        )
        self.app.state.context = context
        self.app.include_router(probes(context.metrics, context.health, context.check_reader))
        for router in (*API_ROUTERS, dashboard.router):
            self.app.include_router(router)
        # The first one is the innermost.
        self.app.add_middleware(ChangeRecorder, log=context.request_log)
        self.app.add_middleware(Idempotency, replies=Replies(context.settings.data_dir))
        self.app.add_middleware(SecurityMiddleware, routers=API_ROUTERS, gatekeeper=context.gatekeeper)
        self.app.add_middleware(RefusalRecorder, log=context.request_log)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_run_forever("publishing events", self.context.feed.run))
            tasks.create_task(_run_forever("registering uploads", self.context.registrar.run))
            tasks.create_task(_run_forever("reporting on references", self.context.quality_reports.run))
            tasks.create_task(_run_forever("delivering to webhooks", self.context.webhook_sender.run))
            tasks.create_task(_run_forever("storing sessions", self.context.gatekeeper.run))
            tasks.create_task(_run_forever("watching for outages", self.outages.run))
            tasks.create_task(_run_forever("deleting what has expired", partial(run_retention, self.context.settings)))
            tasks.create_task(_run_forever("recording refused requests", self.context.request_log.run))


async def _run_forever(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Runs the work and restarts it after any failure: a failure here must not end the monitoring."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("%s failed; restarting in %.0f s", what, RETRY_S)
        await asyncio.sleep(RETRY_S)
