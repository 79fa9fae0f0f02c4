"""Stories of packets and bytes that are lost within RTSP and RTMP, by real servers and a proxy in between.

Whatever is lost costs pictures or a connection, never the channel: damaged pictures are counted, what was missed is
told, and once nothing is lost any more they come clean again by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.chaos.studio import Figures, Studio, sum_of
from tests.support.fault_proxy import FaultProxy
from tests.support.live_stream import Air
from tests.support.rtsp_proxy import RtspProxy
from tests.support.running_source import HASTY, LENGTH_S, Watching, watching, write_air
from tests.support.stream_servers import published, rtmp_server, rtsp_server

AIR_S = 600  # of a recording that VLC plays: where it begins anew it hangs up
PATIENT = replace(HASTY, no_progress_s=8)  # a lost key picture costs a second or two, and no connection


def rtsp_datagrams(lost: float, n_seconds: int = 0, mode: str = "exact") -> Callable[[Studio], Figures]:
    """A share of the datagrams never comes: pictures are damaged, and nobody reconnects for it."""

    def story(studio: Studio) -> Figures:
        with _rtsp(studio, f"rtsp-loss-{lost}-{mode}", interleaved=False, mode=mode) as (proxy, watched):
            proxy.lost = lost
            watched.wait(lambda: _damaged(watched) > 0 and proxy.n_spoilt >= 5, "damage")
            watched.wait_for_more(n_seconds)
            proxy.lost = 0.0
            figures = _clean_again(watched)
            assert proxy.n_connections == 1
            return {"lost": proxy.n_spoilt, **figures}

    return story


def rtsp_in_tcp(n_times: int = 1) -> Callable[[Studio], Figures]:
    """Bytes vanish in the middle of packets, and the connection is cut in the middle of one."""

    def story(studio: Studio) -> Figures:
        with _rtsp(studio, f"rtsp-tcp-{n_times}", interleaved=True) as (proxy, watched):
            for _ in range(n_times):
                n_spoilt, harm = proxy.n_spoilt, _harm(watched)
                proxy.torn = 0.05
                watched.wait(lambda n=n_spoilt: proxy.n_spoilt >= n + 2, "torn packets")  # type: ignore[misc]
                watched.wait(lambda harm=harm: _harm(watched) > harm, "damage or a new connection")  # type: ignore[misc]
                proxy.torn = 0.0
                watched.wait_for_state("up")
                watched.wait_for_more(2)
                n_before = proxy.n_connections
                proxy.cut = True
                watched.wait(lambda n=n_before: proxy.n_connections > n, "a new connection")  # type: ignore[misc]
                figures = _clean_again(watched)
            return {"spoilt": proxy.n_spoilt, "connections": proxy.n_connections, **figures}

    return story


def rtmp_bytes(n_times: int = 1) -> Callable[[Studio], Figures]:
    """Bits flip, which damages pictures; then bytes vanish in mid-chunk, after which nothing makes sense any more."""

    def story(studio: Studio) -> Figures:
        name = f"rtmp-{n_times}"
        luck = random.Random(3)
        with (
            rtmp_server(studio.folder / name) as server,
            published(_wide(studio), f"rtmp://127.0.0.1:{server}/live/x"),
            FaultProxy(server) as proxy,
            watching(f"rtmp://127.0.0.1:{proxy.port}/live/x", name, patience=PATIENT) as watched,
        ):
            watched.wait_for_state("up")
            watched.wait_for_more()
            for _ in range(n_times):
                before = _damaged(watched)
                proxy.spoil = lambda data: _flipped(data, luck)
                watched.wait(lambda before=before: _damaged(watched) > before, "damage")  # type: ignore[misc]
                proxy.spoil = None
                _clean_again(watched)
                n_before = proxy.n_connections
                proxy.spoil = lambda data: data[: len(data) // 3] + data[len(data) // 2 :]
                watched.wait(lambda n=n_before: proxy.n_connections > n, "a new connection")  # type: ignore[misc]
                assert watched.source.state in ("stalled", "failed")
                proxy.spoil = None
                figures = _clean_again(watched)
            return {"connections": proxy.n_connections, **figures}

    return story


@contextmanager
def _rtsp(studio: Studio, name: str, *, interleaved: bool, mode: str = "exact") -> Iterator[tuple[RtspProxy, Watching]]:
    """A channel that is up and came clean so far."""
    recording = studio.folder / f"{name}.ts"
    recording.write_bytes(Air(_wide(studio), LENGTH_S).seconds(0, AIR_S))
    with (
        rtsp_server(recording) as server,
        RtspProxy(server, interleaved=interleaved, seed=5) as proxy,
        watching(f"rtsp://127.0.0.1:{proxy.port}/live", name, mode=mode, patience=PATIENT) as watched,
    ):
        watched.wait_for_state("up")
        watched.wait_for_more(4)
        assert (_damaged(watched), watched.holes, len(watched.epochs)) == (0, [], 1)
        yield proxy, watched


def _wide(studio: Studio) -> Path:
    """Pictures of many packets each, so that one can lose a part of itself."""
    return write_air(studio.folder / f"wide-{random.randrange(10**9)}.ts", 6, width=640, height=360)


def _flipped(data: bytes, luck: random.Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(1 + len(data) // 1000):
        spoilt[luck.randrange(len(spoilt))] ^= 1 << luck.randrange(8)
    return bytes(spoilt)


def _damaged(watched: Watching) -> float:
    return watched.value("copywatch_damaged_pictures_total")


def _harm(watched: Watching) -> float:
    return _damaged(watched) + sum_of(watched, "copywatch_reconnects_total")


def _clean_again(watched: Watching) -> Figures:
    """Up, in the same epoch, with what was missed told; a few seconds on, no picture is damaged any more."""
    watched.wait_for_more(2)
    watched.wait_for_state("up")
    watched.wait_for_more(2)  # what was damaged already has been counted with the next key picture
    before = _harm(watched)
    watched.wait_for_more(4)
    assert _harm(watched) == before, (before, _harm(watched))
    assert watched.source.state == "up"
    assert len(watched.epochs) == 1, watched.epochs
    assert {reason for _, _, reason in watched.holes} <= {"reconnect", "unseen"}
    missed = sum(n for _, n, _ in watched.holes)
    return {"seconds": len(watched.samples), "damaged": _damaged(watched), "missed_s": missed}
