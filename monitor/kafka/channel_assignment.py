"""Channels that many `ingest` processes share: a compacted topic whose partitions the group protocol spreads.

A record's key is the channel's name and its value the channel as JSON; a record without a value removes it. Who has
a partition reads all of it, from its beginning, and watches the channels that are left; who loses it stops them
first. Nobody commits anything: the topic itself is the list.
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
    ANSWER_S,
    connection,
    ensure_topics,
    in_words,
    partitions_of,
    put_away,
)
from monitor.kafka.records import MS
from monitor.ops.backoff import Backoff
from monitor.ops.metrics import Metrics

if TYPE_CHECKING:  # `channels list --kafka` needs no decoder
    from monitor.runtime.channel_roster import ChannelRoster

logger = logging.getLogger(__name__)

POLL_MS = 500


class ChannelAssignment(ConsumerRebalanceListener):  # type: ignore[misc]
    """This process's share of the channels, as the roster's."""

    def __init__(
        self,
        kafka: KafkaSettings,
        roster: ChannelRoster,
        metrics: Metrics,
        complain: Callable[[str | None], None],
        moved: set[str],
    ) -> None:
        self._kafka = kafka
        self._roster = roster
        self._metrics = metrics
        self._complain = complain
        self._moved = moved  # channels that are stopped here for another member to go on with
        self._mine: dict[TopicPartition, dict[str, ChannelSettings]] = {}
        self._updating = asyncio.Lock()

    async def run(self) -> None:
        """Works until cancelled; while the broker is away the channels go on."""
        backoff = Backoff()
        while True:
            consumer = AIOKafkaConsumer(
                **connection(self._kafka),
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
                self._complain(None)
                consumer.subscribe([self._kafka.channels], listener=self)
                backoff.reset()
                while True:
                    await self._poll(consumer)
            except (KafkaError, OSError) as error:
                logger.error("the list of channels cannot be read: %s", in_words(error))
                self._complain(f"the list of channels cannot be read ({in_words(error)})")
            finally:
                await put_away(consumer)
            await backoff.wait()

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Channels stay on air over a rebalance: who keeps them misses nothing."""

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._metrics.kafka_rebalances.inc()
        mine = set(assigned)
        self._metrics.kafka_partitions.set(len(mine))
        gone = {name for partition in self._mine.keys() - mine for name in self._mine[partition]}
        self._mine = {partition: self._mine.get(partition, {}) for partition in mine}
        self._moved |= gone
        await self._update()
        self._moved -= gone

    async def _poll(self, consumer: AIOKafkaConsumer) -> None:
        changed = False
        for partition, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
            for record in records:
                changed |= self._note(partition, record.key, record.value)
        if changed and await _is_at_end(consumer):
            await self._update()

    async def _update(self) -> None:
        async with self._updating:
            wanted = {name: channel for channels in self._mine.values() for name, channel in channels.items()}
            await self._roster.update(list(wanted.values()))

    def _note(self, partition: TopicPartition, key: bytes | None, value: bytes | None) -> bool:
        """Whether the record changed anything."""
        name, channels = (key or b"").decode("utf-8", "replace"), self._mine.setdefault(partition, {})
        if value is None:
            return channels.pop(name, None) is not None
        try:
            channel = parsed(name, value)
        except (ValidationError, ValueError):
            logger.error("a channel of the topic %s is written wrongly and left out", partition.topic)
            return False
        changed = channels.get(name) != channel
        channels[name] = channel
        return changed


async def _is_at_end(consumer: AIOKafkaConsumer) -> bool:
    """Whether all was read that there is: an old version of a channel is not begun."""
    for partition in consumer.assignment():
        end = consumer.highwater(partition)
        if end is None or await consumer.position(partition) < end:
            return False
    return True


def parsed(name: str, value: bytes) -> ChannelSettings:
    """The channel of a record; ValidationError or ValueError where it is none, or would open a file of ours."""
    channel = ChannelSettings.model_validate_json(value)
    if channel.name != name or _is_file(channel):
        raise ValueError("expected a network address and the channel's name as key")
    return channel


def _is_file(channel: ChannelSettings) -> bool:
    return "://" not in channel.url or channel.url.lower().startswith("file:")


def refuse_files(channel: ChannelSettings) -> None:
    """Raises ConfigError: a file is here, and who watches the channel is elsewhere."""
    if _is_file(channel):
        raise ConfigError("a channel that is shared needs a network address, not a file.")


async def remove_channels(kafka: KafkaSettings, names: Sequence[str]) -> None:
    """Takes channels out of the topic. Raises ConfigError where one is not in it, and removes none then."""
    there = {channel.name for channel in await shared_channels(kafka)}
    for name in names:
        if name not in there:
            raise ConfigError(f"no channel {name} is shared; `copywatch channels list --kafka` shows those that are.")
    for name in names:
        await put_channel(kafka, name, None)


def written(channel: ChannelSettings) -> bytes:
    """The value of a channel's record: with its credentials, which who watches it needs."""
    values = {"name": channel.name, "url": channel.url, "mode": channel.mode, "allow": list(channel.allow)}
    return json.dumps(values).encode()


async def put_channel(kafka: KafkaSettings, name: str, channel: ChannelSettings | None) -> None:
    """Writes a channel into the topic, or removes it. Raises Unreachable."""
    await ensure_topics(kafka, [kafka.channels])
    producer = AIOKafkaProducer(**connection(kafka), enable_idempotence=True)
    try:
        async with asyncio.timeout(ANSWER_S):
            await producer.start()
            value = None if channel is None else written(channel)
            await producer.send_and_wait(kafka.channels, value, key=name.encode())
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unreachable(f"the broker at {kafka.bootstrap} does not take it ({in_words(error)}).") from error
    finally:
        await put_away(producer)


async def shared_channels(kafka: KafkaSettings) -> list[ChannelSettings]:
    """All channels of the topic, by name. Raises Unreachable."""
    await ensure_topics(kafka, [kafka.channels])
    found: dict[str, ChannelSettings] = {}
    consumer = AIOKafkaConsumer(**connection(kafka), auto_offset_reset="earliest")
    try:
        async with asyncio.timeout(3 * ANSWER_S):
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
                            found |= {name: parsed(name, record.value)} if record.value is not None else {}
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unreachable(f"the broker at {kafka.bootstrap} does not answer ({in_words(error)}).") from error
    finally:
        await put_away(consumer)
    return [found[name] for name in sorted(found)]
