"""The HTTP face. Loopback only; there is nothing here to log in to yet."""

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from monitor.health import Health
from monitor.web.probes import probes


def create_app(registry: CollectorRegistry, health: Health) -> FastAPI:
    """The application."""
    app = FastAPI(title="Copywatch", openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(probes(registry, health))
    return app
