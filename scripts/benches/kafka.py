"""`copywatch match` on a filled topic of pictures, against its two baselines, in one run.

The first baseline is an aiokafka consumer that only reads the topic. The second decodes the same JPEG pictures and runs
the encoder over them in batches, in one thread, without Kafka. `match` reads, decodes, encodes, matches against a
library and stores its state in Kafka. The three run one after the other over the same records. The event loop lag is
the maximum that `match` measured under full load.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benches.processes import cpu_s, tree
from monitor.demo.films import Film
from monitor.demo.media import render_reference
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.sources import Sample
from monitor.kafka.records import FORMATS, decode_picture, sample_record
from monitor.ops.timestamps import rfc3339
from monitor.runtime.batcher import MAX_BATCH
from reference_db.features.encoder import load_encoder
from reference_db.media.frames import Frame
from reference_db.registration import register
from reference_db.store.catalog import Catalog

ROOT = Path(__file__).parents[2]
FRAMES = "bench.frames"
MOST_PARTITIONS = 4
FIRST_SEED = 100
PAINTERS = ("hills", "face", "city", "card")
PROCESSED = "copywatch_frames_processed_total"
LOOK_S = 0.25
PATIENCE_S = 300.0

Figures = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=150, help="of each channel")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a running broker; by default one is started")


def run(args: argparse.Namespace) -> Figures:
    """Records per second of each side, and the cost of `match`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, _broker(Path(name), args.kafka) as address:
        folder = Path(name)
        n_partitions = min(args.channels, MOST_PARTITIONS)
        asyncio.run(_fill(address, n_partitions, args.channels, args.seconds))
        values, read_s = asyncio.run(_read(address, n_partitions))
        compute_s = _decode_and_encode(values)
        ours = _match(folder, address, len(values))
    n_records = len(values)
    return {
        "records": n_records,
        "channels": args.channels,
        "bytes_each": sum(len(value) for value in values) // n_records,
        "read_per_s": n_records / read_s,
        "decode_and_encode_per_s": n_records / compute_s,
        "match_per_s": ours["records"] / ours["wall_s"],
        "match_over_read": ours["records"] / ours["wall_s"] / (n_records / read_s),
        "match_over_decode_and_encode": ours["records"] / ours["wall_s"] / (n_records / compute_s),
        "match_cpu_ms_each": 1000 * ours["cpu_s"] / ours["records"],
        "match_stages_ms_each": {stage: round(1000 * s / ours["records"], 2) for stage, s in ours["stages"].items()},
        "event_loop_lag_ms": 1000 * ours["lag_s"],
    }


def lines(figures: Figures) -> list[str]:
    """The figures as a table."""
    return [
        f"{figures['records']} JPEG pictures of {figures['bytes_each']} bytes, {figures['channels']} channels",
        f"read only                        {figures['read_per_s']:8.0f} records/s",
        f"decode and encode only           {figures['decode_and_encode_per_s']:8.1f} records/s",
        f"copywatch match                  {figures['match_per_s']:8.1f} records/s; "
        f"{figures['match_over_decode_and_encode']:.2f} of decode and encode, {figures['match_over_read']:.4f} of "
        f"read; {figures['match_cpu_ms_each']:.1f} ms of CPU per record",
        "ms per record by stage           "
        + ", ".join(f"{stage} {ms:.1f}" for stage, ms in figures["match_stages_ms_each"].items()),
        f"event loop lag at full load      {figures['event_loop_lag_ms']:8.0f} ms at most",
    ]


@contextmanager
def _broker(folder: Path, named: str | None) -> Iterator[str]:
    if named:
        yield named
        return
    script = [str(ROOT / "scripts" / "broker")]
    started = subprocess.run([*script, "start", "--data", str(folder / "broker")], stdout=subprocess.PIPE, text=True)
    if started.returncode != 0:
        raise SystemExit("bench: could not start a broker; name a running one by --kafka host:port")
    try:
        found = re.search(r"running at (\S+)\.\n", started.stdout)
        assert found
        yield found[1]
    finally:
        subprocess.run([*script, "stop", "--data", str(folder / "broker")], stdout=subprocess.DEVNULL, check=True)


async def _fill(address: str, n_partitions: int, channels: int, seconds: int) -> None:
    """Writes rendered films, one second of each channel in turn; no two pictures are alike."""
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    if FRAMES in await admin.list_topics():
        await admin.delete_topics([FRAMES])
    await admin.create_topics([NewTopic(FRAMES, n_partitions, 1)])
    await admin.close()
    began = datetime.now(UTC) - timedelta(seconds=seconds)
    films = [Film(f"ch{n}", "", FIRST_SEED + n, PAINTERS, 3600.0) for n in range(channels)]
    async with AIOKafkaProducer(bootstrap_servers=address, linger_ms=20) as producer:
        for second in range(seconds):
            for film in films:
                epoch = ChannelEpoch(film.name, rfc3339(began), began)
                frame = Frame(second, second + 0.5, film.picture(second + 0.5))
                arrived_at = began + timedelta(seconds=second + 1)
                sample = Sample(epoch, second, frame, arrived_at, "unseen", {})
                await producer.send(FRAMES, **sample_record(sample))
        await producer.flush()


