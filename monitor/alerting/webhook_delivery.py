"""The webhook sender: delivers each message to its endpoint, signed, and retries where that fails.

Endpoints are served side by side, each at its own pace; one that hangs or fails gets one message at a time. The sender
resolves host names itself, checks every address and connects to exactly those: a name cannot resolve to another address
in between, a redirect counts as a failure, and a private address is reached only if the configuration allows it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ParamSpec, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from standardwebhooks import Webhook
from yarl import URL

from monitor import __version__
from monitor.alerting.outbox import History
from monitor.alerting.webhooks import REVIEWED, Attempt, Delivery, Endpoint, Message, WebhookStore, body_of
from monitor.errors import MonitorError, NoSuchWebhook, WebhooksFailed
from monitor.ops.change_signal import watch
from monitor.ops.metrics import Metrics
from monitor.ops.process import wait_for_event
from monitor.rights.rules import Review
from monitor.rights.store import RightsStore
from reference_db.media.address_ranges import is_public
from reference_db.media.addresses import AddressRefused, ReachPolicy

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 15.0  # of one try
AT_ONCE = 4  # messages in flight to one endpoint
POLL_S = 1.0  # how often the file is checked for changes by the command line
PURGE_S = 3600.0
MAX_RETRY_AFTER_S = 86_400.0
MAX_LOOKUPS = 16  # host names at once; each lookup may hang


class WebhookSender:
    """Delivers until `run` is cancelled; deliveries in flight then are repeated after the next start."""

    def __init__(
        self,
        webhooks: WebhookStore,
        history: History,
        rights: RightsStore,
        metrics: Metrics,
        allow: Sequence[str],
        retention_days: float,
    ) -> None:
        self._webhooks, self._history, self._rights = webhooks, history, rights
        self._metrics, self._allow, self._retention_days = metrics, tuple(allow), retention_days
        self._in_flight: dict[str, set[int]] = defaultdict(set)  # by endpoint
        self._purged_at = -PURGE_S
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="webhooks")

    async def run(self) -> None:
        """Works until cancelled."""
        rights, webhooks = self._rights.changed, self._webhooks.changed
        try:
            with watch(rights) as reviewed, watch(rights, webhooks) as changed:
                reviewed.set()  # there may be reviews since the previous run
                async with asyncio.TaskGroup() as tries:
                    while True:
                        changed.clear()
                        due, wait_s = await self._due(reviewed)
                        for endpoint, delivery in due:
                            self._in_flight[endpoint.id].add(delivery.n)
                            tries.create_task(self._deliver(endpoint, delivery))
                        await wait_for_event(changed, wait_s)
        except asyncio.CancelledError:
            self._disk.shutdown(wait=False, cancel_futures=True)
            raise

    async def ping(self, id: str) -> Delivery:
        """Sends a test message now, once. Raises NoSuchWebhook."""
        delivery = await asyncio.to_thread(self._webhooks.ping, id)
        endpoint = await asyncio.to_thread(self._webhooks.get, id)
        attempt = await send(endpoint, delivery, self._allow)
        return await asyncio.to_thread(self._webhooks.record_attempt, delivery, attempt, 1.0)

    async def _due(self, reviewed: asyncio.Event) -> tuple[list[tuple[Endpoint, Delivery]], float]:
        """Deliveries to send now, and how long to wait for the next; none while the disk fails."""
        try:
            if time.monotonic() - self._purged_at > PURGE_S:
                await self._on_disk(self._webhooks.purge, self._retention_days)
                self._purged_at = time.monotonic()
            is_reviewed = reviewed.is_set()
            reviewed.clear()
            in_flight = {id: set(numbers) for id, numbers in self._in_flight.items()}
            due, n_waiting, wait_s = await self._on_disk(self._look, in_flight, is_reviewed)
            self._metrics.webhooks_waiting.set(n_waiting)
            return due, wait_s
        except MonitorError as error:
            logger.error("%s; webhooks wait", error)
            reviewed.set()
            return [], POLL_S

    async def _deliver(self, endpoint: Endpoint, delivery: Delivery) -> None:
        try:
            attempt = await send(endpoint, delivery, self._allow)
            self._metrics.webhook_deliveries.labels("taken" if attempt.succeeded else "failed").inc()
            with suppress(NoSuchWebhook):  # removed meanwhile
                record = self._webhooks.record_attempt
                after = await self._on_disk(record, delivery, attempt, random.uniform(0.9, 1.2))
                if not attempt.succeeded:
                    logger.warning("webhook %s: %s (try %d, %s)", endpoint.id, attempt.error, after.tries, after.state)
        except WebhooksFailed as error:
            logger.error("%s; the message will be delivered again", error)
            await asyncio.sleep(POLL_S)
        finally:
            self._in_flight[endpoint.id].discard(delivery.n)
            self._webhooks.changed.notify()

    def _look(
        self, in_flight: dict[str, set[int]], is_reviewed: bool
    ) -> tuple[list[tuple[Endpoint, Delivery]], int, float]:
        """Deliveries that are due, the number of all that wait, and the seconds until the next look."""
        if is_reviewed or self._webhooks.position("review") is None:
            self._enqueue_reviews()
        now = time.time()
        due, next_at = self._webhooks.due(now, in_flight, AT_ONCE), self._webhooks.next_due(now)
        wait_s = POLL_S if next_at is None else min(POLL_S, next_at - now)
        return due, self._webhooks.n_waiting(), wait_s

    def _enqueue_reviews(self) -> None:
        """Queues a message for each new review; reviews are in the rights store, not among the alert events."""
        if not self._webhooks.all():
            return
        position = self._webhooks.position("review")
        if position is None:
            self._webhooks.enqueue([], ("review", self._rights.newest_review()))
            return
        while reviews := self._rights.reviews(after=position, limit=100):
            position = reviews[-1].n
            self._webhooks.enqueue([self._review_message(review) for review in reviews], ("review", position))

    def _review_message(self, review: Review) -> Message:
        events = self._history.alert(review.alert_id)
        alert = events[-1].alert.as_dict() if events else {"id": review.alert_id}
        body = body_of(REVIEWED, {**alert, "review": review.as_dict()})
        return Message(f"msg_{review.alert_id}_review{review.n}", REVIEWED, review.alert_id, body)

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, lambda: work(*args, **kwargs))


async def send(endpoint: Endpoint, delivery: Delivery, allow: Sequence[str], timeout_s: float = TIMEOUT_S) -> Attempt:
    """One try by the specification; every failure is an Attempt as well, with an error text free of secrets."""
    now = datetime.now(UTC)
    signatures = [
        Webhook(secret).sign(delivery.message, now, delivery.body) for secret in endpoint.secrets(now.timestamp())
    ]
    headers = {
        "content-type": "application/json",
        "user-agent": f"copywatch/{__version__}",
        "webhook-id": delivery.message,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(signatures),
    }
    resolver = _CheckedResolver(allow)
    try:
        async with asyncio.timeout(timeout_s):
            await resolver.check(URL(endpoint.url))
            connector = aiohttp.TCPConnector(
                resolver=resolver, use_dns_cache=False, force_close=True, socket_factory=resolver.open_socket
            )
            async with (
                aiohttp.ClientSession(
                    connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
                ) as session,
                session.post(
                    URL(endpoint.url), data=delivery.body.encode(), headers=headers, allow_redirects=False
                ) as reply,
            ):
                return _attempt_of(reply.status, reply.headers.get("retry-after", ""))
    except AddressRefused:
        return Attempt(None, "the address is private; to allow it, name it in webhooks.allow")
    except TimeoutError:
        return Attempt(None, f"no response within {timeout_s:g} s")
    except aiohttp.ClientConnectorDNSError:
        return Attempt(None, "the host name cannot be resolved")
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError):
        return Attempt(None, "the certificate is not trusted")
    except aiohttp.ClientConnectorError as error:
        return Attempt(None, f"cannot connect: {error.os_error.strerror or type(error.os_error).__name__}")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Attempt(None, f"the response is not valid HTTP ({type(error).__name__})")


def _attempt_of(status: int, retry_after: str) -> Attempt:
    if 300 <= status < 400:
        return Attempt(status, f"HTTP status {status}: redirects are not followed")
    if 200 <= status < 300:
        return Attempt(status, None)
    wait_s = 0.0
    if status in (429, 503):
        try:
            wait_s = float(retry_after) if retry_after.isdigit() else _seconds_until(retry_after)
        except (TypeError, ValueError):
            wait_s = 0.0
    return Attempt(status, f"HTTP status {status}", min(max(wait_s, 0.0), MAX_RETRY_AFTER_S))


def _seconds_until(date: str) -> float:
    return (parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()


class _CheckedResolver(AbstractResolver):
    """Resolves host names to addresses that may be reached; aiohttp connects to these only."""

    _lookups = ThreadPoolExecutor(max_workers=MAX_LOOKUPS, thread_name_prefix="webhook-lookup")

    def __init__(self, allow: Sequence[str]) -> None:
        self._reach = ReachPolicy("", 0, tuple(one.lower() for one in allow))
        self._checked: set[str] = set()

    async def check(self, url: URL) -> None:
        """Checks a URL whose host is an IP address, which aiohttp does not resolve. Raises AddressRefused."""
        if url.host is None:
            raise AddressRefused("The URL has no host.")
        with suppress(ValueError):
            ipaddress.ip_address(url.host)
            await self.resolve(url.host, url.port or 0)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        places = await loop.run_in_executor(self._lookups, self._reach.resolve, host, port)
        self._checked |= {address for address, _ in places}
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address, port in places
        ]

    def open_socket(self, address: Any) -> socket.socket:
        """The last check before connecting: no private address that `resolve` did not return."""
        family, kind, protocol, _, destination = address
        if destination[0] not in self._checked and not is_public(destination[0]):
            raise OSError("a private address")
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        return None
