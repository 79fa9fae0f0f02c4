"""The HTTP face: probes and metrics for machines, the REST API under /api/v1 for people and their programs.

Each resource of the API has a file of its own beside this one; who may use which route is in auth.py.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI

from monitor import __version__
from monitor.alerting.webhook_delivery import WebhookSender
from monitor.alerting.webhooks import WebhookStore
from monitor.web.auth.gatekeeper import SCOPES, Gatekeeper
from monitor.web.auth.tokens import Tokens
from monitor.web.channel_board import ChannelBoard
from monitor.web.channel_outages import Outages
from monitor.web.context import AppContext
from monitor.web.dashboard import add_dashboard
from monitor.web.middleware import SecurityMiddleware
from monitor.web.probes import probes
from monitor.web.requests.idempotency import PARAMETER, Idempotency, Replies
from monitor.web.requests.jobs import Jobs, Registrar
from monitor.web.requests.problems import ProblemOut, tell_problems
from monitor.web.routes.alerts import add_alerts
from monitor.web.routes.channels import add_channels
from monitor.web.routes.events import Events, add_events
from monitor.web.routes.evidence import add_evidence
from monitor.web.routes.licences import add_licences
from monitor.web.routes.references import add_references
from monitor.web.routes.system import add_session, add_system
from monitor.web.routes.uploads import add_jobs, add_uploads
from monitor.web.routes.webhooks import add_webhooks

logger = logging.getLogger(__name__)

AGAIN_S = 5.0  # after a failure that nobody foresaw


class Api(FastAPI):
    """The application; its document also says what an error looks like and how a token is shown."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            parts = super().openapi()["components"]
            parts["schemas"]["ProblemOut"] = ProblemOut.model_json_schema()
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            assert self.openapi_schema is not None
            self.openapi_schema["security"] = [{"token": []}, {}]  # none is needed where none was made
            for path, methods in self.openapi_schema["paths"].items():
                if "post" in methods and SCOPES["POST", path] is not None:
                    methods["post"].setdefault("parameters", []).append(PARAMETER)
        return self.openapi_schema


class WebApp:
    """The application and what it does beside answering: `run` works until it is cancelled."""

    def __init__(self, station: AppContext) -> None:
        tokens, board = Tokens(station.settings.data_dir), ChannelBoard(station)
        gatekeeper = Gatekeeper(tokens)
        self.events = Events(station, board)
        self.app = Api(title="Copywatch", version=__version__, docs_url=None, redoc_url=None)
        self.app.include_router(probes(station.metrics.registry, station.health))
        add_system(self.app, station, board)
        add_session(self.app, gatekeeper, tokens)
        add_channels(self.app, station, board)
        self.registrar = Registrar(Jobs(station.settings.data_dir), station.settings)
        add_references(self.app, station, self.registrar)
        add_uploads(self.app, station, self.registrar)
        add_jobs(self.app, self.registrar.jobs)
        add_alerts(self.app, station)
        add_evidence(self.app, station)
        add_licences(self.app, station)
        settings, webhooks = station.settings, WebhookStore(station.settings.data_dir)
        self.sender = WebhookSender(
            webhooks,
            station.history,
            station.rights,
            station.metrics,
            settings.webhooks.allow,
            settings.alerting.keep_days,
        )
        add_webhooks(self.app, self.sender)
        self.outages = Outages(board, webhooks, settings.webhooks.channel_down_s)
        add_events(self.app, self.events)
        add_dashboard(self.app)
        tell_problems(self.app)
        self.app.add_middleware(Idempotency, replies=Replies(settings.data_dir))
        self.app.add_middleware(SecurityMiddleware, api=self.app, gatekeeper=gatekeeper)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_kept_going("telling events", self.events.run))
            tasks.create_task(_kept_going("registering uploads", self.registrar.run))
            tasks.create_task(_kept_going("delivering to webhooks", self.sender.run))
            tasks.create_task(_kept_going("watching for outages", self.outages.run))


async def _kept_going(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Works for ever: whatever ends it is told and it is begun again, since watching must not end with it."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("%s failed; it is begun again in %.0f s", what, AGAIN_S)
        await asyncio.sleep(AGAIN_S)
