"""The role `match`: one member of the consumer group that shares the partitions of frames.

Kafka's group protocol assigns the partitions; each has a task of its own (`partition.py`). One loop polls for all of
them and alone uses the consumer: it seeks, pauses full partitions and passes records on, so a member that is behind
stays in the group. No computation runs on the event loop, since heartbeats share it. A client without progress for a
minute is replaced.
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
    REQUEST_TIMEOUT_S,
    client_options,
    dead_letter_topic,
    ensure_topics,
    error_text,
    retry_until_reached,
    stop_client,
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

POLL_S = 0.1
FETCH_BYTES = 4 << 20  # of one partition at once; a larger record is fetched alone
CHECK_EVERY_S = 5.0  # whether the broker answers
FRESH_S = 5.0  # a known end of a partition is out of date after this
GIVE_UP_S = 60.0  # without progress, plus the time of a rebalance, after which the client is replaced
READERS = 2  # threads that decode pictures
REFRESH_METADATA_S = 60.0  # new partitions are found within this


async def match(
    settings: Settings, *, stop: asyncio.Event | None = None, on_ready: Callable[[str], None] | None = None
) -> None:
    """Matches the assigned partitions until SIGTERM, SIGINT or `stop`."""
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    metrics = Metrics(CollectorRegistry())
    client_options(settings.kafka)  # raises ConfigError before seconds are spent on loading
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
    """The member and its partitions; it survives the loss of its connections."""

    def __init__(
        self, services: MatchServices, report_problem: Callable[[str | None], None], stop: asyncio.Event
    ) -> None:
        self._services = services
        self._kafka: KafkaSettings = services.settings.kafka
        self._metrics = services.metrics
        self._report_problem = report_problem
        self._stop = stop
        self._readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="read")
        self._consumer: AIOKafkaConsumer | None = None
        self._partitions: dict[TopicPartition, tuple[Partition, asyncio.Task[None]]] = {}
        self._parked: dict[TopicPartition, Partition] = {}
        self._progress_s = time.monotonic()  # when records arrived last, or none were left
        self._topic_was_deleted = False  # once it is back, its partitions are new ones

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def run(self) -> None:
        """Returns after `stop` was set, with everything committed."""
        kafka = self._kafka
        topics = [kafka.frames, kafka.alerts, kafka.state, dead_letter_topic(kafka.frames)]
        backoff = Backoff()
        self._metrics.kafka_up.set(0)
        if not await retry_until_reached(partial(ensure_topics, kafka, topics), self._report_problem, self._stop):
            return
        while not self._stop.is_set():
            started_s = time.monotonic()
            try:
                await self._run_client()
            except* (KafkaError, OSError, TimeoutError, Unreachable) as errors:
                text = "; ".join(error_text(error) for error in errors.exceptions)
                logger.error("reconnecting in %.0f s: %s", backoff.next_s, text)
                self._report(text)
            if time.monotonic() - started_s > GIVE_UP_S:
                backoff.reset()
            await backoff.wait(self._stop)

    def _report(self, problem: str | None) -> None:
        self._metrics.kafka_up.set(problem is None)
        self._report_problem(problem)

    async def _run_client(self) -> None:
        """Runs one client, from its start to its end."""
        kafka = self._kafka
        self._consumer = consumer = AIOKafkaConsumer(
            **client_options(kafka),
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
        self._progress_s = time.monotonic()
        try:
            await asyncio.wait_for(consumer.start(), GIVE_UP_S)
            consumer.subscribe([kafka.frames], listener=self)
            async with asyncio.TaskGroup() as tasks:
                checking = tasks.create_task(self._check_broker(consumer))
                await self._poll(consumer)
                checking.cancel()
        finally:
            await self._park(list(self._partitions))  # before they are assigned to others
            await stop_client(consumer)
            await self._release()  # also what a rebalance assigned meanwhile

    async def _release(self) -> None:
        await self._park(list(self._partitions))
        parked, self._parked = self._parked, {}
        for partition in parked.values():
            await partition.close()
        self._metrics.kafka_partitions.set(0)

    async def _check_broker(self, consumer: AIOKafkaConsumer) -> None:
        """Checks regularly that the broker answers. Raises Unreachable after too long without progress."""
        while True:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    topics = await consumer.topics()
                self._check_topic(topics)
            except (KafkaError, OSError, TimeoutError) as error:
                self._report(f"the broker does not answer ({error_text(error)})")
            limit_s = GIVE_UP_S + self._kafka.rebalance_timeout_s  # no records arrive during a rebalance
            if time.monotonic() - self._progress_s > limit_s:
                raise Unreachable(f"no records arrived for {limit_s:.0f} s, though there are some to read")
            await asyncio.sleep(CHECK_EVERY_S)

    def _check_topic(self, topics: Collection[str]) -> None:
        if self._kafka.frames in topics:
            self._report(None)
            self._restart_partitions()
        else:
            self._report(f"the topic {self._kafka.frames} does not exist; create it again to continue")
            self._topic_was_deleted = True

    def _restart_partitions(self) -> None:
        """After the topic was created again, starts every partition with its first record."""
        if self._topic_was_deleted and self._partitions:
            self._topic_was_deleted = False
            for partition, _ in self._partitions.values():
                partition.restart_topic()

    # --- polling -----------------------------------------------------------------------------------------------------

    async def _poll(self, consumer: AIOKafkaConsumer) -> None:
        while not self._stop.is_set():
            self._control(consumer)
            try:
                batches = await consumer.getmany(timeout_ms=round(POLL_S * MS))
            except OffsetOutOfRangeError as error:
                for frames in error.args[0]:
                    await self._skip_expired(consumer, frames)
                continue
            except NoOffsetForPartitionError:
                continue  # a new partition; its task knows where to start
            for frames, records in batches.items():
                if frames in self._partitions:
                    self._partitions[frames][0].feed(records)
            if batches:
                self._progress_s = time.monotonic()
            self._update_lag(consumer)

    def _control(self, consumer: AIOKafkaConsumer) -> None:
        """Seeks, pauses and resumes as the partitions ask."""
        for frames, (partition, _) in self._partitions.items():
            if frames not in consumer.assignment():
                continue
            if partition.seek_to is not None:
                consumer.seek(frames, partition.seek_to)
                partition.seek_to = None
            (consumer.pause if partition.is_full else consumer.resume)(frames)

    async def _skip_expired(self, consumer: AIOKafkaConsumer, frames: TopicPartition) -> None:
        """Continues at the first record that the broker still has."""
        if frames in self._partitions:
            first = (await consumer.beginning_offsets([frames]))[frames]
            self._partitions[frames][0].skip(first, "expired")

    def _update_lag(self, consumer: AIOKafkaConsumer) -> None:
        now_s, is_stuck = time.time(), False
        for frames, (partition, _) in self._partitions.items():
            if frames not in consumer.assignment():
                continue
            end, polled_ms = consumer.highwater(frames), consumer.last_poll_timestamp(frames)
            is_fresh = polled_ms is not None and now_s - polled_ms / MS < FRESH_S
            lag = max(0, end - partition.next_offset) if end is not None else 0
            if lag or not is_fresh:
                partition.caught_up_s = None
            elif partition.caught_up_s is None:
                partition.caught_up_s = time.monotonic()
            name, oldest_s = str(frames.partition), partition.oldest_s
            self._metrics.kafka_lag_records.labels(name).set(lag)
            if not lag or oldest_s is not None:  # else records of unknown age are being fetched
                lag_s = max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0
                self._metrics.kafka_lag_seconds.labels(name).set(lag_s)
            is_stuck |= not partition.is_full and (lag > 0 or not is_fresh)
        if not is_stuck:
            self._progress_s = time.monotonic()

    # --- assignment --------------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Parks them all. Those that are assigned again continue from memory: had another process owned one meanwhile,
        the broker would refuse our next write."""
        await self._park(list(revoked))

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        consumer = self._consumer
        assert consumer is not None
        self._metrics.kafka_rebalances.inc()
        for frames in assigned:
            consumer.seek(frames, 0)  # until its task, which knows the offset, is open
            consumer.pause(frames)
            partition = self._parked.pop(frames, None) or self._new_partition(frames)
            self._partitions[frames] = partition, asyncio.create_task(partition.run())
        self._restart_partitions()
        parked, self._parked = self._parked, {}
        for frames, partition in parked.items():
            self._remove_lag(frames)
            await partition.close()
        self._metrics.kafka_partitions.set(len(self._partitions))
        logger.info("assigned partitions: %s", sorted(frames.partition for frames in self._partitions) or "none")

    def _new_partition(self, frames: TopicPartition) -> Partition:
        return Partition(frames, self._services, self._readers, partial(self._offset_at, frames))

    async def _park(self, wanted: list[TopicPartition]) -> None:
        """Commits each within half the time that a rebalance may take; a slower one is closed without."""
        owned = {frames: self._partitions.pop(frames) for frames in wanted if frames in self._partitions}
        work = [self._park_one(frames, *owned[frames]) for frames in owned]
        await asyncio.gather(*work, return_exceptions=True)

    async def _park_one(self, frames: TopicPartition, partition: Partition, task: asyncio.Task[None]) -> None:
        """Parks one. Its task has ended when this returns, even if cancelled, so that never two tasks run it."""
        failed: BaseException | None = None
        try:
            await asyncio.wait_for(partition.park(), self._kafka.rebalance_timeout_s / 2)
        except (Exception, asyncio.CancelledError) as error:
            failed = error
        task.cancel()
        await asyncio.wait({task})
        if failed is not None:
            logger.warning("could not commit partition %d: %s", frames.partition, error_text(failed))
            await partition.close()
        self._parked[frames] = partition

    async def _offset_at(self, frames: TopicPartition, time_ms: int) -> int | None:
        """The offset of the first record that is not older; the end if there is none."""
        assert self._consumer is not None
        found = (await self._consumer.offsets_for_times({frames: time_ms}))[frames]
        if found is not None:
            return int(found.offset)
        return int((await self._consumer.end_offsets([frames]))[frames])

    def _remove_lag(self, frames: TopicPartition) -> None:
        name = str(frames.partition)
        for family in (self._metrics.kafka_lag_records, self._metrics.kafka_lag_seconds):
            with suppress(KeyError):
                family.remove(name)
