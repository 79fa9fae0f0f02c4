"""`serve` and a fleet: what all `match` members told, shown here; and what is told here, for the fleet's readers.

Alerts of the topic go the way of those found here: into the outbox, once each by id and seq, and on to every sink.
The offset is committed when they are safe, so none is missed over a restart.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError

from monitor.alerting.alerts import Alert
from monitor.alerting.outbox import OutboxEntry
from monitor.config.settings import KafkaSettings
from monitor.errors import Unreachable
from monitor.kafka.broker import ANSWER_S, connection, ensure_topics, in_words, put_away
from monitor.kafka.records import MS
from monitor.ops.backoff import Backoff
from monitor.ops.metrics import Metrics
from monitor.runtime.runner import AlertDelivery

logger = logging.getLogger(__name__)

POLL_MS = 500


def alert_record(alert: Alert) -> dict[str, Any]:
    """Key, value and headers of an alert's record."""
    return {
        "key": alert.channel.encode(),
        "value": json.dumps(alert.as_dict(), ensure_ascii=False).encode(),
        "headers": [("id", alert.id.encode()), ("type", alert.type.encode())],
    }


async def follow_alerts(
    kafka: KafkaSettings, deliveries: AlertDelivery, metrics: Metrics, complain: Callable[[str | None], None]
) -> None:
    """Delivers every alert of the topic, from the oldest that was not delivered on; works until cancelled."""
    backoff = Backoff()
    while True:
        consumer = None
        try:
            await ensure_topics(kafka, [kafka.alerts])
            consumer = AIOKafkaConsumer(
                kafka.alerts,
                **connection(kafka),
                group_id=f"{kafka.group}.serve",
                group_instance_id=kafka.instance,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
                session_timeout_ms=round(kafka.session_timeout_s * MS),
                heartbeat_interval_ms=round(kafka.session_timeout_s * MS / 10),
            )
            await consumer.start()
            metrics.kafka_up.set(1)
            complain(None)
            backoff.reset()
            while True:
                await _deliver(consumer, deliveries)
        except (KafkaError, OSError, Unreachable) as error:
            if backoff.is_first:
                logger.error("the fleet's alerts cannot be read: %s; trying until they can", in_words(error))
            metrics.kafka_up.set(0)
            complain(f"the fleet's alerts cannot be read ({in_words(error)})")
        finally:
            if consumer is not None:
                await put_away(consumer)
        await backoff.wait()


async def _deliver(consumer: AIOKafkaConsumer, deliveries: AlertDelivery) -> None:
    batches = await consumer.getmany(timeout_ms=POLL_MS)
    for partition, records in batches.items():
        for record in records:
            try:
                alert = Alert.from_dict(json.loads(record.value))
            except (ValueError, KeyError, TypeError, AttributeError):
                logger.error("record %d of %s-%d is no alert and is left out", record.offset, *partition)
                continue
            await deliveries.put(OutboxEntry(alert.channel, [alert]))
    if batches:
        await consumer.commit()


class KafkaSink:
    """Writes alerts to the fleet's topic; the outbox asks again until it has."""

    def __init__(self, kafka: KafkaSettings, loop: asyncio.AbstractEventLoop) -> None:
        self._kafka = kafka
        self._loop = loop
        self._producer: AIOKafkaProducer | None = None
        connection(kafka)  # raises ConfigError at the start, not with the first alert

    def send(self, alerts: list[Alert]) -> None:
        asyncio.run_coroutine_threadsafe(self._send(alerts), self._loop).result()

    async def _send(self, alerts: list[Alert]) -> None:
        try:
            async with asyncio.timeout(3 * ANSWER_S):
                if self._producer is None:
                    await ensure_topics(self._kafka, [self._kafka.alerts])
                    self._producer = AIOKafkaProducer(**connection(self._kafka), enable_idempotence=True)
                    await self._producer.start()
                sent = [await self._producer.send(self._kafka.alerts, **alert_record(alert)) for alert in alerts]
                await asyncio.gather(*sent)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Lets go of the client; the next alert makes another."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await put_away(producer)
