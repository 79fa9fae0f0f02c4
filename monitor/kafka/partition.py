"""One partition of frames and its owner: records in; alerts, dead letters and state out, in one transaction.

The partition is processed in batches. A batch takes waiting records, decodes their pictures, matches the channels side
by side, and ends with every channel at the same offset. The results are committed every two seconds, and at once if
there is an alert, in one Kafka transaction: alerts, dead letters, the state of the channels that changed, and the
offset. After a crash it is there as a whole or not at all, so the next owner emits what this one would have. The
transactional id is the partition's name: once another process has taken the partition over, the broker refuses every
write of the former owner, however long it slept.

Every fault is handled in one way: drop all that is in memory, and open the partition again from the last commit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, ProducerFenced
from aiokafka.structs import OffsetAndMetadata

from monitor.alerting.alerts import Alert
from monitor.errors import MonitorError
from monitor.kafka.broker import MAX_REQUEST_BYTES, client_options, dead_letter_topic, error_text, stop_client
from monitor.kafka.channel import KafkaChannel
from monitor.kafka.records import (
    MS,
    BadRecord,
    FrameRecord,
    Headers,
    KafkaRecord,
    LastPictures,
    alert_record,
    dead_letter,
    parse_record,
)
from monitor.kafka.state import OFFSET_KEY, StoredState, offset_value, read_state
from monitor.ops.backoff import Backoff
from monitor.ops.logs import channel_logs
from monitor.runtime.boot import MatchServices
from monitor.runtime.match_step import Outcome
from monitor.runtime.runner import SILENCE_S, SNAPSHOT_EVERY_S, count_alerts

logger = logging.getLogger(__name__)

MAX_BATCH = 32  # records: an alert waits for the end of its batch
BUFFER_RECORDS, BUFFER_BYTES = 256, 32 << 20  # when full, the partition is paused
POLL_S = 0.5  # between two checks of what is due, if no record arrives
TRANSACTION_TIMEOUT_S = 30.0
FORGET_S = 86_400.0  # the state of a channel is deleted after this silence


class _Buffer:
    """The records that wait to be processed."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()  # set while there may be something to do
        self._records: deque[KafkaRecord] = deque()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_full(self) -> bool:
        return len(self._records) >= BUFFER_RECORDS or self._size_bytes >= BUFFER_BYTES

    @property
    def first(self) -> KafkaRecord | None:
        return self._records[0] if self._records else None

    def extend(self, records: Sequence[KafkaRecord]) -> None:
        self._records.extend(records)
        self._size_bytes += sum(len(record.value or b"") for record in records)
        self.arrived.set()

    def take(self, n: int) -> list[KafkaRecord]:
        """At most n records, oldest first."""
        records = [self._records.popleft() for _ in range(min(n, len(self._records)))]
        self._size_bytes -= sum(len(record.value or b"") for record in records)
        return records

    def clear(self) -> None:
        self._records.clear()
        self._size_bytes = 0
        self.arrived.clear()


@dataclass(slots=True)
class _Offsets:
    """How far the partition was processed."""

    next: int = 0  # all before it is in the state
    read_to: int = 0  # the furthest that it was read: `next` goes back if the state of a channel is refused
    committed: int | None = None


@dataclass(slots=True)
class _Results:
    """What the next transaction writes, beside the state of the channels."""

    alerts: list[tuple[Alert, datetime]] = field(default_factory=list)  # with the arrival of the deciding record
    bad_records: list[tuple[KafkaRecord, BadRecord]] = field(default_factory=list)
    removed_channels: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.alerts or self.bad_records or self.removed_channels)


