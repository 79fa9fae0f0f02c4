"""One partition of frames in the hands of one member: records in; alerts, dead letters and state out, as one.

Work goes by rounds. A round takes the records that wait, reads their pictures, matches the channels side by side, and
ends with every channel at the same offset. What came of the rounds is written every two seconds, and at once where
there is an alert, in one transaction of Kafka: alerts, dead letters, the state of the channels that changed, and the
offset that it all stands at. After a crash it is there as a whole or not at all, so whoever goes on from it tells
what would have been told. The transaction bears the partition's name: once another member has taken the partition
over, the broker refuses whatever the former owner still tries to write, however long it slept.

Any fault is answered in one way: all that is in memory is dropped, and the partition is taken up from what was kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, ProducerFenced
from aiokafka.structs import OffsetAndMetadata

from monitor.alerting.alerts import Alert
from monitor.errors import MonitorError
from monitor.kafka.alert_topic import alert_record
from monitor.kafka.broker import (
    MAX_REQUEST_BYTES,
    connection,
    dlq_of,
    in_words,
    put_away,
)
from monitor.kafka.channel import TopicChannel
from monitor.kafka.records import MS, BadRecord, FrameRecord, KafkaRecord, Shown, dead_letter, read
from monitor.kafka.state import OFFSET_KEY, StoredState, offset_value, read_kept
from monitor.ops.backoff import Backoff
from monitor.ops.logs import channel_logs
from monitor.runtime.boot import MatchServices
from monitor.runtime.match_step import Outcome
from monitor.runtime.runner import SILENCE_S, SNAPSHOT_EVERY_S, count_alerts

logger = logging.getLogger(__name__)

ROUND = 32  # records at most: an alert waits for the end of its round
BUFFER_RECORDS, BUFFER_BYTES = 256, 32 << 20  # that may wait; when full, the partition is paused
LOOK_S = 0.5  # between two looks at what is due
KEEP_S = 30.0  # that a transaction may take before it is given up
FORGET_S = 86_400.0  # after so long a silence a channel's state is no longer kept


class Partition:
    """All of it; `run` works until cancelled, `park` brings it to rest, the rest is for the member's poll loop."""

    def __init__(
        self,
        frames: TopicPartition,
        services: MatchServices,
        readers: Executor,
        offset_at: Callable[[int], Awaitable[int | None]],
    ) -> None:
        self.frames = frames
        self.want: int | None = None  # where reading is to go on, until the poll loop has seen to it
        self.caught_up_s: float | None = None  # since when nothing is left to read
        self.next_offset = 0  # all before it is in the state
        self._read_to = 0  # as far as it was ever read: it goes back where a channel's state was refused
        self._services = services
        self._kafka = services.settings.kafka
        self._readers = readers  # threads in which pictures are decoded
        self._offset_at = offset_at  # of the first record that is no older than this (ms)
        self._buffer: deque[KafkaRecord] = deque()
        self._buffer_bytes = 0
        self._arrived = asyncio.Event()
        self._working = asyncio.Lock()
        self._producer: AIOKafkaProducer | None = None
        self._is_open = False
        self._skip: tuple[int, str] | None = None
        self._is_renewed = False
        self._channels: dict[str, TopicChannel] = {}
        self._shown: Shown = {}
        self._alerts: list[tuple[Alert, datetime]] = []  # to be told, with the arrival of what decided each
        self._dead: list[tuple[KafkaRecord, BadRecord]] = []
        self._gone: list[str] = []  # channels whose state is no longer kept
        self._has_bare_letters = False  # the broker does not take the values of dead letters
        self._kept_offset: int | None = None
        self._kept_at = time.monotonic()
        self._backoff = Backoff()

    # --- for the poll loop -------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether it can take no more just now."""
        full = len(self._buffer) >= BUFFER_RECORDS or self._buffer_bytes >= BUFFER_BYTES
        return full or not self._is_reading

    @property
    def _is_reading(self) -> bool:
        """Whether what is read now is what is wanted."""
        return self._is_open and self._skip is None and not self._is_renewed

    @property
    def oldest_s(self) -> float | None:
        """The time of the oldest record that waits."""
        return self._buffer[0].timestamp / MS if self._buffer else None

    def feed(self, records: Sequence[KafkaRecord]) -> None:
        """Takes what was read, unless reading is to go on elsewhere."""
        if self.want is not None or not self._is_reading:
            return
        self._buffer.extend(records)
        self._buffer_bytes += sum(len(record.value or b"") for record in records)
        self._arrived.set()

    def skip(self, offset: int, reason: str) -> None:
        """Has reading go on at another offset; what lies before it is a gap."""
        self._skip = offset, reason
        self._arrived.set()

    def renew(self) -> None:
        """Has reading begin at the first record: the topic was made anew, and offsets that are kept are of another."""
        self._is_renewed = True
        self._arrived.set()

    # --- its life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until cancelled, whatever happens."""
        while True:
            try:
                if not self._is_open:
                    await self._open()
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):  # wait_for may swallow the cancel that ends this task
                            await self._arrived.wait()
                    async with self._working:
                        await self._round()
            except Exception as error:
                if isinstance(error, ProducerFenced):
                    # Somebody else has it: the next heartbeats say whether we still do.
                    self._backoff.raise_to(self._kafka.session_timeout_s / 4)
                known = isinstance(error, KafkaError | OSError | TimeoutError | MonitorError)
                logger.warning(
                    "partition %d is taken up again in %.0f s: %s",
                    self.frames.partition,
                    self._backoff.next_s,
                    in_words(error),
                    exc_info=None if known else error,
                )
                self._services.metrics.kafka_retakes.inc()
                self._has_bare_letters |= isinstance(error, MessageSizeTooLargeError)
                await self.close()
                await self._backoff.wait()

    async def park(self) -> None:
        """Brings it to rest with all that it knows kept; `run` may be called again."""
        async with self._working:
            if self._is_open:
                await self._keep()
                self._empty()
                self.want = self.next_offset

    async def close(self) -> None:
        """Drops what is in memory. What was not kept is for the next owner to find again."""
        self._is_open = False
        self._empty()
        for name in self._channels:
            self._services.metrics.forget(name)
        self._channels, self._alerts, self._dead, self._gone, self._shown = {}, [], [], [], {}
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await put_away(producer)

    def _empty(self) -> None:
        self._buffer.clear()
        self._buffer_bytes = 0
        self._arrived.clear()

    async def _open(self) -> None:
        """Takes the partition from whoever has it, then reads what is kept of it: in this order."""
        await self.close()  # opening may have been broken off
        self._producer = AIOKafkaProducer(
            **connection(self._kafka),
            transactional_id=f"{self._kafka.group}.{self.frames.topic}.{self.frames.partition}",
            max_request_size=MAX_REQUEST_BYTES,
            request_timeout_ms=int(KEEP_S * MS),
        )
        async with asyncio.timeout(KEEP_S):
            await self._producer.start()
            await self._producer.begin_transaction()  # returns when the broker has fenced off all before us
            await self._producer.abort_transaction()
        kept = await read_kept(self._kafka, self.frames)
        told = await asyncio.get_running_loop().run_in_executor(self._readers, self._restore, kept)
        self._alerts = [(alert, datetime.now(UTC)) for alert in told]
        self.next_offset = at = kept.first if kept.offset is None else kept.offset
        self._kept_offset, self._read_to, self._skip = kept.offset, max(at, kept.read), None
        if kept.first <= at <= kept.end:
            wanted = (channel.wants for channel in self._channels.values())
            self.next_offset = min([at, *(offset for offset in wanted if offset is not None)])
        else:
            self.skip(kept.first, "expired")
        self.want, self._is_open = self.next_offset, True
        self._kept_at = time.monotonic()
        logger.info(
            "partition %d goes on at offset %d with %d channels",
            self.frames.partition,
            self.next_offset,
            len(self._channels),
        )

    def _restore(self, kept: StoredState) -> list[Alert]:
        alerts: list[Alert] = []
        for name, (content, headers) in kept.channels.items():
            with channel_logs(name):
                alerts += self._channel(name).restore(content, headers, kept.first)
        return alerts

    def _channel(self, name: str) -> TopicChannel:
        if name not in self._channels:
            self._channels[name] = TopicChannel(name, self._services)
        return self._channels[name]

    # --- a round -----------------------------------------------------------------------------------------------------

    async def _round(self) -> None:
        if self._kafka.policy == "live":
            await self._look_ahead()
        if self._is_renewed:
            self._is_renewed = False
            self._jump(0, "expired")
        elif self._skip is not None:
            self._jump(*self._skip)
        records = [self._buffer.popleft() for _ in range(min(ROUND, len(self._buffer)))]
        if records:
            self._buffer_bytes -= sum(len(record.value or b"") for record in records)
            await self._take([record for record in records if not self._has(record)])
            self.next_offset = records[-1].offset + 1
            self._read_to = max(self._read_to, self.next_offset)
        if not self._buffer:
            self._arrived.clear()
        await self._end_silent()
        if self._alerts or time.monotonic() - self._kept_at >= SNAPSHOT_EVERY_S:
            await self._keep()

    def _has(self, record: KafkaRecord) -> bool:
        """Whether it was taken before: it is read again for the sake of another channel."""
        channel = self._channels.get((record.key or b"").decode("utf-8", "replace"))
        return record.offset < (self._read_to if channel is None else channel.next_offset)

    async def _take(self, records: list[KafkaRecord]) -> None:
        loop = asyncio.get_running_loop()
        by_channel: dict[str, list[FrameRecord]] = {}
        found = await loop.run_in_executor(self._readers, self._read, records)
        for record, one in zip(records, found, strict=True):
            if isinstance(one, BadRecord):
                if record.offset < self._read_to:
                    continue  # it is among the dead letters already
                self._services.metrics.kafka_dead_letters.labels(one.reason).inc()
                self._dead.append((record, one))
            else:
                by_channel.setdefault(one.channel, []).append(one)
        for name, outcomes in zip(
            by_channel, await asyncio.gather(*(self._follow(*one) for one in by_channel.items())), strict=True
        ):
            for outcome in outcomes:
                self._hear(name, outcome)

    def _hear(self, channel: str, outcome: Outcome) -> None:
        count_alerts(channel, outcome, self._services.metrics)
        self._alerts += [(alert, outcome.arrived_at) for alert in outcome.alerts]

    async def _follow(self, name: str, records: list[FrameRecord]) -> list[Outcome]:
        """What one channel's records led to, one after the other."""
        channel = self._channel(name)
        with channel_logs(name):
            outcomes = [await channel.take(record) for record in records]
        return [outcome for outcome in outcomes if outcome is not None]

    def _read(self, records: list[KafkaRecord]) -> list[FrameRecord | BadRecord]:
        """Each record read, or what is wrong with it. Blocks."""
        encoder_id = self._services.models.encoder.encoder_id
        found: list[FrameRecord | BadRecord] = []
        for record in records:
            try:
                found.append(read(record, encoder_id, self._shown))
            except BadRecord as bad:
                found.append(bad)
        return found

    async def _end_silent(self) -> None:
        """Ends what is open on channels of which nothing comes any more, though the broker would have it."""
        now_s = time.monotonic()
        if self.caught_up_s is None or now_s - self.caught_up_s < SILENCE_S or self._buffer:
            return
        for channel in list(self._channels.values()):
            silent_s = now_s - channel.heard_s
            if silent_s > FORGET_S:
                self._gone.append(channel.name)
                self._services.metrics.forget(channel.name)
                del self._channels[channel.name]
            elif channel.is_on_air and silent_s > SILENCE_S and (outcome := await channel.end()) is not None:
                self._hear(channel.name, outcome)

    async def _look_ahead(self) -> None:
        """Skips to now where the oldest record that waits is too old."""
        oldest_s, now_s = self.oldest_s, time.time()
        if oldest_s is None or now_s - oldest_s <= self._kafka.live_lag_s:
            return
        offset = await self._offset_at(round((now_s - self._kafka.live_lag_s / 2) * MS))
        if offset is not None and offset > self._buffer[0].offset:
            self._skip = offset, "live"

    def _jump(self, offset: int, reason: str) -> None:
        n_skipped = max(0, offset - self.next_offset)
        logger.warning("partition %d: %d records were skipped (%s)", self.frames.partition, n_skipped, reason)
        self._services.metrics.kafka_skipped_records.labels(reason).inc(n_skipped)
        for channel in self._channels.values():
            channel.gap_reason = "skipped" if reason == "live" else reason
            if offset < self.next_offset:
                channel.forget_offsets()
        if offset < self.next_offset:  # the topic was made anew, and its records are others
            self._read_to = offset
        self._empty()
        self.next_offset = self.want = offset
        self._skip = None

    # --- what came of it ---------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Writes alerts, dead letters, state and offset as one; they are there when it returns."""
        changed = [channel for channel in self._channels.values() if channel.is_changed]
        self._kept_at = time.monotonic()
        if not (changed or self._alerts or self._dead or self._gone or self._kept_offset != self.next_offset):
            return
        producer = self._producer
        assert producer is not None
        states = [(channel, *await channel.state()) for channel in changed]
        async with asyncio.timeout(KEEP_S):
            await producer.begin_transaction()
            await self._tell(producer)
            await self._save(producer, states)
            await self._move(producer)
            await producer.commit_transaction()
        for channel in changed:
            channel.is_changed = False
        for _, arrived_at in self._alerts:
            self._services.metrics.alert_delay.observe((datetime.now(UTC) - arrived_at).total_seconds())
        self._alerts, self._dead, self._gone = [], [], []
        self._kept_offset = self.next_offset
        self._backoff.reset()
        took_s = time.monotonic() - self._kept_at
        self._services.metrics.stage_duration.labels("keep").observe(took_s)

    async def _tell(self, producer: AIOKafkaProducer) -> None:
        sent = [await producer.send(self._kafka.alerts, **alert_record(alert)) for alert, _ in self._alerts]
        for record, bad in self._dead:
            letter = dead_letter(record, bad)
            if self._has_bare_letters:
                letter["value"] = b""
            sent.append(await producer.send(dlq_of(self.frames.topic), **letter))
        await asyncio.gather(*sent)

    async def _save(self, producer: AIOKafkaProducer, states: list[tuple[TopicChannel, bytes, Any]]) -> None:
        topic, partition = self._kafka.state, self.frames.partition
        sent = [
            await producer.send(topic, content, key=channel.name.encode(), partition=partition, headers=headers)
            for channel, content, headers in states
        ]
        sent += [await producer.send(topic, None, key=name.encode(), partition=partition) for name in self._gone]
        at = offset_value(self.next_offset, self._read_to)
        sent.append(await producer.send(topic, at, key=OFFSET_KEY, partition=partition))
        await asyncio.gather(*sent)

    async def _move(self, producer: AIOKafkaProducer) -> None:
        """Commits the offset, for whoever looks at the group from outside; we go by the state's own."""
        offsets = {self.frames: OffsetAndMetadata(self.next_offset, "")}
        await producer.send_offsets_to_transaction(offsets, self._kafka.group)
