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

    def client(self, token: str | None = None, *, host: str = "127.0.0.1") -> Client:
        headers = {"Authorization": f"Bearer {token}"} if token else None
        return Client(f"http://{host}:{self.port}", headers)

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
