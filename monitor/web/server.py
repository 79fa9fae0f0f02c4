"""HTTP servers of a process: the sockets it listens on, and the probes that every role serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from monitor.config.settings import WebSettings
from monitor.errors import ConfigError
from monitor.ops.health import Health
from monitor.ops.heartbeat import measure_loop_lag
from monitor.ops.metrics import Metrics
from monitor.ops.systemd import feed_watchdog, notify
from monitor.web.probes import create_probes


@asynccontextmanager
async def serve_probes(web: WebSettings, metrics: Metrics, health: Health) -> AsyncGenerator[str, None]:
    """While open, serves the probes, measures the lag of the loop and feeds systemd's watchdog; yields the URL."""
    listeners = open_listeners(web)
    app = create_probes(metrics, health)
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
    servers = [Server(config) for _ in listeners]
    async with asyncio.TaskGroup() as tasks:
        for server, listener in zip(servers, listeners, strict=True):
            tasks.create_task(server.serve([listener]))
        background = [
            tasks.create_task(measure_loop_lag(metrics)),
            tasks.create_task(feed_watchdog(lambda: health.stuck_worker)),
        ]
        try:
            yield url_of(listeners[0])
        finally:
            notify("STOPPING=1")
            for task in background:
                task.cancel()
            for server in servers:
                server.should_exit = True


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the role stops it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_listeners(web: WebSettings) -> list[socket.socket]:
    """The listening sockets: the main one, and that of `web.probes_port` if it is set. Raises ConfigError."""
    listeners = [_listen(web.host, web.port, "web.port")]
    if web.probes_port is not None:
        listeners.append(_listen(web.probes_host, web.probes_port, "web.probes_port"))
    return listeners


def _listen(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # at once: a client that knows the URL may connect before the server runs
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); set {setting}.") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
