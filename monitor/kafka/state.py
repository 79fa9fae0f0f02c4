"""The state topic: of each partition of frames, how far it was read and what its channels stood at, in one place.

Partition p of the topic belongs to partition p of the frames and is written by its owner only, in transactions:
`/offset` has the offset that reading goes on at, and each channel has its own record. Read to its end it is what the
last transaction left, whoever wrote it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, TopicPartition

from monitor.config.settings import KafkaSettings
from monitor.kafka.broker import ANSWER_S, connection, ensure_topics, partitions_of, put_away
from monitor.kafka.records import Headers

OFFSET_KEY = b"/offset"  # no channel is called so
READ_S = 120.0  # that reading all of a partition may take
SLACK_MS = 200


@dataclass(slots=True, eq=False)
class StoredState:
    """What is kept of one partition. Its range is that of the frames that the broker still has."""

    offset: int | None = None  # None where nothing was kept yet
    read: int = 0  # what is before it was read once; reading may have gone back behind it since
    channels: dict[str, tuple[bytes, Headers]] = field(default_factory=dict)
    first: int = 0
    end: int = 0


def offset_value(offset: int, read: int) -> bytes:
    return json.dumps({"offset": offset, "read": read}).encode()


async def read_kept(settings: KafkaSettings, frames: TopicPartition) -> StoredState:
    """All of it, as of the last transaction. Raises KafkaError, TimeoutError."""
    kept, state = StoredState(), TopicPartition(settings.state, frames.partition)
    consumer = AIOKafkaConsumer(
        **connection(settings),
        group_id=None,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        request_timeout_ms=int(ANSWER_S * 1000),
        max_partition_fetch_bytes=16 << 20,
        fetch_max_wait_ms=SLACK_MS,
    )
    try:
        async with asyncio.timeout(READ_S):
            await consumer.start()
            await _made_sure(settings, state)
            kept.first = (await consumer.beginning_offsets([frames]))[frames]
            kept.end = (await consumer.end_offsets([frames]))[frames]
            end = (await consumer.end_offsets([state]))[state]
            consumer.assign([state])  # last: a broker answers a connection's questions in order, and a fetch waits
            await consumer.seek_to_beginning(state)
            while await consumer.position(state) < end:
                for record in (await consumer.getmany(state, timeout_ms=SLACK_MS)).get(state, []):
                    _note(kept, record.key, record.value, list(record.headers))
    finally:
        await put_away(consumer)
    return kept


async def _made_sure(settings: KafkaSettings, state: TopicPartition) -> None:
    """Frames may have been given more partitions since the state's were made."""
    if state.partition not in await partitions_of(settings, state.topic):
        await ensure_topics(settings, [settings.state])


def _note(kept: StoredState, key: bytes | None, value: bytes | None, headers: Headers) -> None:
    if key is None:
        return
    if key == OFFSET_KEY:
        said = json.loads(value) if value else {}
        kept.offset, kept.read = said.get("offset"), said.get("read", 0)
    elif value is None:
        kept.channels.pop(key.decode(), None)
    else:
        kept.channels[key.decode()] = value, headers
