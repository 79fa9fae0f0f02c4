"""The state topic: for each partition of frames, how far it was read, and the state of its channels.

Partition p of the topic belongs to partition p of the frames. Its owner writes it in transactions: the record `/offset`
has the offset at which reading continues, and each channel has a record of its own. Read to its end, it is the state
after the last transaction.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, TopicPartition

from monitor.config.settings import KafkaSettings
from monitor.kafka.broker import REQUEST_TIMEOUT_S, client_options, ensure_topics, partitions_of, stop_client
from monitor.kafka.records import Headers

OFFSET_KEY = b"/offset"  # no channel can have this name
READ_TIMEOUT_S = 120.0  # for all of a partition
POLL_MS = 200


@dataclass(slots=True, eq=False)
class StoredState:
    """The state of one partition, and which of its frames the broker still has."""

    offset: int | None = None  # None before the first transaction
    read_to: int = 0  # all before it was read once, even if reading went back since
    channels: dict[str, tuple[bytes, Headers]] = field(default_factory=dict)
    first: int = 0
    end: int = 0


def offset_value(offset: int, read_to: int) -> bytes:
    return json.dumps({"offset": offset, "read": read_to}).encode()


async def read_state(settings: KafkaSettings, frames: TopicPartition) -> StoredState:
    """The state after the last transaction. Raises KafkaError, TimeoutError."""
    stored, state = StoredState(), TopicPartition(settings.state, frames.partition)
    consumer = AIOKafkaConsumer(
        **client_options(settings),
        group_id=None,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
        max_partition_fetch_bytes=16 << 20,
        fetch_max_wait_ms=POLL_MS,
    )
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            await consumer.start()
            await _ensure_partition(settings, state)
            stored.first = (await consumer.beginning_offsets([frames]))[frames]
            stored.end = (await consumer.end_offsets([frames]))[frames]
            end = (await consumer.end_offsets([state]))[state]
            consumer.assign([state])  # last: a broker answers a connection in order, and a fetch waits
            await consumer.seek_to_beginning(state)
            while await consumer.position(state) < end:
                for record in (await consumer.getmany(state, timeout_ms=POLL_MS)).get(state, []):
                    _apply(stored, record.key, record.value, list(record.headers))
    finally:
        await stop_client(consumer)
    return stored


async def _ensure_partition(settings: KafkaSettings, state: TopicPartition) -> None:
    """Creates the partition of state if frames got more partitions since."""
    if state.partition not in await partitions_of(settings, state.topic):
        await ensure_topics(settings, [settings.state])


def _apply(stored: StoredState, key: bytes | None, value: bytes | None, headers: Headers) -> None:
    if key is None:
        return
    if key == OFFSET_KEY:
        offsets = json.loads(value) if value else {}
        stored.offset, stored.read_to = offsets.get("offset"), offsets.get("read", 0)
    elif value is None:
        stored.channels.pop(key.decode(), None)
    else:
        stored.channels[key.decode()] = value, headers
