"""HTTP servers of a process: the sockets it listens on, and the probes that every role answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from monitor.config.settings import WebSettings
from monitor.errors import ConfigError
from monitor.ops.health import Health
from monitor.ops.heartbeat import beat
from monitor.ops.metrics import Metrics
from monitor.ops.systemd import feed_watchdog, notify
from monitor.web.probes import create_probes


@asynccontextmanager
async def answering(web: WebSettings, metrics: Metrics, health: Health) -> AsyncGenerator[str, None]:
    """Answers probes and scrapes while open, beats, and feeds systemd's watchdog; gives the address."""
    listeners = listeners_of(web)
    app = create_probes(metrics, health)
    quiet = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
    servers = [Server(quiet) for _ in listeners]
    async with asyncio.TaskGroup() as tasks:
        for server, listener in zip(servers, listeners, strict=True):
            tasks.create_task(server.serve([listener]))
        background = [tasks.create_task(beat(metrics)), tasks.create_task(feed_watchdog(lambda: health.hangs))]
        try:
            yield address_of(listeners[0])
        finally:
            notify("STOPPING=1")
            for task in background:
                task.cancel()
            for server in servers:
                server.should_exit = True


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: stopping is ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listeners_of(web: WebSettings) -> list[socket.socket]:
    """The sockets that are listened on: the one of all that is answered, and the one of probes where it is set."""
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
        listener.listen()  # at once: who is told the address may connect before the server runs
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); set {setting}.") from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
