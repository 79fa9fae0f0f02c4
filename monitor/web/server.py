"""HTTP servers of a process: the sockets they listen on, their limits, and the probes that every role serves."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from monitor.config.settings import WebSettings
from monitor.errors import ConfigError
from monitor.ops.health import Health
from monitor.ops.heartbeat import measure_loop_lag
from monitor.ops.metrics import Metrics
from monitor.ops.systemd import feed_watchdog, notify
from monitor.web.connections import BACKLOG, Acceptor, ConnectionLimits, Lease, LimitedProtocol, max_files
from monitor.web.probes import create_probes

GRACE_S = 5  # for responses under way when the server stops
# The port of probes has places of its own, so that no client of the other port keeps a probe out.
PROBE_CONNECTIONS, PROBE_CONNECTIONS_PER_PEER = 128, 64


@asynccontextmanager
async def serve_probes(web: WebSettings, metrics: Metrics, health: Health) -> AsyncGenerator[str, None]:
    """While open, serves the probes, measures the lag of the loop and feeds systemd's watchdog; yields the URL."""
    listeners = open_listeners(web)
    app = create_probes(metrics, health)
    servers = [probes_server(app) for _ in listeners]
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
    """uvicorn with limits on connections and without its own signal handlers: the role stops it."""

    def __init__(self, app: FastAPI, limits: ConnectionLimits, trusted_proxies: Sequence[str] = ()) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
            proxy_headers=bool(trusted_proxies),  # nobody else's X-Forwarded-For is believed
            forwarded_allow_ips=list(trusted_proxies),
        )
        super().__init__(config)
        self.limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = [Acceptor(one, self.limits, self._protocol) for one in sockets or ()]  # type: ignore[misc]
        self.started = True

    def _protocol(self, lease: Lease) -> LimitedProtocol:
        return LimitedProtocol(self.config, self.server_state, self.lifespan.state, lease)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def web_server(app: FastAPI, web: WebSettings) -> Server:
    """The server of API and dashboard. Its connections take at most half of the files that the process may open."""
    total = min(web.max_connections, max_files(1 / 2))
    per_peer = min(web.max_connections_per_client, max(1, total * 3 // 4))
    networks = [ipaddress.ip_network(one, strict=False) for one in web.trusted_proxies]

    def is_proxy(address: str) -> bool:
        number = ipaddress.ip_address(address.partition("%")[0])
        return any(number in network for network in networks)

    return Server(app, ConnectionLimits(total, per_peer, is_proxy), web.trusted_proxies)


def probes_server(app: FastAPI) -> Server:
    """The server of probes and metrics."""
    total = min(PROBE_CONNECTIONS, max_files(1 / 8))
    return Server(app, ConnectionLimits(total, min(PROBE_CONNECTIONS_PER_PEER, total)))


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
        listener.listen(BACKLOG)  # at once: a client that knows the URL may connect before the server runs
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); set {setting}.") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