class Partition:
    """`run` works until cancelled, `park` commits and pauses; the rest is for the poll loop of the consumer."""

    def __init__(
        self,
        frames: TopicPartition,
        services: MatchServices,
        readers: Executor,
        offset_at: Callable[[int], Awaitable[int | None]],
    ) -> None:
        self.frames = frames
        self.seek_to: int | None = None  # where to read next; the poll loop seeks and resets it
        self.caught_up_s: float | None = None  # since when nothing is left to read; set by the poll loop
        self._services = services
        self._metrics = services.metrics
        self._kafka = services.settings.kafka
        self._readers = readers  # threads that decode pictures
        self._offset_at = offset_at  # of the first record that is not older than this (ms)
        self._buffer = _Buffer()
        self._offsets = _Offsets()
        self._committed_s = time.monotonic()
        self._busy = asyncio.Lock()
        self._producer: AIOKafkaProducer | None = None
        self._is_open = False
        self._skip_to: tuple[int, str] | None = None  # offset and reason
        self._is_recreated = False  # the topic was
        self._channels: dict[str, KafkaChannel] = {}
        self._last_pictures: LastPictures = {}
        self._results = _Results()
        self._omits_values = False  # of dead letters, since the broker refuses large ones
        self._backoff = Backoff()

    # --- for the poll loop -------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the consumer must pause."""
        return self._buffer.is_full or not self._accepts_records

    @property
    def _accepts_records(self) -> bool:
        """Whether reading continues at the next offset."""
        return self._is_open and self._skip_to is None and not self._is_recreated

    @property
    def next_offset(self) -> int:
        """All records before it are processed."""
        return self._offsets.next

    @property
    def oldest_s(self) -> float | None:
        """The time of the oldest waiting record."""
        return self._buffer.first.timestamp / MS if self._buffer.first is not None else None

    def feed(self, records: Sequence[KafkaRecord]) -> None:
        """Adds what the consumer read, unless it must seek first."""
        if self.seek_to is None and self._accepts_records:
            self._buffer.extend(records)

    def skip(self, offset: int, reason: str) -> None:
        """Continues at another offset; the records before it become a gap."""
        self._skip_to = offset, reason
        self._buffer.arrived.set()

    def restart_topic(self) -> None:
        """Starts with the first record: the topic was deleted and created again, so stored offsets are invalid."""
        self._is_recreated = True
        self._buffer.arrived.set()

    # --- life cycle --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until cancelled; opens the partition again after every fault."""
        while True:
            try:
                if not self._is_open:
                    await self._open()
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):  # wait_for may swallow the cancel that ends this task
                            await self._buffer.arrived.wait()
                    async with self._busy:
                        await self._process_batch()
            except Exception as error:
                if isinstance(error, ProducerFenced):
                    # Another process has it: the next heartbeats say whether it is still ours.
                    self._backoff.raise_to(self._kafka.session_timeout_s / 4)
                known = isinstance(error, KafkaError | OSError | TimeoutError | MonitorError)
                logger.warning(
                    "partition %d is opened again in %.0f s: %s",
                    self.frames.partition,
                    self._backoff.next_s,
                    error_text(error),
                    exc_info=None if known else error,
                )
                self._metrics.kafka_retakes.inc()
                self._omits_values |= isinstance(error, MessageSizeTooLargeError)
                await self.close()
                await self._backoff.wait()

    async def park(self) -> None:
        """Commits everything and empties the buffer; `run` may be called again."""
        async with self._busy:
            if self._is_open:
                await self._commit()
                self._buffer.clear()
                self.seek_to = self.next_offset

    async def close(self) -> None:
        """Drops what is in memory. The next owner finds again what was not committed."""
        self._is_open = False
        self._buffer.clear()
        for name in self._channels:
            self._metrics.forget(name)
        self._channels, self._last_pictures, self._results = {}, {}, _Results()
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await stop_client(producer)

    async def _open(self) -> None:
        """Fences off the previous owner, then reads the state that it left: in this order."""
        await self.close()  # opening may have failed half-way
        self._producer = AIOKafkaProducer(
            **client_options(self._kafka),
            transactional_id=f"{self._kafka.group}.{self.frames.topic}.{self.frames.partition}",
            max_request_size=MAX_REQUEST_BYTES,
            request_timeout_ms=int(TRANSACTION_TIMEOUT_S * MS),
        )
        async with asyncio.timeout(TRANSACTION_TIMEOUT_S):
            await self._producer.start()
            await self._producer.begin_transaction()  # returns once the broker has fenced off all earlier producers
            await self._producer.abort_transaction()
        stored = await read_state(self._kafka, self.frames)
        alerts = await asyncio.get_running_loop().run_in_executor(self._readers, self._restore, stored)
        self._results.alerts = [(alert, datetime.now(UTC)) for alert in alerts]
        self._start_at(stored)
        self._committed_s = time.monotonic()
        logger.info(
            "partition %d continues at offset %d with %d channels",
            self.frames.partition,
            self.next_offset,
            len(self._channels),
        )

    def _start_at(self, stored: StoredState) -> None:
        """Continues where the state ends, or earlier if a channel must be replayed."""
        offset = stored.first if stored.offset is None else stored.offset
        self._offsets = _Offsets(offset, max(offset, stored.read_to), stored.offset)
        self._skip_to = None
        if stored.first <= offset <= stored.end:
            replays = (channel.replay_from for channel in self._channels.values())
            self._offsets.next = min([offset, *(replay for replay in replays if replay is not None)])
        else:
            self.skip(stored.first, "expired")
        self.seek_to, self._is_open = self._offsets.next, True

    def _restore(self, stored: StoredState) -> list[Alert]:
        alerts: list[Alert] = []
        for name, (content, headers) in stored.channels.items():
            with channel_logs(name):
                alerts += self._channel(name).restore(content, headers, stored.first)
        return alerts

    def _channel(self, name: str) -> KafkaChannel:
        if name not in self._channels:
            self._channels[name] = KafkaChannel(name, self._services)
        return self._channels[name]

    # --- a batch -----------------------------------------------------------------------------------------------------

    async def _process_batch(self) -> None:
        if self._kafka.policy == "live":
            await self._skip_if_behind()
        if self._is_recreated:
            self._is_recreated = False
            self._jump(0, "expired")
        elif self._skip_to is not None:
            self._jump(*self._skip_to)
        if records := self._buffer.take(MAX_BATCH):
            await self._process([record for record in records if not self._is_processed(record)])
            self._offsets.next = records[-1].offset + 1
            self._offsets.read_to = max(self._offsets.read_to, self._offsets.next)
        if not self._buffer:
            self._buffer.arrived.clear()
        await self._end_silent_channels()
        if self._results.alerts or time.monotonic() - self._committed_s >= SNAPSHOT_EVERY_S:
            await self._commit()

    def _is_processed(self, record: KafkaRecord) -> bool:
        """Whether it is in the state of its channel already: it is read again for another channel's replay."""
        channel = self._channels.get((record.key or b"").decode("utf-8", "replace"))
        return record.offset < (self._offsets.read_to if channel is None else channel.next_offset)

    async def _process(self, records: list[KafkaRecord]) -> None:
        loop = asyncio.get_running_loop()
        by_channel: dict[str, list[FrameRecord]] = {}
        parsed = await loop.run_in_executor(self._readers, self._parse, records)
        for record, frame in zip(records, parsed, strict=True):
            if isinstance(frame, BadRecord):
                if record.offset < self._offsets.read_to:
                    continue  # it is among the dead letters already
                self._metrics.kafka_dead_letters.labels(frame.reason).inc()
                self._results.bad_records.append((record, frame))
            else:
                by_channel.setdefault(frame.channel, []).append(frame)
        work = [self._process_channel(name, frames) for name, frames in by_channel.items()]
        for name, outcomes in zip(by_channel, await asyncio.gather(*work), strict=True):
            for outcome in outcomes:
                self._add_outcome(name, outcome)

    def _parse(self, records: list[KafkaRecord]) -> list[FrameRecord | BadRecord]:
        """Each record parsed, or its error. Blocks."""
        encoder_id = self._services.models.encoder.encoder_id
        parsed: list[FrameRecord | BadRecord] = []
        for record in records:
            try:
                parsed.append(parse_record(record, encoder_id, self._last_pictures))
            except BadRecord as bad:
                parsed.append(bad)
        return parsed

    async def _process_channel(self, name: str, records: list[FrameRecord]) -> list[Outcome]:
        """The outcomes of one channel's records, processed one after the other."""
        channel = self._channel(name)
        with channel_logs(name):
            outcomes = [await channel.process(record) for record in records]
        return [outcome for outcome in outcomes if outcome is not None]

    def _add_outcome(self, channel: str, outcome: Outcome) -> None:
        count_alerts(channel, outcome, self._metrics)
        self._results.alerts += [(alert, outcome.arrived_at) for alert in outcome.alerts]

    async def _end_silent_channels(self) -> None:
        """Ends channels that send nothing any more, once all records of the broker are processed."""
        now_s = time.monotonic()
        if self.caught_up_s is None or now_s - self.caught_up_s < SILENCE_S or self._buffer:
            return
        for channel in list(self._channels.values()):
            silent_s = now_s - channel.last_record_s
            if silent_s > FORGET_S:
                self._results.removed_channels.append(channel.name)
                self._metrics.forget(channel.name)
                del self._channels[channel.name]
            elif channel.ends_by_silence and silent_s > SILENCE_S and (outcome := await channel.end()) is not None:
                self._add_outcome(channel.name, outcome)

    async def _skip_if_behind(self) -> None:
        """Skips to recent records if the oldest waiting one is too old."""
        first, now_s = self._buffer.first, time.time()
        if first is None or now_s - first.timestamp / MS <= self._kafka.live_lag_s:
            return
        offset = await self._offset_at(round((now_s - self._kafka.live_lag_s / 2) * MS))
        if offset is not None and offset > first.offset:
            self._skip_to = offset, "live"

    def _jump(self, offset: int, reason: str) -> None:
        goes_back = offset < self._offsets.next  # the topic was created again: its records are new ones
        n_skipped = max(0, offset - self._offsets.next)
        logger.warning("partition %d: skipped %d records (%s)", self.frames.partition, n_skipped, reason)
        self._metrics.kafka_skipped_records.labels(reason).inc(n_skipped)
        for channel in self._channels.values():
            channel.gap_reason = "skipped" if reason == "live" else reason
            if goes_back:
                channel.forget_offsets()
        if goes_back:
            self._offsets.read_to = offset
        self._buffer.clear()
        self._offsets.next = self.seek_to = offset
        self._skip_to = None

    # --- the transaction ---------------------------------------------------------------------------------------------

    async def _commit(self) -> None:
        """Writes alerts, dead letters, state and offset in one transaction; they are stored when it returns."""
        changed = [channel for channel in self._channels.values() if channel.is_changed]
        self._committed_s = time.monotonic()
        if not (changed or self._results or self._offsets.committed != self._offsets.next):
            return
        producer = self._producer
        assert producer is not None
        states = [(channel.name, *await channel.state_record()) for channel in changed]
        async with asyncio.timeout(TRANSACTION_TIMEOUT_S):
            await producer.begin_transaction()
            await self._send_results(producer)
            await self._send_state(producer, states)
            await self._send_offset(producer)
            await producer.commit_transaction()
        for channel in changed:
            channel.is_changed = False
        for _, arrived_at in self._results.alerts:
            self._metrics.alert_delay.observe((datetime.now(UTC) - arrived_at).total_seconds())
        self._results = _Results()
        self._offsets.committed = self._offsets.next
        self._backoff.reset()
        self._metrics.stage_duration.labels("keep").observe(time.monotonic() - self._committed_s)

    async def _send_results(self, producer: AIOKafkaProducer) -> None:
        alerts, bad_records = self._results.alerts, self._results.bad_records
        sent = [await producer.send(self._kafka.alerts, **alert_record(alert)) for alert, _ in alerts]
        for record, bad in bad_records:
            letter = dead_letter(record, bad)
            if self._omits_values:
                letter["value"] = b""
            sent.append(await producer.send(dead_letter_topic(self.frames.topic), **letter))
        await asyncio.gather(*sent)

    async def _send_state(self, producer: AIOKafkaProducer, states: list[tuple[str, bytes, Headers]]) -> None:
        topic, partition = self._kafka.state, self.frames.partition
        sent = [
            await producer.send(topic, content, key=name.encode(), partition=partition, headers=headers)
            for name, content, headers in states
        ]
        for name in self._results.removed_channels:
            sent.append(await producer.send(topic, None, key=name.encode(), partition=partition))
        offsets = offset_value(self._offsets.next, self._offsets.read_to)
        sent.append(await producer.send(topic, offsets, key=OFFSET_KEY, partition=partition))
        await asyncio.gather(*sent)

    async def _send_offset(self, producer: AIOKafkaProducer) -> None:
        """Commits the offset of the group, for tools that monitor its lag; we read the one in the state."""
        offsets = {self.frames: OffsetAndMetadata(self.next_offset, "")}
        await producer.send_offsets_to_transaction(offsets, self._kafka.group)
