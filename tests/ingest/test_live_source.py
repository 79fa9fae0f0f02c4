"""A network stream, read from a real server on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from monitor.config.settings import ChannelSettings
from monitor.ingest.live_source import LiveSource
from monitor.ops.metrics import Metrics
from tests.support.media import write_film


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    write_film(tmp_path / "air.ts", 1, 16)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/air.ts"
    server.shutdown()
    server.server_close()


async def seconds_until(source: LiveSource, last: int) -> list[int]:
    """Reads until this second of the stream, then stops as a failed runner does."""
    seconds: list[int] = []
    async with aclosing(source.samples()) as samples:
        async for sample in samples:
            seconds.append(sample.second)
            if seconds[-1] >= last:
                break
    return seconds


def test_a_source_whose_reader_failed_is_read_again_and_ends_when_closed(address: str) -> None:
    source = LiveSource(ChannelSettings(name="ch", url=address, mode="exact"), Metrics(CollectorRegistry()))

    async def twice() -> tuple[list[int], list[int], list[int]]:
        first = await seconds_until(source, 14)
        await asyncio.sleep(1.1)  # an epoch is named by its second, and the seconds of one epoch are delivered once
        again = await seconds_until(source, 14)
        await source.close()
        return first, again, await seconds_until(source, 14)

    first, again, after_close = asyncio.run(twice())
    assert set(range(3, 14)) <= set(first)
    assert set(range(3, 14)) <= set(again)
    assert after_close == []
