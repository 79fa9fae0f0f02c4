"""The role `ingest`: channels in, one record per second of each out to the topic of frames.

Decoding is that of `serve`: a child process and a buffer per channel. A channel sends its next second once the broker
has stored the last one, so seconds stay in order and nothing piles up: while the broker is unreachable the channel's
buffer fills, then drops and counts its oldest seconds. Channels come from the configuration, or from the compacted
topic of channels, which the members of a group share (`channel_assignment.py`).
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
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry

from monitor import __version__
from monitor.config.settings import ChannelSettings, KafkaSettings, Settings
from monitor.ingest.sources import Sample, Source
from monitor.kafka.broker import (
    REQUEST_TIMEOUT_S,
    client_options,
    ensure_topics,
    error_text,
    retry_until_reached,
    stop_client,
)
from monitor.kafka.channel_assignment import ChannelAssignment
from monitor.kafka.records import MAX_VALUE_BYTES, MS, end_record, sample_record
from monitor.ops.backoff import Backoff
from monitor.ops.health import Health, set_problem
from monitor.ops.metrics import Metrics
from monitor.ops.process import stop_on_signals
from monitor.ops.systemd import notify
from monitor.runtime.channel_roster import ChannelRoster, open_source, run_channel, watch_config
from monitor.web.server import serve_probes
from reference_db.features.encoder_weights import read_weights
from reference_db.features.picture_detail import is_informative

if TYPE_CHECKING:
    from reference_db.features.encoder import Encoder

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0  # for the last records when the process stops
GIVE_UP_S = 60.0  # without an answer, after which the client is replaced
NO_ANSWER = "the broker does not accept records (it does not answer)"
ENCODERS = 1  # threads that compress or encode pictures


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

    With `shared` the channels are those of the topic, spread over all processes that share them; else those of the
    settings.
    """
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    kafka, metrics, problems = settings.kafka, Metrics(CollectorRegistry()), dict[str, str]()
    report_problem = partial(set_problem, problems, "kafka")
    weights = await asyncio.to_thread(read_weights, settings.encoder)
    metrics.build_info.labels(__version__, weights.encoder_id).set(1)
    encoder = await asyncio.to_thread(_load_encoder, settings) if features else None  # pictures need no network
    publisher = Publisher(kafka, metrics, report_problem, stop)
    encoding = _RecordEncoder(encoder)
    health = Health(problems, ("kafka",), {}, vital=())
    moved: set[str] = set()  # channels that another process takes over

    def publish(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        source = open_source(channel, metrics, real_time=real_time)
        continues = lambda: stop.is_set() or channel.name in moved  # noqa: E731
        work = partial(_publish, source, encoding, publisher, metrics, continues)
        return source, run_channel(source.channel, _restore_nothing, work, stop)

    try:
        async with serve_probes(settings.web, metrics, health) as address, asyncio.TaskGroup() as tasks:
            roster = ChannelRoster(tasks, publish, metrics)
            logger.info("publishing to %s; health at %s", kafka.frames, address)
            notify("READY=1", f"STATUS=publishing to {kafka.frames}")
            if on_ready is not None:
                on_ready(address)
            topics = [kafka.frames, kafka.channels] if shared else [kafka.frames]
            background: list[asyncio.Task[None]] = []
            if await retry_until_reached(partial(ensure_topics, kafka, topics), report_problem, stop):
                metrics.kafka_up.set(1)
                if shared:
                    background.append(
                        tasks.create_task(ChannelAssignment(kafka, roster, metrics, report_problem, moved).run())
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
        encoding.close()
        await publisher.close()


def _load_encoder(settings: Settings) -> Encoder:
    from reference_db.features.encoder import load_encoder

    logger.info("loading the encoder")
    return load_encoder(settings.encoder, threads=settings.compute.threads)


async def _restore_nothing() -> None:
    """The matchers store the state of channels; there is none here."""


class _RecordEncoder:
    """Encodes samples as records, in its own threads."""

    def __init__(self, encoder: Encoder | None) -> None:
        self._encoder = encoder  # None to send pictures
        self._pool = ThreadPoolExecutor(max_workers=ENCODERS, thread_name_prefix="encode")

    async def encode(self, sample: Sample) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, sample)

    def _encode(self, sample: Sample) -> dict[str, Any]:
        if self._encoder is None:
            return sample_record(sample)
        picture = sample.frame.picture
        encoded = self._encoder.encode([picture])[0], is_informative(picture)
        return sample_record(sample, encoded, self._encoder.encoder_id)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _publish(
    source: Source, encoding: _RecordEncoder, publisher: Publisher, metrics: Metrics, continues: Callable[[], bool]
) -> None:
    """Publishes one source, and its end unless the stream continues in another process or after a restart."""
    status = metrics.channels.of(source.channel)
    last: Sample | None = None
    async with aclosing(source.samples()) as samples:
        async for sample in samples:
            sent = False
            try:
                sent = await publisher.send(await encoding.encode(sample))
            finally:
                status.count_processed() if sent else status.count_dropped("stopped")
            if not sent:
                break
            last = sample
            status.set_lag((datetime.now(UTC) - sample.arrived_at).total_seconds())
    if last is not None and not continues():
        pts_ms = last.second * MS + MS - 1
        await publisher.send(end_record(source.channel, pts_ms, last.epoch.name, datetime.now(UTC)))


class Publisher:
    """Sends records to the topic of frames, each until the broker has stored it; replaces a broken client."""

    def __init__(
        self, kafka: KafkaSettings, metrics: Metrics, report_problem: Callable[[str | None], None], stop: asyncio.Event
    ) -> None:
        self._kafka = kafka
        self._metrics = metrics
        self._report_problem = report_problem
        self._stop = stop
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()
        self._is_up = True

    async def send(self, record: dict[str, Any]) -> bool:
        """Returns once the broker has stored it; False if that failed until the process stopped."""
        backoff, stop_at_s = Backoff(), None
        while True:
            if self._stop.is_set():
                stop_at_s = stop_at_s or time.monotonic() + STOP_TIMEOUT_S
                if time.monotonic() > stop_at_s:
                    return False
            producer: AIOKafkaProducer | None = None
            # The client retries by itself and reports nothing meanwhile.
            warning = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, self._report, NO_ANSWER)
            try:
                async with asyncio.timeout(GIVE_UP_S if stop_at_s is None else STOP_TIMEOUT_S):
                    producer = await self._ready()
                    await producer.send_and_wait(self._kafka.frames, **record)
                self._report(None)
                return True
            except (KafkaError, OSError, TimeoutError) as error:
                self._report(f"the broker does not accept records ({error_text(error)})")
                await self._drop(producer)
            finally:
                warning.cancel()
            await backoff.wait(self._stop)

    async def close(self) -> None:
        await self._drop(self._producer)

    def _report(self, problem: str | None) -> None:
        if problem is not None and self._is_up:
            logger.warning("%s; retrying", problem)
        self._is_up = problem is None
        self._metrics.kafka_up.set(problem is None)
        self._report_problem(problem)

    async def _ready(self) -> AIOKafkaProducer:
        async with self._starting:
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **client_options(self._kafka),
                    enable_idempotence=True,
                    max_request_size=MAX_VALUE_BYTES,
                    request_timeout_ms=round(REQUEST_TIMEOUT_S * MS),
                )
                await producer.start()
                self._producer = producer
            return self._producer

    async def _drop(self, producer: AIOKafkaProducer | None) -> None:
        """Stops a client, once: several channels may report the same one as broken."""
        is_current = producer is self._producer
        if producer is not None and is_current:
            self._producer = None
            await stop_client(producer)
