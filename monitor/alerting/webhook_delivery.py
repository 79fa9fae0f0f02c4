"""The sender: takes each message to its endpoint, signed, and comes back later where it was not taken.

Every endpoint is served beside the others and at its own pace; one that hangs or fails is tried with one message at a
time. Addresses are looked up here, every number is checked, and just those are connected to: a name has no chance to
change its mind, a redirect is a failure, and a private address is reached only where the configuration names it.
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
from monitor.ops.metrics import Metrics
from monitor.rights.store import RightsStore
from reference_db.media.addresses import AddressRefused, ReachPolicy, is_public

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 15.0  # for all of one try
AT_ONCE = 4  # messages to one endpoint
POLL_S = 0.5  # the command line may have changed something
PURGE_S = 3600.0
LONGEST_WAIT_S = 86_400.0  # that an endpoint may ask for
LOOKING_UP = 16  # names at once, each of which may hang


class WebhookSender:
    """Delivers until `run` is cancelled; what is under way then is delivered after the next start."""

    def __init__(
        self,
        webhooks: WebhookStore,
        history: History,
        desk: RightsStore,
        metrics: Metrics,
        allow: Sequence[str],
        keep_days: float,
    ) -> None:
        self.webhooks = webhooks
        self._history, self._desk, self._metrics = history, desk, metrics
        self._allow, self._keep_days = tuple(allow), keep_days
        self._busy: dict[str, set[int]] = defaultdict(set)
        self._news = asyncio.Event()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="webhooks")

    def wake(self) -> None:
        """There is something new to deliver; on the loop only."""
        self._news.set()

    async def run(self) -> None:
        """Works until cancelled."""
        purged_at = 0.0
        try:
            async with asyncio.TaskGroup() as tries:
                while True:
                    self._news.clear()
                    try:
                        if time.monotonic() - purged_at > PURGE_S:
                            await self._on_disk(self.webhooks.purge, self._keep_days)
                            purged_at = time.monotonic()
                        busy = {id: set(held) for id, held in self._busy.items()}
                        due, n_waiting = await self._on_disk(self._look, busy)
                        self._metrics.webhooks_waiting.set(n_waiting)
                    except MonitorError as error:
                        logger.error("%s; webhooks wait", error)
                        due = []
                    for endpoint, delivery in due:
                        self._busy[endpoint.id].add(delivery.n)
                        tries.create_task(self._deliver(endpoint, delivery))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):  # wait_for may swallow a cancel that comes with the news
                            await self._news.wait()
        except asyncio.CancelledError:
            self._disk.shutdown(wait=False, cancel_futures=True)
            raise

    async def ping(self, id: str) -> Delivery:
        """Sends a test message now, once. Raises NoSuchWebhook."""
        delivery = await asyncio.to_thread(self.webhooks.ping, id)
        endpoint = await asyncio.to_thread(self.webhooks.get, id)
        attempt = await send(endpoint, delivery, self._allow)
        return await asyncio.to_thread(self.webhooks.record_attempt, delivery, attempt, 1.0)

    async def _deliver(self, endpoint: Endpoint, delivery: Delivery) -> None:
        try:
            attempt = await send(endpoint, delivery, self._allow)
            self._metrics.webhook_deliveries.labels("taken" if attempt.succeeded else "failed").inc()
            with suppress(NoSuchWebhook):  # removed meanwhile
                after = await self._on_disk(self.webhooks.record_attempt, delivery, attempt, random.uniform(0.9, 1.2))
                if not attempt.succeeded:
                    answer = attempt.error or f"it answered {attempt.status}"
                    logger.warning("webhook %s: %s (try %d, %s)", endpoint.id, answer, after.tries, after.state)
        except WebhooksFailed as error:
            logger.error("%s; the message is delivered again", error)
            await asyncio.sleep(POLL_S)
        finally:
            self._busy[endpoint.id].discard(delivery.n)
            self._news.set()

    def _look(self, busy: dict[str, set[int]]) -> tuple[list[tuple[Endpoint, Delivery]], int]:
        """What is due now, and how many messages wait."""
        self._enqueue_reviews()
        return self.webhooks.due(time.time(), busy, AT_ONCE), self.webhooks.n_waiting()

    def _enqueue_reviews(self) -> None:
        """Reviews are no events of the outbox: they are read from the desk, once each, from where we stopped."""
        if not self.webhooks.all():
            return
        at = self.webhooks.position("review")
        if at is None:
            newest = max((review.n for review in self._desk.reviews(limit=10**9)), default=0)
            self.webhooks.enqueue([], ("review", newest))
            return
        reviews = self._desk.reviews(after=at, limit=100)
        messages = []
        for review in reviews:
            told = self._history.alert(review.alert_id)
            data = {**(told[-1].alert.as_dict() if told else {"id": review.alert_id}), "review": review.as_dict()}
            name = f"msg_{review.alert_id}_review{review.n}"
            messages.append(Message(name, REVIEWED, review.alert_id, body_of(REVIEWED, data)))
        if reviews:
            self.webhooks.enqueue(messages, ("review", reviews[-1].n))

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, lambda: work(*args, **kwargs))


async def send(endpoint: Endpoint, delivery: Delivery, allow: Sequence[str], timeout_s: float = TIMEOUT_S) -> Attempt:
    """One try, by the rules of the specification; every failure is an Attempt too, in words without secrets."""
    now = datetime.now(UTC)
    signed = [
        Webhook(secret).sign(delivery.message, now, delivery.body) for secret in endpoint.secrets(now.timestamp())
    ]
    headers = {
        "content-type": "application/json",
        "user-agent": f"copywatch/{__version__}",
        "webhook-id": delivery.message,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(signed),
    }
    door = _CheckedResolver(allow)
    try:
        async with asyncio.timeout(timeout_s):
            await door.check(URL(endpoint.url))
            connector = aiohttp.TCPConnector(
                resolver=door, use_dns_cache=False, force_close=True, socket_factory=door.opened
            )
            async with (
                aiohttp.ClientSession(
                    connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
                ) as session,
                session.post(
                    URL(endpoint.url), data=delivery.body.encode(), headers=headers, allow_redirects=False
                ) as reply,
            ):
                return _judged(reply.status, reply.headers.get("retry-after", ""))
    except AddressRefused:
        return Attempt(None, "it leads to a private address; if that is meant, name it in webhooks.allow")
    except TimeoutError:
        return Attempt(None, f"no answer within {timeout_s:g} s")
    except aiohttp.ClientConnectorDNSError:
        return Attempt(None, "its host is not known")
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError):
        return Attempt(None, "its certificate is not trusted")
    except aiohttp.ClientConnectorError as error:
        return Attempt(None, f"it cannot be reached: {error.os_error.strerror or type(error.os_error).__name__}")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Attempt(None, f"it did not answer as a web server does ({type(error).__name__})")


def _judged(status: int, retry_after: str) -> Attempt:
    if 300 <= status < 400:
        return Attempt(status, "a redirect is not followed")
    if 200 <= status < 300:
        return Attempt(status, None)
    wait_s = 0.0
    if status in (429, 503):
        try:
            wait_s = float(retry_after) if retry_after.isdigit() else _until(retry_after)
        except (TypeError, ValueError):
            wait_s = 0.0
    return Attempt(status, f"it answered {status}", min(max(wait_s, 0.0), LONGEST_WAIT_S))


def _until(date: str) -> float:
    return (parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()


class _CheckedResolver(AbstractResolver):
    """Looks names up and lets through what may be reached; aiohttp connects to what it is given here."""

    _names = ThreadPoolExecutor(max_workers=LOOKING_UP, thread_name_prefix="webhook-name")

    def __init__(self, allow: Sequence[str]) -> None:
        self._reach = ReachPolicy("", 0, tuple(one.lower() for one in allow))
        self._passed: set[str] = set()

    async def check(self, url: URL) -> None:
        """For an address that is a number already, which nobody looks up. Raises AddressRefused."""
        if url.host is None:
            raise AddressRefused("It has no host.")
        with suppress(ValueError):
            ipaddress.ip_address(url.host)
            await self.resolve(url.host, url.port or 0)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        places = await loop.run_in_executor(self._names, self._reach.places, host, port)
        self._passed |= {address for address, _ in places}
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

    def opened(self, place: Any) -> socket.socket:
        """The last gate: nothing is connected to that did not pass, however it was come by."""
        family, kind, protocol, _, address = place
        if address[0] not in self._passed and not is_public(address[0]):
            raise OSError("a private address")
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        return None
