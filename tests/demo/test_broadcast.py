"""The broadcast server follows its pace, and later clients join at the current second."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest

from monitor.demo.broadcast import BURST_S, BroadcastServer, Pace, _chunks, wall_clock


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds of noise at 25 fps with a key frame a second."""
    path = tmp_path_factory.mktemp("broadcast") / "clip.ts"
    rng = np.random.default_rng(3)
    with av.open(str(path), "w", format="mpegts") as container:
        stream = container.add_stream("mpeg2video", rate=25)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", 25
        for number in range(250):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8), format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


class ManualPace:
    """A pace that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = threading.Semaphore(0)

    def __call__(self) -> Pace:
        return self._pace

    def _pace(self) -> float:
        self.calls.release()
        return self.now_s


def times(url: str) -> Iterator[float]:
    with av.open(url, "r", timeout=20) as container:
        for frame in container.decode(video=0):
            yield float(frame.time or 0.0)


def test_a_client_gets_every_picture_if_the_pace_allows(clip: Path) -> None:
    with BroadcastServer(clip, lambda: lambda: float("inf")) as broadcast:
        assert len(list(times(broadcast.url))) == 250
        assert broadcast.ended.wait(20)


def test_nothing_is_sent_before_its_time(clip: Path) -> None:
    pace = ManualPace()
    pace.now_s = 2.0
    allowed = sum(chunk.end - chunk.start for chunk in _chunks(clip.read_bytes()) if chunk.at_s <= 2.0)
    with BroadcastServer(clip, pace) as broadcast, urllib.request.urlopen(broadcast.url, timeout=20) as reply:
        first = reply.read(allowed)
        for _ in range(3):  # it has checked again, and still may not send
            assert pace.calls.acquire(timeout=20)
        assert not broadcast.ended.is_set()
        pace.now_s = 60.0
        rest = reply.read()
    assert first + rest == clip.read_bytes()


def test_a_later_client_joins_at_the_current_second(clip: Path) -> None:
    pace = ManualPace()
    pace.now_s = 2.0
    with BroadcastServer(clip, pace) as broadcast, urllib.request.urlopen(broadcast.url, timeout=20) as first:
        first.read(1)
        pace.now_s = BURST_S + 5.0
        with urllib.request.urlopen(broadcast.url, timeout=20) as second:
            second.read(1)
            pace.now_s = 60.0
            late = second.read()
    start = next(chunk.start for chunk in _chunks(clip.read_bytes()) if chunk.at_s >= 5.0)
    assert len(late) == len(clip.read_bytes()) - start - 1


@pytest.mark.parametrize("repeat", [False, True])
def test_after_its_end_a_broadcast_is_gone_or_repeats(clip: Path, repeat: bool) -> None:
    with BroadcastServer(clip, lambda: lambda: float("inf"), repeat=repeat) as broadcast:
        with urllib.request.urlopen(broadcast.url, timeout=20) as reply:
            assert reply.read() == clip.read_bytes()
        if repeat:
            with urllib.request.urlopen(broadcast.url, timeout=20) as reply:
                assert reply.read() == clip.read_bytes()
        else:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(broadcast.url, timeout=20)


def test_the_default_pace_is_the_wall_clock_after_a_burst() -> None:
    pace = wall_clock()
    assert BURST_S <= pace() < BURST_S + 5
    assert pace() <= pace()


def test_chunks_follow_the_clock_of_the_stream_and_lose_no_byte(clip: Path) -> None:
    chunks = _chunks(clip.read_bytes())
    assert chunks[0].start == 0
    assert chunks[-1].end == clip.stat().st_size
    assert all(a.end == b.start and a.at_s <= b.at_s for a, b in pairwise(chunks))
    assert chunks[-1].at_s == pytest.approx(10.0, abs=0.5)
