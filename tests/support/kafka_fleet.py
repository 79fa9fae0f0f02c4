"""Topics on the real broker for one test, filled from a recording that was encoded once."""

from __future__ import annotations

import asyncio
import json
import struct
import time
import urllib.error
import urllib.request
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiokafka import AIOKafkaProducer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from monitor.config.settings import Settings
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.sources import Sample
from monitor.kafka.broker import dead_letter_topic, ensure_topics
from monitor.kafka.records import MS, end_record, sample_record
from monitor.ops.metrics import Metrics
from monitor.roles.kafka_match import match
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog
from tests.support.broker import Broker
from tests.support.planted_channels import BEGAN, outcomes_of
from tests.support.recorded_channel import RecordedChannel

PATIENCE_S = 120.0
SESSION_S = 6.0
EPOCH = "2026-11-16T08:00:00Z"
AlertEvents = dict[tuple[str, int], dict[str, Any]]  # by id and seq


@dataclass(frozen=True)
class KafkaFleet:
    """One set of topics, and the recording that is written to them."""

    broker: Broker
    recorded: RecordedChannel
    name: str
    partitions: int

    @classmethod
    def new(cls, broker: Broker, recorded: RecordedChannel, partitions: int = 1) -> KafkaFleet:
        """A fleet with its topics created."""
        fleet = cls(broker, recorded, f"t{uuid.uuid4().hex[:8]}", partitions)
        kafka = fleet.settings().kafka
        asyncio.run(ensure_topics(kafka, [kafka.frames, kafka.alerts, kafka.state, dead_letter_topic(kafka.frames)]))
        return fleet

    def kafka(self, **more: object) -> dict[str, object]:
        topics = {topic: f"{self.name}.{topic}" for topic in ("frames", "alerts", "state", "channels")}
        common = {"bootstrap": self.broker.address, "group": self.name, "session_timeout_s": SESSION_S}
        return {**common, **topics, "partitions": self.partitions, **more}

    def settings(self, **more: object) -> Settings:
        values = {"data_dir": self.recorded.settings.data_dir, "web": {"port": 0}, "kafka": self.kafka(**more)}
        return Settings.model_validate(values)

    @property
    def frames(self) -> str:
        return f"{self.name}.frames"

    # --- frames ------------------------------------------------------------------------------------------------------

    def sample(self, channel: str, second: int) -> Sample:
        """A second of the recording as if it were live."""
        sample = self.recorded.samples[second]
        return replace(sample, epoch=ChannelEpoch(channel, EPOCH, BEGAN, 0), gap_reason="unseen")

    @property
    def seconds(self) -> range:
        return range(len(self.recorded.samples))

    def records(self, channel: str, seconds: Sequence[int], *, pictures: bool = False) -> list[dict[str, Any]]:
        """The records of these seconds: feature rows, or pictures."""
        encoder_id = self.recorded.models.encoder.encoder_id
        samples = [self.sample(channel, second) for second in seconds]
        if pictures:
            return [sample_record(sample) for sample in samples]
        return [sample_record(sample, self.recorded.rows[sample.second], encoder_id) for sample in samples]

    def end(self, channel: str) -> dict[str, Any]:
        last = self.sample(channel, self.seconds[-1])
        return end_record(channel, last.second * MS + MS - 1, last.epoch.name, last.arrived_at)

    async def write(self, records: Sequence[dict[str, Any]], partition: int | None = None) -> None:
        async with AIOKafkaProducer(
            bootstrap_servers=self.broker.address, linger_ms=5, max_request_size=32 << 20
        ) as producer:
            sent = [await producer.send(self.frames, partition=partition, **record) for record in records]
            await asyncio.gather(*sent)

    def expected(self, channel: str) -> AlertEvents:
        """The alerts of an uninterrupted monitor over the whole recording."""
        with Catalog.open(self.recorded.settings.data_dir) as catalog:
            index = ReferenceIndex.build(catalog, self.recorded.models.encoder.encoder_id)
        monitor = ChannelMonitor(
            ActiveLibrary(index), self.recorded.models, self.recorded.settings, Metrics(CollectorRegistry())
        )
        samples = [self.sample(channel, second) for second in self.seconds]
        alerts = [alert for outcome in outcomes_of(monitor, samples, self.recorded.rows) for alert in outcome.alerts]
        alerts += monitor.finish()
        return {(alert.id, alert.seq): json.loads(json.dumps(alert.as_dict())) for alert in alerts}

    # --- alerts ------------------------------------------------------------------------------------------------------

    async def read_alerts(self) -> AlertEvents:
        """All events of the alert topic; repeated ones must be equal."""
        found: AlertEvents = {}
        for record in await self.broker._read(f"{self.name}.alerts"):
            alert = json.loads(record.value) | {"evidence": None}  # which a bare monitor does not store
            assert record.key.decode() == alert["channel"]
            assert found.setdefault((alert["id"], alert["seq"]), alert) == alert
        return found

    async def alerts_when(self, is_enough: Callable[[AlertEvents], bool]) -> AlertEvents:
        """All events, once they are enough."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_enough(found := await self.read_alerts()):
            assert time.monotonic() < deadline, f"only these alerts: {list(found.values())}"
            await asyncio.sleep(0.2)  # polls a topic that another process writes
        return found

    async def alerts_when_ended(self, n_ended: int) -> AlertEvents:
        """All events, once `n_ended` alerts have ended."""
        return await self.alerts_when(
            lambda found: sum(one["type"] == "alert.ended" for one in found.values()) >= n_ended
        )

    # --- members -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def member(self, **more: object) -> AsyncIterator[Scrape]:
        """A matcher in this process; stopped cleanly at the end."""
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(match(self.settings(**more), stop=stop, on_ready=ready.set_result))
            try:
                yield Scrape(await ready)
            finally:
                stop.set()


@dataclass(frozen=True)
class Scrape:
    """The metrics of a process, read by name and labels."""

    address: str

    async def value(self, name: str, **labels: str) -> float:
        text = await asyncio.to_thread(self._text)
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until(self, least: float, name: str, **labels: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (value := await self.value(name, **labels)) < least:
            assert time.monotonic() < deadline, f"{name} {labels} is {value}, not {least}"
            await asyncio.sleep(0.1)  # polling interval

    async def until_is(self, wanted: float, name: str, **labels: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (value := await self.value(name, **labels)) != wanted:
            assert time.monotonic() < deadline, f"{name} {labels} is {value}, not {wanted}"
            await asyncio.sleep(0.1)  # polling interval

    async def page(self, name: str) -> tuple[int, str]:
        """Status and text of a probe."""
        return await asyncio.to_thread(self._page, name)

    async def until_page(self, name: str, status: int, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := await self.page(name))[0] != status or text not in found[1]:
            assert time.monotonic() < deadline, f"/{name} is {found}, not {status} with {text!r}"
            await asyncio.sleep(0.1)  # polling interval

    def _page(self, name: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.address}/{name}", timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _text(self) -> str:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as reply:
            return str(reply.read().decode())


def png_bomb() -> bytes:
    """A PNG of 80 bytes that claims 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )
