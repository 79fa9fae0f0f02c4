"""Loss scenarios: packets and bytes are lost within RTSP and RTMP, between real servers and the source.

A loss costs pictures or a connection, never the channel: damaged pictures are counted, gaps are reported, and once the
loss ends, clean pictures return without intervention.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.chaos.faulty_channel import ClipSet, Figures, sum_of
from tests.support.fault_proxy import FaultProxy
from tests.support.live_stream import LiveStream
from tests.support.rtsp_proxy import RtspProxy
from tests.support.running_source import LENGTH_S, SHORT_TIMEOUTS, RunningSource, running_source, write_stream_clip
from tests.support.stream_servers import published, rtmp_server, rtsp_server

AIR_S = 600  # length of the recording that VLC plays: it closes connections when it loops
LONGER_TIMEOUTS = replace(SHORT_TIMEOUTS, no_progress_s=8)  # a lost key frame costs a second or two, but no connection


def rtsp_datagrams(lost: float, n_seconds: int = 0, mode: str = "exact") -> Callable[[ClipSet], Figures]:
    """A share of the datagrams is lost: pictures are damaged, without a reconnect."""

    def scenario(clips: ClipSet) -> Figures:
        with _rtsp(clips, f"rtsp-loss-{lost}-{mode}", interleaved=False, mode=mode) as (proxy, running):
            proxy.lost = lost
            running.wait(lambda: _damaged(running) > 0 and proxy.n_damaged >= 5, "damage")
            running.wait_for_more(n_seconds)
            proxy.lost = 0.0
            figures = _check_recovery(running)
            assert proxy.n_connections == 1
            return {"lost": proxy.n_damaged, **figures}

    return scenario


def rtsp_in_tcp(n_times: int = 1) -> Callable[[ClipSet], Figures]:
    """Bytes are lost inside packets, and the connection is reset inside one."""

    def scenario(clips: ClipSet) -> Figures:
        with _rtsp(clips, f"rtsp-tcp-{n_times}", interleaved=True) as (proxy, running):
            for _ in range(n_times):
                n_damaged, n_problems = proxy.n_damaged, _n_problems(running)
                proxy.torn = 0.05
                running.wait(lambda n=n_damaged: proxy.n_damaged >= n + 2, "torn packets")  # type: ignore[misc]
                running.wait(lambda n=n_problems: _n_problems(running) > n, "damage or a new connection")  # type: ignore[misc]
                proxy.torn = 0.0
                running.wait_for_state("up")
                running.wait_for_more(2)
                n_before = proxy.n_connections
                proxy.cut = True
                running.wait(lambda n=n_before: proxy.n_connections > n, "a new connection")  # type: ignore[misc]
                figures = _check_recovery(running)
            return {"damaged_packets": proxy.n_damaged, "connections": proxy.n_connections, **figures}

    return scenario


def rtmp_bytes(n_times: int = 1) -> Callable[[ClipSet], Figures]:
    """Bits flip, which damages pictures; then bytes are lost inside a chunk, after which the stream is unreadable."""

    def scenario(clips: ClipSet) -> Figures:
        name = f"rtmp-{n_times}"
        luck = random.Random(3)
        with (
            rtmp_server(clips.folder / name) as server,
            published(_wide(clips), f"rtmp://127.0.0.1:{server}/live/x"),
            FaultProxy(server) as proxy,
            running_source(f"rtmp://127.0.0.1:{proxy.port}/live/x", name, timeouts=LONGER_TIMEOUTS) as running,
        ):
            running.wait_for_state("up")
            running.wait_for_more()
            for _ in range(n_times):
                before = _damaged(running)
                proxy.damage = lambda data: _flip_bits(data, luck)
                running.wait(lambda before=before: _damaged(running) > before, "damage")  # type: ignore[misc]
                proxy.damage = None
                _check_recovery(running)
                n_before = proxy.n_connections
                proxy.damage = lambda data: data[: len(data) // 3] + data[len(data) // 2 :]
                running.wait(lambda n=n_before: proxy.n_connections > n, "a new connection")  # type: ignore[misc]
                assert running.source.state in ("stalled", "failed")
                proxy.damage = None
                figures = _check_recovery(running)
            return {"connections": proxy.n_connections, **figures}

    return scenario


@contextmanager
def _rtsp(
    clips: ClipSet, name: str, *, interleaved: bool, mode: str = "exact"
) -> Iterator[tuple[RtspProxy, RunningSource]]:
    """A channel that is up and has had no damage so far."""
    recording = clips.folder / f"{name}.ts"
    recording.write_bytes(LiveStream(_wide(clips), LENGTH_S).seconds(0, AIR_S))
    with (
        rtsp_server(recording) as server,
        RtspProxy(server, interleaved=interleaved, seed=5) as proxy,
        running_source(f"rtsp://127.0.0.1:{proxy.port}/live", name, mode=mode, timeouts=LONGER_TIMEOUTS) as running,
    ):
        running.wait_for_state("up")
        running.wait_for_more(4)
        assert (_damaged(running), running.holes, len(running.epochs)) == (0, [], 1)
        yield proxy, running


def _wide(clips: ClipSet) -> Path:
    """A clip whose pictures take many packets each, so that a loss damages only part of one."""
    return write_stream_clip(clips.folder / f"wide-{random.randrange(10**9)}.ts", 6, width=640, height=360)


def _flip_bits(data: bytes, luck: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(1 + len(data) // 1000):
        damaged[luck.randrange(len(damaged))] ^= 1 << luck.randrange(8)
    return bytes(damaged)


def _damaged(running: RunningSource) -> float:
    return running.value("copywatch_damaged_pictures_total")


def _n_problems(running: RunningSource) -> float:
    return _damaged(running) + sum_of(running, "copywatch_reconnects_total")


def _check_recovery(running: RunningSource) -> Figures:
    """Checks the recovery: up, same epoch, gaps reported, and after a few seconds no more damage."""
    running.wait_for_more(2)
    running.wait_for_state("up")
    running.wait_for_more(2)  # earlier damage is counted by the next key frame
    before = _n_problems(running)
    running.wait_for_more(4)
    assert _n_problems(running) == before, (before, _n_problems(running))
    assert running.source.state == "up"
    assert len(running.epochs) == 1, running.epochs
    assert {reason for _, _, reason in running.holes} <= {"reconnect", "unseen"}
    missed = sum(n for _, n, _ in running.holes)
    return {"seconds": len(running.samples), "damaged": _damaged(running), "missed_s": missed}
