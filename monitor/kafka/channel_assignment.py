"""Channel assignment: `ingest` processes share the channels of a compacted topic through the group protocol.

A record's key is the channel's name and its value the channel as JSON; a record without a value removes it. The owner
of a partition reads all of it, from its beginning, and runs the channels that remain; after a loss it stops them. No
offset is committed: the topic itself is the list.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError
from pydantic import ValidationError

from monitor.config.settings import ChannelSettings, KafkaSettings
from monitor.errors import ConfigError, Unreachable
from monitor.kafka.broker import (
    REQUEST_TIMEOUT_S,
    client_options,
    ensure_topics,
    error_text,
    partitions_of,
    stop_client,
)
from monitor.kafka.records import MS
from monitor.ops.backoff import Backoff
from monitor.ops.metrics import Metrics

if TYPE_CHECKING:  # `channels list --kafka` needs no decoder
    from monitor.runtime.channel_roster import ChannelRoster

logger = logging.getLogger(__name__)

POLL_MS = 500


class ChannelAssignment(ConsumerRebalanceListener):  # type: ignore[misc]
    """Runs this process's share of the channels in its roster."""

    def __init__(
        self,
        kafka: KafkaSettings,
        roster: ChannelRoster,
        metrics: Metrics,
        report_problem: Callable[[str | None], None],
        moved: set[str],
    ) -> None:
        self._kafka = kafka
        self._roster = roster
        self._metrics = metrics
        self._report_problem = report_problem
        self._moved = moved  # channels that stop here because another process takes them over
        self._assigned: dict[TopicPartition, dict[str, ChannelSettings]] = {}
        self._updating = asyncio.Lock()

    async def run(self) -> None:
        """Runs until cancelled; the channels continue while the broker is unreachable."""
        backoff = Backoff()
        while True:
            consumer = AIOKafkaConsumer(
                **client_options(self._kafka),
                group_id=f"{self._kafka.group}.ingest",
                group_instance_id=self._kafka.instance,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                partition_assignment_strategy=(StickyPartitionAssignor,),
                session_timeout_ms=round(self._kafka.session_timeout_s * MS),
                heartbeat_interval_ms=round(self._kafka.session_timeout_s * MS / 10),
                rebalance_timeout_ms=round(self._kafka.rebalance_timeout_s * MS),
            )
            try:
                await consumer.start()
                self._report_problem(None)
                consumer.subscribe([self._kafka.channels], listener=self)
                backoff.reset()
                while True:
                    await self._poll(consumer)
            except (KafkaError, OSError) as error:
                logger.error("cannot read the list of channels: %s", error_text(error))
                self._report_problem(f"cannot read the list of channels ({error_text(error)})")
            finally:
                await stop_client(consumer)
            await backoff.wait()

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Nothing: channels that stay here are not interrupted by a rebalance."""

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._metrics.kafka_rebalances.inc()
        partitions = set(assigned)
        self._metrics.kafka_partitions.set(len(partitions))
        lost = {name for partition in self._assigned.keys() - partitions for name in self._assigned[partition]}
        self._assigned = {partition: self._assigned.get(partition, {}) for partition in partitions}
        self._moved |= lost
        await self._update()
        self._moved -= lost

    async def _poll(self, consumer: AIOKafkaConsumer) -> None:
        changed = False
        for partition, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
            for record in records:
                changed |= self._apply(partition, record.key, record.value)
        if changed and await _is_at_end(consumer):
            await self._update()

    async def _update(self) -> None:
        async with self._updating:
            wanted = {name: channel for channels in self._assigned.values() for name, channel in channels.items()}
            await self._roster.update(list(wanted.values()))

    def _apply(self, partition: TopicPartition, key: bytes | None, value: bytes | None) -> bool:
        """Whether the record changed anything."""
        name, channels = (key or b"").decode("utf-8", "replace"), self._assigned.setdefault(partition, {})
        if value is None:
            return channels.pop(name, None) is not None
        try:
            channel = parse_channel(name, value)
        except (ValidationError, ValueError):
            logger.error("a channel of the topic %s is invalid; skipped", partition.topic)
            return False
        changed = channels.get(name) != channel
        channels[name] = channel
        return changed


async def _is_at_end(consumer: AIOKafkaConsumer) -> bool:
    """Whether everything was read, so that no outdated version of a channel is started."""
    for partition in consumer.assignment():
        end = consumer.highwater(partition)
        if end is None or await consumer.position(partition) < end:
            return False
    return True


def parse_channel(name: str, value: bytes) -> ChannelSettings:
    """The channel in a record. Raises ValidationError or ValueError if it is invalid or names a local file."""
    channel = ChannelSettings.model_validate_json(value)
    if channel.name != name or _is_file(channel):
        raise ValueError("expected a network address and the channel's name as key")
    return channel


def _is_file(channel: ChannelSettings) -> bool:
    return "://" not in channel.url or channel.url.lower().startswith("file:")


def refuse_files(channel: ChannelSettings) -> None:
    """Raises ConfigError for a file: other machines cannot open it."""
    if _is_file(channel):
        raise ConfigError("a shared channel needs a network address, not a file.")


async def remove_channels(kafka: KafkaSettings, names: Sequence[str]) -> None:
    """Removes channels from the topic. Raises ConfigError if one is not in it; then none is removed."""
    shared = {channel.name for channel in await shared_channels(kafka)}
    for name in names:
        if name not in shared:
            raise ConfigError(f"there is no shared channel {name}; `copywatch channels list --kafka` lists them.")
    for name in names:
        await write_channel(kafka, name, None)


def channel_value(channel: ChannelSettings) -> bytes:
    """The value of a channel's record, with the credentials that its `ingest` process needs."""
    values = {"name": channel.name, "url": channel.url, "mode": channel.mode, "allow": list(channel.allow)}
    named = {"private": True} if channel.private else {}  # earlier versions do not know the key
    return json.dumps(values | named).encode()


async def write_channel(kafka: KafkaSettings, name: str, channel: ChannelSettings | None) -> None:
    """Writes a channel into the topic, or removes it. Raises Unreachable."""
    await ensure_topics(kafka, [kafka.channels])
    producer = AIOKafkaProducer(**client_options(kafka), enable_idempotence=True)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await producer.start()
            value = None if channel is None else channel_value(channel)
            await producer.send_and_wait(kafka.channels, value, key=name.encode())
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unreachable(f"the broker at {kafka.bootstrap} does not accept it ({error_text(error)}).") from error
    finally:
        await stop_client(producer)


async def shared_channels(kafka: KafkaSettings) -> list[ChannelSettings]:
    """All channels of the topic, by name. Raises Unreachable."""
    await ensure_topics(kafka, [kafka.channels])
    found: dict[str, ChannelSettings] = {}
    consumer = AIOKafkaConsumer(**client_options(kafka), auto_offset_reset="earliest")
    try:
        async with asyncio.timeout(3 * REQUEST_TIMEOUT_S):
            await consumer.start()
            partitions = [TopicPartition(kafka.channels, n) for n in await partitions_of(kafka, kafka.channels)]
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            await consumer.seek_to_beginning(*partitions)
            while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
                for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                    for record in records:
                        name = (record.key or b"").decode("utf-8", "replace")
                        found.pop(name, None)
                        with suppress(ValidationError, ValueError):
                            found |= {name: parse_channel(name, record.value)} if record.value is not None else {}
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unreachable(f"the broker at {kafka.bootstrap} does not answer ({error_text(error)}).") from error
    finally:
        await stop_client(consumer)
    return [found[name] for name in sorted(found)]
