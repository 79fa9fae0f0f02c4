"""The alert topic, on the side of `serve`: it delivers the alerts of all `match` processes, and publishes its own.

Alerts from the topic are delivered like those found here: into the outbox, once each by id and seq, and on to every
sink. The offset is committed once they are stored, so a restart misses none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError

from monitor.alerting.alerts import Alert
from monitor.alerting.outbox import OutboxEntry
from monitor.config.settings import KafkaSettings
from monitor.errors import Unreachable
from monitor.kafka.broker import REQUEST_TIMEOUT_S, client_options, ensure_topics, error_text, stop_client
from monitor.kafka.records import MS, alert_record
from monitor.ops.backoff import Backoff
from monitor.ops.metrics import Metrics
from monitor.runtime.runner import AlertDelivery

logger = logging.getLogger(__name__)

POLL_MS = 500


async def follow_alerts(
    kafka: KafkaSettings, delivery: AlertDelivery, metrics: Metrics, report_problem: Callable[[str | None], None]
) -> None:
    """Delivers every alert of the topic, from the first undelivered one on. Runs until cancelled."""
    backoff = Backoff()
    while True:
        consumer = None
        try:
            await ensure_topics(kafka, [kafka.alerts])
            consumer = AIOKafkaConsumer(
                kafka.alerts,
                **client_options(kafka),
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
            report_problem(None)
            backoff.reset()
            while True:
                await _deliver(consumer, delivery)
        except (KafkaError, OSError, Unreachable) as error:
            if backoff.is_first:
                logger.error("cannot read the alert topic: %s; retrying", error_text(error))
            metrics.kafka_up.set(0)
            report_problem(f"cannot read the alert topic ({error_text(error)})")
        finally:
            if consumer is not None:
                await stop_client(consumer)
        await backoff.wait()


async def _deliver(consumer: AIOKafkaConsumer, delivery: AlertDelivery) -> None:
    batches = await consumer.getmany(timeout_ms=POLL_MS)
    for partition, records in batches.items():
        for record in records:
            try:
                alert = Alert.from_dict(json.loads(record.value))
            except (ValueError, KeyError, TypeError, AttributeError):
                logger.error("record %d of %s-%d is not an alert; skipped", record.offset, *partition)
                continue
            await delivery.put(OutboxEntry(alert.channel, [alert]))
    if batches:
        await consumer.commit()


class KafkaSink:
    """Writes alerts to the topic; the dispatcher retries until it succeeds."""

    def __init__(self, kafka: KafkaSettings, loop: asyncio.AbstractEventLoop) -> None:
        self._kafka = kafka
        self._loop = loop
        self._producer: AIOKafkaProducer | None = None
        client_options(kafka)  # raises ConfigError at start-up, not with the first alert

    def send(self, alerts: list[Alert]) -> None:
        asyncio.run_coroutine_threadsafe(self._send(alerts), self._loop).result()

    async def _send(self, alerts: list[Alert]) -> None:
        try:
            async with asyncio.timeout(3 * REQUEST_TIMEOUT_S):
                if self._producer is None:
                    await ensure_topics(self._kafka, [self._kafka.alerts])
                    self._producer = AIOKafkaProducer(**client_options(self._kafka), enable_idempotence=True)
                    await self._producer.start()
                sent = [await self._producer.send(self._kafka.alerts, **alert_record(alert)) for alert in alerts]
                await asyncio.gather(*sent)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stops the client; the next alert starts a new one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_client(producer)