async def _read(address: str, n_partitions: int) -> tuple[list[bytes], float]:
    """All values, and how long a consumer took that does nothing else."""
    consumer = AIOKafkaConsumer(bootstrap_servers=address, auto_offset_reset="earliest", enable_auto_commit=False)
    await consumer.start()
    partitions = [TopicPartition(FRAMES, n) for n in range(n_partitions)]
    consumer.assign(partitions)
    left = sum((await consumer.end_offsets(partitions)).values())
    await consumer.seek_to_beginning(*partitions)
    values: list[bytes] = []
    began_s = time.monotonic()
    while len(values) < left:
        for records in (await consumer.getmany(timeout_ms=1000)).values():
            values += [record.value for record in records]
    took_s = time.monotonic() - began_s
    await consumer.stop()
    return values, took_s


def _decode_and_encode(values: list[bytes]) -> float:
    encoder = load_encoder()
    encoder.encode([decode_picture(value, FORMATS["image/jpeg"]) for value in values[:MAX_BATCH]])  # warm-up
    began_s = time.monotonic()
    for n in range(0, len(values), MAX_BATCH):
        encoder.encode([decode_picture(value, FORMATS["image/jpeg"]) for value in values[n : n + MAX_BATCH]])
    return time.monotonic() - began_s


def _match(folder: Path, address: str, n_records: int) -> dict[str, Any]:
    """Time and CPU from the first matched record to the last, and the maximum event loop lag in between."""
    _register(folder, Film("film", "Film", FIRST_SEED, PAINTERS, 20.0))
    config = folder / "copywatch.yaml"
    kafka = {"bootstrap": address, "frames": FRAMES, "alerts": "bench.alerts", "state": "bench.state"}
    kafka["group"] = f"bench-{time.time_ns():x}"
    config.write_text(yaml.safe_dump({"data_dir": str(folder / "data"), "web": {"port": 0}, "kafka": kafka}))
    log = folder / "match.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "monitor.cli", "match", "--config", str(config)]
        process = subprocess.Popen(command, stderr=output, stdout=output, cwd=ROOT)
    try:
        found = _until(lambda: re.search(r"health at (http://[\d.:]+)", log.read_text(errors="replace")), process, log)
        return _measure(found[1], process, n_records, log)
    finally:
        process.terminate()
        process.wait()


def _measure(address: str, process: subprocess.Popen[bytes], n_records: int, log: Path) -> dict[str, Any]:
    first = _until(lambda: _metrics(address).get(PROCESSED) or None, process, log)
    if first >= n_records:
        raise SystemExit(f"bench: all {n_records} records were matched before the first measurement; raise --seconds")
    before = _stages(address)
    began_s, began_cpu_s, lag_s = time.monotonic(), cpu_s(tree(process.pid)), 0.0

    def is_done() -> bool | None:
        nonlocal lag_s
        figures = _metrics(address)
        lag_s = max(lag_s, figures.get("copywatch_event_loop_lag_seconds", 0.0))
        return figures.get(PROCESSED, 0.0) >= n_records or None

    _until(is_done, process, log)
    return {
        "records": n_records - first,
        "wall_s": time.monotonic() - began_s,
        "cpu_s": cpu_s(tree(process.pid)) - began_cpu_s,
        "lag_s": lag_s,
        "stages": {stage: spent_s - before.get(stage, 0.0) for stage, spent_s in _stages(address).items()},
    }


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


def _metrics(address: str) -> dict[str, float]:
    """Every metric, summed over its labels."""
    found: dict[str, float] = {}
    for line in _scrape(address).splitlines():
        if not line.startswith("#"):
            name, value = re.split(r"\{.*\} | ", line, maxsplit=1)
            found[name] = found.get(name, 0.0) + float(value)
    return found


def _stages(address: str) -> dict[str, float]:
    """Seconds spent in each stage."""
    spent = re.findall(r'copywatch_stage_duration_seconds_sum\{stage="(\w+)"\} (\S+)', _scrape(address))
    return {stage: float(seconds) for stage, seconds in spent}


def _until(look: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    """The first result of `look` that is not None."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := look()) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"bench: match stopped or is stuck:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(LOOK_S)
    return found


def _register(folder: Path, film: Film) -> None:
    """Registers one film, which the first channel carries."""
    path = folder / "film.mp4"
    render_reference(film, path)
    with Catalog.open(folder / "data", write=True) as catalog:
        register(path, catalog, load_encoder())
