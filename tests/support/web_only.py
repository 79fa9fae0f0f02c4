"""The web application alone, on a real socket: no channels, an empty library. It starts within a second."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry

from monitor.alerting.outbox import Outbox
from monitor.alerting.webhooks import WebhookStore
from monitor.config.settings import ChannelSettings, Settings
from monitor.ingest.latest_frames import LatestFrames
from monitor.ops.health import Health
from monitor.ops.metrics import Metrics
from monitor.rights.store import RightsStore
from monitor.runtime.active_library import ActiveLibrary
from monitor.web.app import WebApp
from monitor.web.context import AppContext
from monitor.web.server import web_server
from reference_db.features.encoder import load_encoder
from reference_db.search.index import ReferenceIndex
from tests.support.web_server import TIMEOUT_S, Client


@cache
def _encoder_id() -> str:
    return load_encoder().encoder_id


class WebAppServer:
    """Serves while open. Tests write alerts to `outbox` and set `channels`."""

    def __init__(self, data_dir: Path, *, host: str = "127.0.0.1", channel_down_s: float = 30.0, **web: Any) -> None:
        webhooks = {"channel_down_s": channel_down_s}
        settings = Settings.model_validate({"data_dir": data_dir, "web": web, "webhooks": webhooks})
        self.outbox = Outbox.open(data_dir, [])
        self.channels: list[ChannelSettings] = []  # that are monitored
        self.context = AppContext(
            settings=settings,
            config=data_dir / "copywatch.yaml",
            metrics=Metrics(CollectorRegistry()),
            health=Health({}, (), {}, ()),
            library=ActiveLibrary(ReferenceIndex.from_features([])),
            model="test",
            encoder_id=_encoder_id(),
            channels=lambda: self.channels,
            latest_frames=LatestFrames(),
            rights=RightsStore(data_dir),
            webhooks=WebhookStore(data_dir),
        )
        self.web = WebApp(self.context)
        self._socket = socket.create_server((host, 0))
        self.port = self._socket.getsockname()[1]
        self._server = web_server(self.web.app, settings.web)
        self._server.config.timeout_graceful_shutdown = 2
        self.limits = self._server.limits
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        background = asyncio.create_task(self.web.run())
        self._started.set()
        await self._server.serve([self._socket])
        background.cancel()
        await asyncio.wait([background])

    @property
    def credentials(self) -> dict[str, str]:
        """The header of a caller on this machine while no token exists."""
        return {"Authorization": f"Bearer {self.context.local_secret.value}"}

    @property
    def bearer(self) -> str:
        """The same as a line of a request's head."""
        return f"Authorization: {self.credentials['Authorization']}\r\n"

    def client(self, token: str | None = None, *, host: str = "127.0.0.1") -> Client:
        """A caller with this token; without one, a caller with the secret of a server without tokens."""
        headers = {"Authorization": f"Bearer {token}"} if token else None
        if token is None and not self.context.tokens.any():
            headers = self.credentials
        return Client(f"http://{host}:{self.port}", headers)

    def stranger(self, *, host: str = "127.0.0.1") -> Client:
        """A caller without any credentials."""
        return Client(f"http://{host}:{self.port}")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self.outbox.close()
