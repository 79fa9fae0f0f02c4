"""The broker: how it is reached, and the topics that are made where they are missing.

A broker that is away is waited for, never fatal; what is wrong with the configuration is. No error text of ours or of
aiokafka holds a password: it goes into the client and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from monitor.config.settings import KafkaSettings
from monitor.errors import ConfigError, Unreachable
from monitor.kafka.records import MAX_VALUE_BYTES
from monitor.ops.backoff import Backoff
from monitor.runtime.snapshots import MAX_BYTES as MAX_SNAPSHOT_BYTES

logger = logging.getLogger(__name__)

ANSWER_S = 10.0  # that a broker has to answer a question
ENVELOPE_BYTES = 1 << 20  # for keys, headers and batch around a value
MAX_REQUEST_BYTES = max(MAX_SNAPSHOT_BYTES, 2 * MAX_VALUE_BYTES) + ENVELOPE_BYTES
DAY_MS = 24 * 3600 * 1000


class Stoppable(Protocol):
    """A client of aiokafka."""

    async def stop(self) -> None: ...


def dlq_of(topic: str) -> str:
    """Where the bad records of a topic go."""
    return f"{topic}.dlq"


def connection(settings: KafkaSettings) -> dict[str, Any]:
    """What every client of aiokafka is given; ConfigError where the settings do not make a connection."""
    if not settings.bootstrap:
        raise ConfigError("no broker is configured; set kafka.bootstrap to host:port.")
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in settings.bootstrap.split(",")],
        "security_protocol": settings.security_protocol,
        "client_id": "copywatch",
    }
    if "SSL" in settings.security_protocol:
        options["ssl_context"] = _tls(settings)
    if settings.security_protocol.startswith("SASL"):
        options |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.sasl_username or "",
            "sasl_plain_password": _password(settings),
        }
    return options


def _tls(settings: KafkaSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
        if settings.ssl_certfile is not None:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"kafka.ssl_cafile, ssl_certfile and ssl_keyfile make no TLS ({error.strerror or error}); name PEM files."
        ) from error
    return context


def _password(settings: KafkaSettings) -> str:
    if settings.sasl_password is not None:
        return settings.sasl_password.get_secret_value()
    if settings.sasl_password_file is None:
        raise ConfigError("SASL needs a password; set kafka.sasl_password_file or kafka.sasl_password.")
    try:
        return settings.sasl_password_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{settings.sasl_password_file}: the password of SASL cannot be read from it.") from error


async def ensure_topics(settings: KafkaSettings, names: Sequence[str]) -> None:
    """Makes those that are missing, each as it must be. Raises Unreachable, or ConfigError where it may not."""
    client = AIOKafkaAdminClient(**connection(settings), request_timeout_ms=int(ANSWER_S * 1000))
    try:
        async with asyncio.timeout(3 * ANSWER_S):
            await client.start()
            there = {topic["topic"]: len(topic["partitions"]) for topic in await client.describe_topics()}
            await _create(client, [_new(settings, name, there) for name in names if name not in there])
            await _match_partitions(client, settings, there)
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unreachable(
            f"the broker at {settings.bootstrap} does not answer ({in_words(error)}); "
            "is kafka.bootstrap right, and does it run?"
        ) from error
    finally:
        await client.close()


async def partitions_of(settings: KafkaSettings, topic: str) -> list[int]:
    """The partitions of a topic; none where it is missing. A consumer knows only those of its own topics."""
    client = AIOKafkaAdminClient(**connection(settings), request_timeout_ms=int(ANSWER_S * 1000))
    try:
        await client.start()
        return [one["partition"] for found in await client.describe_topics([topic]) for one in found["partitions"]]
    finally:
        await client.close()


async def put_away(client: Stoppable) -> None:
    """Stops a client within seconds, whatever it says: a broker that is away must not keep us.

    In a task of its own: aiokafka lets the cancellation of its own tasks out of `stop`, which must not look like ours.
    """
    stopping = asyncio.create_task(client.stop())
    await asyncio.wait({stopping}, timeout=ANSWER_S)
    if not stopping.cancel() and not stopping.cancelled() and (error := stopping.exception()) is not None:
        logger.debug("a client did not stop well: %s", in_words(error))


def in_words(error: BaseException) -> str:
    """The error in few words; aiokafka's own may be a class name alone."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _new(settings: KafkaSettings, name: str, there: dict[str, int]) -> NewTopic:
    partitions, config = settings.partitions, {}
    if name == settings.frames:
        config = {"retention.ms": str(DAY_MS)}
    elif name == settings.state:
        # State p is that of frames p. Small segments: what is not compacted yet is read at every take-over.
        partitions = there.get(settings.frames, settings.partitions)
        config = {
            "cleanup.policy": "compact",
            "segment.bytes": str(32 << 20),
            "segment.ms": str(600_000),
            "min.cleanable.dirty.ratio": "0.1",
            "max.message.bytes": str(MAX_SNAPSHOT_BYTES + ENVELOPE_BYTES),
        }
    elif name == settings.channels:
        config = {"cleanup.policy": "compact"}
    elif name == dlq_of(settings.frames):
        partitions, config = 1, {"max.message.bytes": str(MAX_REQUEST_BYTES), "retention.ms": str(7 * DAY_MS)}
    elif name == settings.alerts:
        config = {"retention.ms": str(30 * DAY_MS)}
    return NewTopic(name, partitions, -1, replica_assignments={}, topic_configs=config)


async def _create(client: AIOKafkaAdminClient, topics: list[NewTopic]) -> None:
    if not topics:
        return
    reply = await client.create_topics(topics)
    for name, code, *_ in reply.topic_errors:
        kind = for_code(code)
        if code and kind is not TopicAlreadyExistsError:
            raise ConfigError(f"topic {name} is missing and cannot be made ({kind.__name__}); make it on the broker.")
    logger.info("topics made: %s", ", ".join(topic.name for topic in topics))


async def _match_partitions(client: AIOKafkaAdminClient, settings: KafkaSettings, there: dict[str, int]) -> None:
    """Gives the topic of state as many partitions as that of frames has."""
    frames, state = there.get(settings.frames, 0), there.get(settings.state, 0)
    if 0 < state < frames:
        await client.create_partitions({settings.state: NewPartitions(frames)})
        logger.info("topic %s has %d partitions now, as %s has", settings.state, frames, settings.frames)


async def until_reached(
    work: Callable[[], Awaitable[None]], tell: Callable[[str | None], None], stop: asyncio.Event
) -> bool:
    """Does the work as soon as the broker can be reached; False where `stop` came first. Complaints are told."""
    backoff = Backoff()
    while not stop.is_set():
        try:
            await work()
            tell(None)
            return True
        except (Unreachable, KafkaError) as error:
            if backoff.is_first:
                logger.error("%s; trying until it does", str(error).rstrip("."))
            tell(str(error))
        await backoff.wait(stop)
    return False
