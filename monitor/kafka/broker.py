"""The broker: how clients connect to it, and which topics are created on it.

An unreachable broker is waited for; an invalid configuration is fatal. No error text of ours or of aiokafka contains a
password: it goes into the client and nowhere else.
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

REQUEST_TIMEOUT_S = 10.0
ENVELOPE_BYTES = 1 << 20  # room for keys, headers and the batch around a value
MAX_REQUEST_BYTES = max(MAX_SNAPSHOT_BYTES, 2 * MAX_VALUE_BYTES) + ENVELOPE_BYTES
DAY_MS = 24 * 3600 * 1000


class Stoppable(Protocol):
    """A client of aiokafka."""

    async def stop(self) -> None: ...


def dead_letter_topic(topic: str) -> str:
    """The topic for the bad records of a topic."""
    return f"{topic}.dlq"


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """The options that every aiokafka client needs. Raises ConfigError for invalid settings."""
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
            "kafka.ssl_cafile, ssl_certfile and ssl_keyfile are not usable for TLS "
            f"({error.strerror or error}); name PEM files."
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
        raise ConfigError(f"{settings.sasl_password_file}: cannot read the SASL password.") from error


async def ensure_topics(settings: KafkaSettings, names: Sequence[str]) -> None:
    """Creates the missing topics, each with its configuration. Raises Unreachable, or ConfigError if it may not."""
    client = AIOKafkaAdminClient(**client_options(settings), request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000))
    try:
        async with asyncio.timeout(3 * REQUEST_TIMEOUT_S):
            await client.start()
            existing = {topic["topic"]: len(topic["partitions"]) for topic in await client.describe_topics()}
            await _create(client, [_new_topic(settings, name, existing) for name in names if name not in existing])
            await _grow_state_topic(client, settings, existing)
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unreachable(
            f"the broker at {settings.bootstrap} does not answer ({error_text(error)}); "
            "check kafka.bootstrap, and that the broker is running."
        ) from error
    finally:
        await client.close()


async def partitions_of(settings: KafkaSettings, topic: str) -> list[int]:
    """The partitions of a topic; none if it is missing. (A consumer knows only those of its own topics.)"""
    client = AIOKafkaAdminClient(**client_options(settings), request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000))
    try:
        await client.start()
        return [one["partition"] for found in await client.describe_topics([topic]) for one in found["partitions"]]
    finally:
        await client.close()


async def stop_client(client: Stoppable) -> None:
    """Stops a client within seconds, even if the broker is unreachable.

    In a task of its own: `stop` may raise the CancelledError of aiokafka's own tasks, which must not look like ours.
    """
    stopping = asyncio.create_task(client.stop())
    await asyncio.wait({stopping}, timeout=REQUEST_TIMEOUT_S)
    if not stopping.cancel() and not stopping.cancelled() and (error := stopping.exception()) is not None:
        logger.debug("a client failed to stop: %s", error_text(error))


def error_text(error: BaseException) -> str:
    """The error with its class name, which may be all that aiokafka says."""
    name, text = type(error).__name__, str(error)
    return text if text.startswith(name) else f"{name}: {text}" if text else name


def _new_topic(settings: KafkaSettings, name: str, existing: dict[str, int]) -> NewTopic:
    partitions, config = settings.partitions, {}
    if name == settings.frames:
        config = {"retention.ms": str(DAY_MS)}
    elif name == settings.state:
        # Partition p has the state of frames p. Small segments: each new owner reads what is not compacted yet.
        partitions = existing.get(settings.frames, settings.partitions)
        config = {
            "cleanup.policy": "compact",
            "segment.bytes": str(32 << 20),
            "segment.ms": str(600_000),
            "min.cleanable.dirty.ratio": "0.1",
            "max.message.bytes": str(MAX_SNAPSHOT_BYTES + ENVELOPE_BYTES),
        }
    elif name == settings.channels:
        config = {"cleanup.policy": "compact"}
    elif name == dead_letter_topic(settings.frames):
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
            raise ConfigError(
                f"topic {name} is missing and cannot be created ({kind.__name__}); create it on the broker."
            )
    logger.info("created topics: %s", ", ".join(topic.name for topic in topics))


async def _grow_state_topic(client: AIOKafkaAdminClient, settings: KafkaSettings, existing: dict[str, int]) -> None:
    """Gives the topic of state as many partitions as that of frames has."""
    frames, state = existing.get(settings.frames, 0), existing.get(settings.state, 0)
    if 0 < state < frames:
        await client.create_partitions({settings.state: NewPartitions(frames)})
        logger.info("topic %s has %d partitions now, as many as %s", settings.state, frames, settings.frames)


async def retry_until_reached(
    work: Callable[[], Awaitable[None]], report_problem: Callable[[str | None], None], stop: asyncio.Event
) -> bool:
    """Does the work, with retries until the broker is reached; False if `stop` came first."""
    backoff = Backoff()
    while not stop.is_set():
        try:
            await work()
            report_problem(None)
            return True
        except (Unreachable, KafkaError) as error:
            if backoff.is_first:
                logger.error("%s; retrying", str(error).rstrip("."))
            report_problem(str(error))
        await backoff.wait(stop)
    return False
