"""The transmitter airs by its pace, and late comers join what is on air."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest

from monitor.demo.broadcast import BURST_S, Pace, Transmitter, _chunks, wall_clock


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds of noise at 25 fps with a key frame a second."""
    path = tmp_path_factory.mktemp("air") / "clip.ts"
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


class Hand:
    """A pace that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked = threading.Semaphore(0)

    def __call__(self) -> Pace:
        return self._pace

    def _pace(self) -> float:
        self.asked.release()
        return self.now_s


def times(url: str) -> Iterator[float]:
    with av.open(url, "r", timeout=20) as container:
        for frame in container.decode(video=0):
            yield float(frame.time or 0.0)


def test_a_listener_gets_every_picture_when_the_pace_allows(clip: Path) -> None:
    with Transmitter(clip, lambda: lambda: float("inf")) as air:
        assert len(list(times(air.url))) == 250
        assert air.ended.wait(20)


def test_nothing_is_sent_before_its_time(clip: Path) -> None:
    hand = Hand()
    hand.now_s = 2.0
    allowed = sum(chunk.end - chunk.start for chunk in _chunks(clip.read_bytes()) if chunk.at_s <= 2.0)
    with Transmitter(clip, hand) as air, urllib.request.urlopen(air.url, timeout=20) as reply:
        first = reply.read(allowed)
        for _ in range(3):  # it has asked again and again, and still may not send
            assert hand.asked.acquire(timeout=20)
        assert not air.ended.is_set()
        hand.now_s = 60.0
        rest = reply.read()
    assert first + rest == clip.read_bytes()


def test_who_comes_late_joins_what_is_on_air(clip: Path) -> None:
    hand = Hand()
    hand.now_s = 2.0
    with Transmitter(clip, hand) as air, urllib.request.urlopen(air.url, timeout=20) as first:
        first.read(1)
        hand.now_s = BURST_S + 5.0
        with urllib.request.urlopen(air.url, timeout=20) as second:
            second.read(1)
            hand.now_s = 60.0
            late = second.read()
    began = next(chunk.start for chunk in _chunks(clip.read_bytes()) if chunk.at_s >= 5.0)
    assert len(late) == len(clip.read_bytes()) - began - 1


@pytest.mark.parametrize("again", [False, True])
def test_after_the_end_there_is_nothing_or_it_begins_anew(clip: Path, again: bool) -> None:
    with Transmitter(clip, lambda: lambda: float("inf"), again=again) as air:
        with urllib.request.urlopen(air.url, timeout=20) as reply:
            assert reply.read() == clip.read_bytes()
        if again:
            with urllib.request.urlopen(air.url, timeout=20) as reply:
                assert reply.read() == clip.read_bytes()
        else:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(air.url, timeout=20)


def test_the_pace_of_a_channel_is_the_wall_clock_after_a_burst() -> None:
    pace = wall_clock()
    assert BURST_S <= pace() < BURST_S + 5
    assert pace() <= pace()


def test_pieces_follow_the_streams_clock_and_lose_no_byte(clip: Path) -> None:
    chunks = _chunks(clip.read_bytes())
    assert chunks[0].start == 0
    assert chunks[-1].end == clip.stat().st_size
    assert all(a.end == b.start and a.at_s <= b.at_s for a, b in pairwise(chunks))
    assert chunks[-1].at_s == pytest.approx(10.0, abs=0.5)
