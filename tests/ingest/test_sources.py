"""One contract for all sources: files, live streams, and either of them wrapped to record its latest frame."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from monitor.config.settings import ChannelSettings
from monitor.ingest.latest_frames import LatestFrames
from monitor.ingest.live_source import LiveSource
from monitor.ingest.sources import FileSource, Position, Sample, Source
from monitor.ops.channel_status import ChannelReport
from monitor.ops.metrics import Metrics
from reference_db.errors import MediaError
from tests.support.media import write_film

LENGTH_S = 12
OpenSource = Callable[[Metrics], Source]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_film(folder / "film.ts", 1, LENGTH_S)
    write_film(folder / "other.ts", 2, LENGTH_S)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/film.ts"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["file", "live", "recorded"])
def open_source(request: pytest.FixtureRequest, folder: Path, url: str) -> OpenSource:
    def open_file(metrics: Metrics) -> Source:
        return FileSource(folder / "film.ts", metrics.channels.of("ch"))

    def open_live(metrics: Metrics) -> Source:
        return LiveSource(ChannelSettings(name="ch", url=url, mode="exact"), metrics)

    def open_recorded(metrics: Metrics) -> Source:
        return LatestFrames().wrap(open_file(metrics))

    opened: OpenSource = {"file": open_file, "live": open_live, "recorded": open_recorded}[request.param]
    return opened


def new_metrics() -> Metrics:
    return Metrics(CollectorRegistry())


async def take(source: Source, n: int | None = None) -> list[Sample]:
    """The first samples, or all; closes the iterator as the runner does."""
    taken: list[Sample] = []
    async with aclosing(source.samples()) as samples:
        async for sample in samples:
            taken.append(sample)
            if len(taken) == n:
                break
    return taken


def read(source: Source, n: int | None = None) -> list[Sample]:
    async def run() -> list[Sample]:
        taken = await take(source, n)
        await source.close()
        return taken

    return asyncio.run(asyncio.wait_for(run(), 120))


def report(metrics: Metrics) -> ChannelReport:
    return metrics.channels.of("ch").report()


def test_samples_are_of_the_channel_and_rise_within_an_epoch(open_source: OpenSource) -> None:
    source = open_source(new_metrics())
    assert source.channel == "ch"
    samples = read(source, 8)
    assert len(samples) == 8
    assert {sample.epoch.channel for sample in samples} == {"ch"}
    assert len({sample.epoch for sample in samples}) == 1
    assert all(a.second < b.second for a, b in pairwise(samples))


def test_every_received_frame_is_taken_or_counted_as_dropped(open_source: OpenSource) -> None:
    metrics = new_metrics()
    samples = read(open_source(metrics), 4)
    counts = report(metrics)
    assert counts.n_received >= 4
    assert counts.n_received - counts.n_dropped == len(samples)  # the runner, which takes them, counts them itself


def test_a_position_is_plain_json_without_the_url(open_source: OpenSource, url: str) -> None:
    for sample in read(open_source(new_metrics()), 3):
        stored = json.dumps(dict(sample.position))
        assert json.loads(stored) == sample.position
        assert url not in stored


def test_close_ends_the_samples_for_good_and_may_be_called_again(open_source: OpenSource) -> None:
    source = open_source(new_metrics())

    async def run() -> tuple[int, list[Sample]]:
        n_taken = 0
        async with aclosing(source.samples()) as samples:
            async for _ in samples:
                n_taken += 1
                await source.close()
        await source.close()
        return n_taken, await take(source)

    n_taken, later = asyncio.run(asyncio.wait_for(run(), 120))
    assert n_taken >= 1
    assert later == []


def test_a_source_that_was_never_read_can_be_closed(open_source: OpenSource) -> None:
    asyncio.run(open_source(new_metrics()).close())


def test_samples_may_be_called_again_after_the_reader_failed(open_source: OpenSource) -> None:
    source = open_source(new_metrics())

    async def run() -> tuple[list[Sample], list[Sample]]:
        first = await take(source, 3)
        await asyncio.sleep(1.1)  # an epoch is named by its second, and the seconds of one epoch are delivered once
        second = await take(source, 3)
        await source.close()
        return first, second

    first, second = asyncio.run(asyncio.wait_for(run(), 120))
    assert len(first) == len(second) == 3


@pytest.mark.parametrize("position", [{}, {"file": "another", "second": 5}, {"address": "another", "epoch": "x"}])
def test_the_position_of_another_stream_is_ignored(open_source: OpenSource, position: Position) -> None:
    source, fresh = open_source(new_metrics()), open_source(new_metrics())
    source.resume(position)
    (first,), (expected,) = read(source, 1), read(fresh, 1)
    assert (first.second, first.gap_reason) == (expected.second, expected.gap_reason)


def test_a_file_resumes_after_its_position_and_not_at_all_after_its_end(folder: Path) -> None:
    samples = read(FileSource(folder / "film.ts", new_metrics().channels.of("ch")))
    assert [sample.second for sample in samples] == list(range(LENGTH_S))
    resumed = FileSource(folder / "film.ts", new_metrics().channels.of("ch"))
    resumed.resume(samples[4].position)
    rest = read(resumed)
    assert [sample.second for sample in rest] == list(range(5, LENGTH_S))
    assert rest[0].epoch == samples[0].epoch
    ended = FileSource(folder / "film.ts", new_metrics().channels.of("ch"))
    ended.resume({**samples[-1].position, "ended": True})
    assert read(ended) == []


def test_another_file_of_the_same_name_starts_fresh(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "film.ts"
    path.write_bytes((folder / "film.ts").read_bytes())
    samples = read(FileSource(path, new_metrics().channels.of("ch")), 5)
    path.write_bytes((folder / "other.ts").read_bytes())
    source = FileSource(path, new_metrics().channels.of("ch"))
    source.resume(samples[-1].position)
    (first,) = read(source, 1)
    assert first.second == 0
    assert first.epoch != samples[0].epoch


def test_a_file_that_cannot_be_decoded_raises(tmp_path: Path) -> None:
    (tmp_path / "text.ts").write_text("no video")
    for name in ("text.ts", "missing.ts"):
        with pytest.raises(MediaError):
            read(FileSource(tmp_path / name, new_metrics().channels.of("ch")))


def test_a_live_source_that_cannot_connect_does_not_raise_but_reports_its_state() -> None:
    metrics = new_metrics()
    source = LiveSource(ChannelSettings(name="ch", url="http://127.0.0.1:9/x.ts", mode="exact"), metrics)

    async def run() -> list[Sample]:
        taking = asyncio.create_task(take(source))
        while report(metrics).state == "starting":  # noqa: ASYNC110  (written by the source's thread)
            await asyncio.sleep(0.05)
        await source.close()
        return await taking

    assert asyncio.run(asyncio.wait_for(run(), 120)) == []
    assert report(metrics).state == "failed"


def test_a_live_source_resumes_its_epoch_and_names_the_gap(url: str) -> None:
    settings = ChannelSettings(name="ch", url=url, mode="exact")
    before = read(LiveSource(settings, new_metrics()), 6)
    resumed = LiveSource(settings, new_metrics())
    resumed.resume(before[2].position)
    after = read(resumed, 3)
    assert after[0].epoch == before[0].epoch
    assert [sample.second for sample in after] == [before[2].second + n for n in (1, 2, 3)]
    assert after[0].gap_reason == "restart"
    assert after[1].gap_reason == "unseen"
