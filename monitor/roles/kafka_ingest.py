"""The role `ingest`: channels in, one record a second of each out to the topic of frames.

Decoding is that of `serve`: a killable child and a buffer per channel. Each channel sends its next second when the
broker has the last one, so seconds stay in order and nothing piles up: while the broker is away the channel's own
buffer fills, and then forgets its oldest seconds, each counted. Channels come from the configuration, or from the
compacted topic of channels, whose partitions the members of a group share out (`sharing.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry

from monitor import __version__
from monitor.config.settings import ChannelSettings, KafkaSettings, Settings
from monitor.ingest.sources import Sample, Source
from monitor.kafka.broker import (
    ANSWER_S,
    connection,
    ensure_topics,
    in_words,
    put_away,
    until_reached,
)
from monitor.kafka.channel_assignment import ChannelAssignment
from monitor.kafka.records import MAX_VALUE_BYTES, MS, end_of, record_of
from monitor.ops.backoff import Backoff
from monitor.ops.health import Health, set_problem
from monitor.ops.metrics import Metrics
from monitor.ops.process import stop_on_signals
from monitor.ops.systemd import notify
from monitor.runtime.channel_roster import ChannelRoster, open_source, run_channel, watch_config
from monitor.web.server import serve_probes
from reference_db.features.encoder import Encoder, is_informative, load_encoder

logger = logging.getLogger(__name__)

LAST_S = 5.0  # that the last records may take when we stop
GIVE_UP_S = 60.0  # without an answer, after which the client is made anew
SILENT = "the broker does not take records (it does not answer)"
PACKERS = 1  # threads that compress pictures or encode them


async def ingest(
    settings: Settings,
    *,
    config: Path | None = None,
    features: bool = False,
    shared: bool = False,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[str], None] | None = None,
    real_time: bool = True,
) -> None:
    """Publishes every channel until SIGTERM, SIGINT or `stop`: pictures, or feature rows with `features`.

    With `shared` the channels are those of the topic, spread over all who run so; else those of the settings.
    """
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    kafka, metrics, problems = settings.kafka, Metrics(CollectorRegistry()), dict[str, str]()
    complain = partial(set_problem, problems, "kafka")
    encoder = await asyncio.to_thread(load_encoder, settings.encoder, threads=settings.compute.threads)
    metrics.build_info.labels(__version__, encoder.encoder_id).set(1)
    publisher = Publisher(kafka, metrics, complain, stop)
    packing = _Packing(encoder if features else None)
    health = Health(problems, ("kafka",), {}, vital=())
    moved: set[str] = set()  # channels that another member goes on with

    def publish(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        source = open_source(channel, metrics, real_time=real_time)
        goes_on = lambda: stop.is_set() or channel.name in moved  # noqa: E731
        work = partial(_publish, source, packing, publisher, metrics, goes_on)
        return source, run_channel(source.channel, _nothing, work, stop)

    try:
        async with serve_probes(settings.web, metrics, health) as address, asyncio.TaskGroup() as tasks:
            roster = ChannelRoster(tasks, publish, metrics)
            logger.info("publishing to %s; health at %s", kafka.frames, address)
            notify("READY=1", f"STATUS=publishing to {kafka.frames}")
            if on_ready is not None:
                on_ready(address)
            topics = [kafka.frames, kafka.channels] if shared else [kafka.frames]
            background: list[asyncio.Task[None]] = []
            if await until_reached(partial(ensure_topics, kafka, topics), complain, stop):
                metrics.kafka_up.set(1)
                if shared:
                    background.append(
                        tasks.create_task(ChannelAssignment(kafka, roster, metrics, complain, moved).run())
                    )
                else:
                    await roster.update(settings.channels)
                    background.append(tasks.create_task(watch_config(config, settings.data_dir, roster)))
                await stop.wait()
            for task in background:
                task.cancel()
            await asyncio.wait(background) if background else None
            await roster.update([])
    finally:
        packing.close()
        await publisher.close()


async def _nothing() -> None:
    """There is nothing to go on from: the matchers know."""


class _Packing:
    """Samples to records, in threads of its own."""

    def __init__(self, encoder: Encoder | None) -> None:
        self._encoder = encoder  # None: pictures are sent
        self._pool = ThreadPoolExecutor(max_workers=PACKERS, thread_name_prefix="pack")

    async def pack(self, sample: Sample) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._pack, sample)

    def _pack(self, sample: Sample) -> dict[str, Any]:
        if self._encoder is None:
            return record_of(sample)
        picture = sample.frame.picture
        encoded = self._encoder.encode([picture])[0], is_informative(picture)
        return record_of(sample, encoded, self._encoder.encoder_id)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _publish(
    source: Source, packing: _Packing, publisher: Publisher, metrics: Metrics, goes_on: Callable[[], bool]
) -> None:
    """All of one source, then the word that it has ended, unless somebody else goes on with it."""
    status = metrics.channels.of(source.channel)
    last: Sample | None = None
    async with aclosing(source.samples()) as samples:
        async for sample in samples:
            sent = False
            try:
                sent = await publisher.send(await packing.pack(sample))
            finally:
                status.count_processed() if sent else status.count_dropped("stopped")
            if not sent:
                break
            last = sample
            status.set_lag((datetime.now(UTC) - sample.arrived_at).total_seconds())
    if last is not None and not goes_on():
        pts_ms = last.second * MS + MS - 1
        await publisher.send(end_of(source.channel, pts_ms, last.epoch.name, datetime.now(UTC)))


class Publisher:
    """Sends records to the topic of frames, each until the broker has it; a client that is broken is made anew."""

    def __init__(
        self, kafka: KafkaSettings, metrics: Metrics, complain: Callable[[str | None], None], stop: asyncio.Event
    ) -> None:
        self._kafka = kafka
        self._metrics = metrics
        self._complain = complain
        self._stop = stop
        self._producer: AIOKafkaProducer | None = None
        self._making = asyncio.Lock()
        self._is_up = True

    async def send(self, record: dict[str, Any]) -> bool:
        """Returns when the broker has it; False where it could not be reached before we had to stop."""
        backoff, stop_at_s = Backoff(), None
        while True:
            if self._stop.is_set():
                stop_at_s = stop_at_s or time.monotonic() + LAST_S
                if time.monotonic() > stop_at_s:
                    return False
            producer: AIOKafkaProducer | None = None
            # The client tries again by itself, for as long as it is let, and says nothing meanwhile.
            silent = asyncio.get_running_loop().call_later(ANSWER_S, self._tell, SILENT)
            try:
                async with asyncio.timeout(GIVE_UP_S if stop_at_s is None else LAST_S):
                    producer = await self._ready()
                    await producer.send_and_wait(self._kafka.frames, **record)
                self._tell(None)
                return True
            except (KafkaError, OSError, TimeoutError) as error:
                self._tell(f"the broker does not take records ({in_words(error)})")
                await self._drop(producer)
            finally:
                silent.cancel()
            await backoff.wait(self._stop)

    async def close(self) -> None:
        await self._drop(self._producer)

    def _tell(self, complaint: str | None) -> None:
        if complaint is not None and self._is_up:
            logger.warning("%s; trying until it does", complaint)
        self._is_up = complaint is None
        self._metrics.kafka_up.set(complaint is None)
        self._complain(complaint)

    async def _ready(self) -> AIOKafkaProducer:
        async with self._making:
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **connection(self._kafka),
                    enable_idempotence=True,
                    max_request_size=MAX_VALUE_BYTES,
                    request_timeout_ms=round(ANSWER_S * MS),
                )
                await producer.start()
                self._producer = producer
            return self._producer

    async def _drop(self, producer: AIOKafkaProducer | None) -> None:
        """Lets go of a client, once."""
        is_ours = producer is self._producer
        if producer is not None and is_ours:
            self._producer = None
            await put_away(producer)
