"""Connections of the web server: how many are open, which one gives way to a new one, how long a request may take to
arrive.

Anybody who reaches the port can open connections, without a token. So they are limited in all and per peer, and take
at most half of the files that the process may open: decoders, storage and the probes' own port share the rest. At a
limit the connection that has waited longest for its client is closed in favour of the new one, so silent connections,
however many, do not keep a client out that sends its request at once. A head must arrive within HEAD_S, and a client
that does not read its response for STUCK_S is dropped.

asyncio's own server accepts without a limit and logs each failure of `accept`, thousands of lines a second; so the
`Acceptor` here accepts.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

HEAD_S = 10.0  # for a request's head; also for the rest of a body that nobody reads any more
STUCK_S = 60.0  # without progress of a response
ACCEPT_BATCH = 64  # connections accepted before other work of the loop has its turn
ACCEPT_PAUSE_S = 1.0  # after `accept` failed for want of files or memory
LOG_S = 60.0  # between two lines about the same problem
BACKLOG = 2048  # connections that the kernel holds until they are accepted
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
IPV6_PEER_BITS = 64  # a client has at least so many addresses of its own


class Lease:
    """The place of one connection among those that are allowed."""

    def __init__(self, limits: ConnectionLimits, peer: str) -> None:
        self.peer = peer
        self.is_revoked = False
        self._limits = limits
        self._abort: Callable[[], None] | None = None

    def attach(self, abort: Callable[[], None]) -> None:
        """Says how the connection is closed; closes it at once if its place was given away meanwhile."""
        self._abort = abort
        if self.is_revoked:
            abort()

    def revoke(self) -> None:
        self.is_revoked = True
        self.release()
        if self._abort is not None:
            self._abort()

    def set_waiting(self, waiting: bool) -> None:
        """Whether the server waits for the client's next request; only then the connection may have to give way."""
        self._limits.set_waiting(self, waiting)

    def release(self) -> None:
        """The connection is closed."""
        self._limits.remove(self)


class ConnectionLimits:
    """The open connections of one server, by peer. Used on the event loop only."""

    def __init__(self, total: int, per_peer: int, trusted: Callable[[str], bool] = lambda peer: False) -> None:
        self.total, self.per_peer = total, per_peer
        self._is_trusted = trusted  # a proxy, whose connections are those of many clients
        self._open: dict[str, dict[Lease, None]] = {}  # by peer
        self._n_open = 0
        self._waiting: dict[Lease, None] = {}  # longest first
        self._log = RareLog()

    @property
    def n_open(self) -> int:
        return self._n_open

    def admit(self, address: str) -> Lease | None:
        """A place for a connection from this address; at a limit that of another, None if none is waiting."""
        peer = _peer(address)
        own = self._open.get(peer, {})
        if len(own) >= self.per_peer and not self._is_trusted(address):
            self._log.warning("%s has %d connections, the limit per client", peer, len(own))
            if not self._make_room(own):
                return None
        elif self._n_open >= self.total:
            self._log.warning("%d connections are open, the limit", self._n_open)
            if not self._make_room(self._waiting):
                return None
        lease = Lease(self, peer)
        self._open.setdefault(peer, {})[lease] = None
        self._waiting[lease] = None
        self._n_open += 1
        return lease

    def remove(self, lease: Lease) -> None:
        own = self._open.get(lease.peer, {})
        if lease not in own:
            return
        del own[lease]
        self._waiting.pop(lease, None)
        self._n_open -= 1
        if not own:
            del self._open[lease.peer]

    def set_waiting(self, lease: Lease, waiting: bool) -> None:
        if not waiting:
            self._waiting.pop(lease, None)
        elif lease in self._open.get(lease.peer, {}):
            self._waiting.setdefault(lease)

    def _make_room(self, among: dict[Lease, None]) -> bool:
        oldest = next((lease for lease in among if lease in self._waiting), None)
        if oldest is not None:
            oldest.revoke()
        return oldest is not None


def _peer(address: str) -> str:
    """The client that an address stands for: itself, or its IPv6 network."""
    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is None:
        return str(ipaddress.ip_network((number, IPV6_PEER_BITS), strict=False))
    return str(number)


def max_files(share: float) -> int:
    """This share of the files that the process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return int((limit if limit != resource.RLIM_INFINITY else 1 << 20) * share)


class RareLog:
    """Warnings, each text at most once in LOG_S: whoever causes them must not be able to fill the disk."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def warning(self, text: str, *args: object) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(text, -LOG_S) >= LOG_S:
            self._logged_at[text] = now
            logger.warning(text, *args)


# --- one connection --------------------------------------------------------------------------------------------------


class _RareInvalidRequests(logging.Filter):
    """Lets uvicorn's line about an invalid request pass once in LOG_S."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = -LOG_S

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != "Invalid HTTP request received.":
            return True
        now = time.monotonic()
        if now - self._logged_at < LOG_S:
            return False
        self._logged_at = now
        return True


logging.getLogger("uvicorn.error").addFilter(_RareInvalidRequests())


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with limits on the time that a client may take."""

    def __init__(self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], lease: Lease) -> None:
        super().__init__(config, state, app_state)
        self._lease = lease
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lease.attach(transport.abort)
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lease.release()
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_client()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _should_upgrade(self) -> bool:
        return False  # no WebSockets here: such a request is answered like any other

    def _watch_client(self) -> None:
        """The clock runs while no request is being worked on; bytes that complete no head do not stop it."""
        is_waiting = self.cycle is None or self.cycle.response_complete
        self._lease.set_waiting(is_waiting)
        if is_waiting and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)
        elif not is_waiting and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


# --- accepting -------------------------------------------------------------------------------------------------------


class Acceptor:
    """Accepts the connections of one listening socket until closed; in the place of asyncio's server."""

    def __init__(
        self, listener: socket.socket, limits: ConnectionLimits, create_protocol: Callable[[Lease], LimitedProtocol]
    ) -> None:
        self.sockets = (listener,)
        self._listener, self._limits, self._create_protocol = listener, limits, create_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._log = RareLog()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPT_BATCH):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_RESOURCES:
                    raise
                self._log.warning("cannot accept connections (%s); trying again every second", error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            lease = self._limits.admit(address[0])
            if lease is None:
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection, lease))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, lease: Lease) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._create_protocol(lease), connection)
        except OSError:
            lease.release()
            connection.close()
