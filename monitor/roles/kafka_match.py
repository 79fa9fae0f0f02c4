"""The role `match`: one member of the consumer group that shares out the partitions of frames.

Kafka's own group protocol says who has which partition; each has a task of its own (`partition.py`). One loop polls for
all of them and alone touches the consumer: it seeks, pauses what is full and hands over what came, so a member that
is behind stays a member. Nothing that computes runs on the event loop, since heartbeats share it. A client that gets
nowhere for a minute is made anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError
from prometheus_client import CollectorRegistry

from monitor.alerting.reviews import watch_rights
from monitor.config.settings import KafkaSettings, Settings
from monitor.errors import Unreachable
from monitor.kafka.broker import (
    ANSWER_S,
    connection,
    dlq_of,
    ensure_topics,
    in_words,
    put_away,
    until_reached,
)
from monitor.kafka.partition import Partition
from monitor.kafka.records import MS
from monitor.ops.backoff import Backoff
from monitor.ops.health import set_problem
from monitor.ops.metrics import Metrics
from monitor.ops.process import stop_on_signals
from monitor.ops.systemd import notify
from monitor.runtime.boot import MatchServices, boot
from monitor.web.server import serve_probes

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between two looks at what partitions want
FETCH_BYTES = 4 << 20  # of one partition at once; a larger record comes alone
ASK_EVERY_S = 5.0  # whether the broker answers
FRESH_S = 5.0  # a look at a partition's end is no older than this, or it says nothing
GIVE_UP_S = 60.0  # without progress, and the time of a rebalance, after which the client is made anew
READERS = 2  # threads that decode pictures
REFRESH_METADATA_S = 60.0  # new partitions are seen as soon as this


async def match(
    settings: Settings, *, stop: asyncio.Event | None = None, on_ready: Callable[[str], None] | None = None
) -> None:
    """Matches whatever partitions it is given until SIGTERM, SIGINT or `stop`."""
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    metrics = Metrics(CollectorRegistry())
    connection(settings.kafka)  # says what is wrong before seconds are spent on loading
    services = await boot(settings, metrics)
    library, problems = services.library, services.problems
    member = MatchMember(services, partial(set_problem, problems, "kafka"), stop)
    try:
        async with (
            serve_probes(settings.web, metrics, services.health("kafka")) as address,
            asyncio.TaskGroup() as tasks,
        ):
            refreshing = tasks.create_task(services.refresh_index())
            watching_rights = tasks.create_task(watch_rights(services.rights, library, metrics, problems))
            state = f"matching against {len(library.index.references)} references"
            logger.info("%s; health at %s", state, address)
            notify("READY=1", f"STATUS={state}")
            if on_ready is not None:
                on_ready(address)
            await member.run()
            refreshing.cancel()
            watching_rights.cancel()
    finally:
        services.close()
        member.close()


class MatchMember(ConsumerRebalanceListener):  # type: ignore[misc]
    """One member for life, whatever becomes of its connections."""

    def __init__(self, services: MatchServices, complain: Callable[[str | None], None], stop: asyncio.Event) -> None:
        self._services = services
        self._kafka: KafkaSettings = services.settings.kafka
        self._metrics = services.metrics
        self._complain = complain
        self._stop = stop
        self._readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="read")
        self._consumer: AIOKafkaConsumer | None = None
        self._partitions: dict[TopicPartition, tuple[Partition, asyncio.Task[None]]] = {}
        self._parked: dict[TopicPartition, Partition] = {}
        self._moved_s = time.monotonic()  # when something came, or nothing was left to come
        self._was_gone = False  # the topic was deleted; its partitions, once they are back, are others

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def run(self) -> None:
        """Returns once told to stop, with all that is known kept."""
        kafka = self._kafka
        topics = [kafka.frames, kafka.alerts, kafka.state, dlq_of(kafka.frames)]
        backoff = Backoff()
        self._metrics.kafka_up.set(0)
        if not await until_reached(partial(ensure_topics, kafka, topics), self._complain, self._stop):
            return
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                await self._life()
            except* (KafkaError, OSError, TimeoutError, Unreachable) as errors:
                words = "; ".join(in_words(error) for error in errors.exceptions)
                logger.error("the client is made anew in %.0f s: %s", backoff.next_s, words)
                self._tell(words)
            if time.monotonic() - began_s > GIVE_UP_S:
                backoff.reset()
            await backoff.wait(self._stop)

    def _tell(self, complaint: str | None) -> None:
        self._metrics.kafka_up.set(complaint is None)
        self._complain(complaint)

    async def _life(self) -> None:
        """One client, from its start to its end."""
        kafka = self._kafka
        self._consumer = consumer = AIOKafkaConsumer(
            **connection(kafka),
            group_id=kafka.group,
            group_instance_id=kafka.instance,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            partition_assignment_strategy=(StickyPartitionAssignor,),
            session_timeout_ms=round(kafka.session_timeout_s * MS),
            heartbeat_interval_ms=round(kafka.session_timeout_s * MS / 10),
            rebalance_timeout_ms=round(kafka.rebalance_timeout_s * MS),
            max_partition_fetch_bytes=FETCH_BYTES,
            metadata_max_age_ms=round(REFRESH_METADATA_S * MS),
        )
        self._moved_s = time.monotonic()
        try:
            await asyncio.wait_for(consumer.start(), GIVE_UP_S)
            consumer.subscribe([kafka.frames], listener=self)
            async with asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(self._ask(consumer))
                await self._poll(consumer)
                asking.cancel()
        finally:
            await self._park(list(self._partitions))  # before others are given them
            await put_away(consumer)
            await self._let_go()  # of what a rebalance brought meanwhile, too

    async def _let_go(self) -> None:
        await self._park(list(self._partitions))
        parked, self._parked = self._parked, {}
        for partition in parked.values():
            await partition.close()
        self._metrics.kafka_partitions.set(0)

    async def _ask(self, consumer: AIOKafkaConsumer) -> None:
        """Asks the broker now and then whether it is there; raises Unreachable where nothing moves for too long."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    topics = await consumer.topics()
                self._look_for_topic(topics)
            except (KafkaError, OSError, TimeoutError) as error:
                self._tell(f"the broker does not answer ({in_words(error)})")
            patience_s = GIVE_UP_S + self._kafka.rebalance_timeout_s  # while partitions are spread nothing comes
            if time.monotonic() - self._moved_s > patience_s:
                raise Unreachable(f"nothing came for {patience_s:.0f} s though there is something to read")
            await asyncio.sleep(ASK_EVERY_S)

    def _look_for_topic(self, topics: Collection[str]) -> None:
        if self._kafka.frames in topics:
            self._tell(None)
            self._renew()
        else:
            self._tell(f"the topic {self._kafka.frames} is gone; make it again, and reading goes on")
            self._was_gone = True

    def _renew(self) -> None:
        """Has every partition of a topic that was made anew begin with its first record, once they are there."""
        if self._was_gone and self._partitions:
            self._was_gone = False
            for partition, _ in self._partitions.values():
                partition.renew()

    # --- polling -----------------------------------------------------------------------------------------------------

    async def _poll(self, consumer: AIOKafkaConsumer) -> None:
        while not self._stop.is_set():
            self._steer(consumer)
            try:
                came = await consumer.getmany(timeout_ms=round(POLL_S * MS))
            except OffsetOutOfRangeError as error:
                for frames in error.args[0]:
                    await self._expired(consumer, frames)
                continue
            except NoOffsetForPartitionError:
                continue  # a new partition; its task knows where to begin
            for frames, records in came.items():
                if frames in self._partitions:
                    self._partitions[frames][0].feed(records)
            if came:
                self._moved_s = time.monotonic()
            self._measure(consumer)

    def _steer(self, consumer: AIOKafkaConsumer) -> None:
        """Does what partitions want: read elsewhere, wait, go on."""
        for frames, (partition, _) in self._partitions.items():
            if frames not in consumer.assignment():
                continue
            if partition.want is not None:
                consumer.seek(frames, partition.want)
                partition.want = None
            (consumer.pause if partition.is_full else consumer.resume)(frames)

    async def _expired(self, consumer: AIOKafkaConsumer, frames: TopicPartition) -> None:
        """The broker has deleted what was to be read next."""
        if frames in self._partitions:
            first = (await consumer.beginning_offsets([frames]))[frames]
            self._partitions[frames][0].skip(first, "expired")

    def _measure(self, consumer: AIOKafkaConsumer) -> None:
        now_s, is_stuck = time.time(), False
        for frames, (partition, _) in self._partitions.items():
            if frames not in consumer.assignment():
                continue
            end, looked_ms = consumer.highwater(frames), consumer.last_poll_timestamp(frames)
            is_fresh = looked_ms is not None and now_s - looked_ms / MS < FRESH_S
            lag = max(0, end - partition.next_offset) if end is not None else 0
            if lag or not is_fresh:
                partition.caught_up_s = None
            elif partition.caught_up_s is None:
                partition.caught_up_s = time.monotonic()
            name, oldest_s = str(frames.partition), partition.oldest_s
            self._metrics.kafka_lag_records.labels(name).set(lag)
            if not lag or oldest_s is not None:  # else more is on its way, of an age that is not known yet
                lag_s = max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0
                self._metrics.kafka_lag_seconds.labels(name).set(lag_s)
            is_stuck |= not partition.is_full and (lag > 0 or not is_fresh)
        if not is_stuck:
            self._moved_s = time.monotonic()

    # --- who has what ------------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """All are brought to rest; those that come back go on from memory, since nobody can have had them meanwhile
        without the broker refusing what we then write."""
        await self._park(list(revoked))

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        consumer = self._consumer
        assert consumer is not None
        self._metrics.kafka_rebalances.inc()
        for frames in assigned:
            consumer.seek(frames, 0)  # its task knows better and says so; until then it is not read
            consumer.pause(frames)
            partition = self._parked.pop(frames, None) or self._new(frames)
            self._partitions[frames] = partition, asyncio.create_task(partition.run())
        self._renew()
        parked, self._parked = self._parked, {}
        for frames, partition in parked.items():
            self._forget(frames)
            await partition.close()
        self._metrics.kafka_partitions.set(len(self._partitions))
        logger.info("partitions now: %s", sorted(frames.partition for frames in self._partitions) or "none")

    def _new(self, frames: TopicPartition) -> Partition:
        return Partition(frames, self._services, self._readers, partial(self._offset_at, frames))

    async def _park(self, wanted: list[TopicPartition]) -> None:
        """Keeps what each knows, within half the time that a rebalance may take; who is later is dropped."""
        there = {frames: self._partitions.pop(frames) for frames in wanted if frames in self._partitions}
        resting = (self._bring_to_rest(frames, *both) for frames, both in there.items())
        await asyncio.gather(*resting, return_exceptions=True)

    async def _bring_to_rest(self, frames: TopicPartition, partition: Partition, task: asyncio.Task[None]) -> None:
        """Parks one; its task is over when this returns, even where it is cancelled: two would fight over it."""
        failed: BaseException | None = None
        try:
            await asyncio.wait_for(partition.park(), self._kafka.rebalance_timeout_s / 2)
        except (Exception, asyncio.CancelledError) as error:
            failed = error
        task.cancel()
        await asyncio.wait({task})
        if failed is not None:
            logger.warning("partition %d could not be kept: %s", frames.partition, in_words(failed))
            await partition.close()
        self._parked[frames] = partition

    async def _offset_at(self, frames: TopicPartition, time_ms: int) -> int | None:
        """The offset of the first record that is no older; that of the end where none is."""
        assert self._consumer is not None
        found = (await self._consumer.offsets_for_times({frames: time_ms}))[frames]
        if found is not None:
            return int(found.offset)
        return int((await self._consumer.end_offsets([frames]))[frames])

    def _forget(self, frames: TopicPartition) -> None:
        name = str(frames.partition)
        for family in (self._metrics.kafka_lag_records, self._metrics.kafka_lag_seconds):
            with suppress(KeyError):
                family.remove(name)
