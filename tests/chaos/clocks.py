"""Clock scenarios: stream clocks that wrap, jump, stop, are missing or run too fast."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from itertools import pairwise

from prometheus_client import CollectorRegistry

from monitor.config.settings import ChannelSettings
from monitor.ingest.live_source import LiveSource
from monitor.ops.metrics import Metrics
from tests.chaos.faulty_channel import ClipSet, Figures, sum_of
from tests.support import media
from tests.support.live_stream import PACKET, WRAP, LiveStream, WebServer, retimed, serve_stream
from tests.support.running_source import FPS, LENGTH_S, SHORT_TIMEOUTS, RunningSource, running_source


def jump(by_s: float) -> Callable[[ClipSet], Figures]:
    def scenario(clips: ClipSet) -> Figures:
        with clips.channel(f"jump{by_s:.0f}") as channel:
            channel.stream.jump_s += by_s
            channel.running.wait(lambda: len(channel.running.epochs) == 2, "second epoch")
            channel.running.wait_for_more()
            epochs = channel.running.epochs
            assert len(epochs) == 2, epochs
            assert channel.running.value("copywatch_epochs_total") == 2
            after = [one.second for one in channel.running.samples if one.epoch == epochs[1]]
            assert after == list(range(after[0], after[0] + len(after)))  # not stretched across the jump
            return {"epochs": 2}

    return scenario


def one_wrap(clips: ClipSet) -> Figures:
    """The clock passes 2^33 ticks during the stream."""
    stream = LiveStream(clips.clip, LENGTH_S, start_s=WRAP / 90_000 - 8)
    with serve_stream(stream) as web, running_source(f"http://127.0.0.1:{web.port}/x.ts", "wrap") as running:
        running.wait(lambda: stream.at_s > 11 and len(running.samples) >= 6, "wrap")
        running.wait_for_more()
        assert len(running.epochs) == 1
        assert running.holes == []
        # A decoder that starts after the wrap has not seen it.
        os.kill(running.source._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
        running.wait_for_more(4)
        assert len(running.epochs) == 1
        return {"seconds": len(running.samples)}


def many_wraps(clips: ClipSet, laps: float = 4.2) -> Figures:
    """Several wraps in one connection, days of stream time: a picture every 9 s, sent as fast as it is read."""
    stream = LiveStream(clips.clip, LENGTH_S)
    second = stream.seconds(0, 1)
    step, n_steps = 9, int(laps * WRAP / 90_000 / 9)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for n in range(n_steps):
            request.wfile.write(_numbered_packets(retimed(second, n * step * 90_000), n))
        time.sleep(3600)  # keeps the connection open; no test waits for its end

    metrics = Metrics(CollectorRegistry())
    with WebServer(answer) as web:
        settings = ChannelSettings(name="wraps", url=f"http://127.0.0.1:{web.port}/x.ts", mode="exact")
        timeouts = replace(SHORT_TIMEOUTS, no_progress_s=30)
        source = LiveSource(settings, metrics, timeouts=timeouts, real_time=False)
        running = RunningSource(source, metrics, pictures=False)  # days of pictures
        try:
            while not running.samples or running.samples[-1].second < (n_steps - 9) * step:
                running.wait_for_more()
            seconds = running.seconds
            assert len(running.epochs) == 1, running.epochs
            assert all(b > a for a, b in pairwise(seconds))
            span_s = seconds[-1] - seconds[0]
            assert abs(span_s - n_steps * step) < 11 * step  # the last samples may still be on their way
            return {"wraps": int(laps), "hours": span_s / 3600}
        finally:
            running.close()


def _numbered_packets(packets: bytes, n: int) -> bytes:
    """The packets with continued continuity counters, since the same packets are sent repeatedly."""
    out = bytearray(packets)
    counts: dict[int, int] = {}
    for start in range(0, len(out), PACKET):
        pid = (out[start + 1] & 0x1F) << 8 | out[start + 2]
        counts[pid] = counts.get(pid, 0) + 1
    seen: dict[int, int] = {}
    for start in range(0, len(out), PACKET):
        pid = (out[start + 1] & 0x1F) << 8 | out[start + 2]
        out[start + 3] = out[start + 3] & 0xF0 | (n * counts[pid] + seen.get(pid, 0)) & 0x0F
        seen[pid] = seen.get(pid, 0) + 1
    return bytes(out)


def recording_as_live(clips: ClipSet) -> Figures:
    """A recording served as fast as possible: the source reads a burst, then continues at real time."""
    times = [n / 1 for n in range(150)]
    path = clips.folder / "vod.ts"
    media.write_clip(path, ((t, media.numbered(int(t))) for t in times), fps=1, gop=1, b_frames=0)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(path.stat().st_size))
        request.end_headers()
        request.wfile.write(path.read_bytes())

    with WebServer(answer) as web, running_source(f"http://127.0.0.1:{web.port}/vod.ts", "vod") as running:
        running.wait(lambda: len(running.samples) >= 60, "burst")
        began, n = time.monotonic(), len(running.samples)
        time.sleep(4)  # there is no event to wait for: nothing more may arrive in this time
        n_more = len(running.samples) - n
        assert n_more <= 1.02 * (time.monotonic() - began) + 4, n_more
        return {"after_burst_s": n_more}


def missing_times(clips: ClipSet) -> Figures:
    """A raw stream has no timestamps: seconds are counted as they arrive."""
    path = clips.folder / "raw.h264"
    times = [n / FPS for n in range(8 * FPS)]
    media.write_clip(path, ((t, media.picture(5, t, 160, 90)) for t in times), fps=FPS, gop=FPS, b_frames=0)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while True:
            request.wfile.write(path.read_bytes())
            time.sleep(2)  # real time

    with WebServer(answer) as web, running_source(f"http://127.0.0.1:{web.port}/x.h264", "raw") as running:
        running.wait(lambda: len(running.samples) >= 4, "seconds")
        seconds = running.seconds
        assert seconds == list(range(seconds[0], seconds[0] + len(seconds)))
        return {"seconds": len(seconds)}


def variable_rate(clips: ClipSet) -> Figures:
    """Ten pictures a second, then none for three seconds: the missing seconds are a gap, without a reconnect."""
    path = clips.folder / "variable.ts"
    if not path.exists():
        times = [n / 10 for n in range(11)] + [3.9]
        media.write_clip(path, ((t, media.picture(6, t, 160, 90)) for t in times), fps=10, gop=1, b_frames=0)
    timeouts = replace(SHORT_TIMEOUTS, no_progress_s=10)
    with (
        serve_stream(LiveStream(path, LENGTH_S)) as web,
        running_source(f"http://127.0.0.1:{web.port}/x.ts", "variable", timeouts=timeouts) as running,
    ):
        running.wait_for_more(8)
        assert running.holes
        assert {reason for _, _, reason in running.holes} == {"unseen"}
        assert len(running.epochs) == 1
        assert sum_of(running, "copywatch_reconnects_total") == 0
        return {"seconds": len(running.samples), "missed_s": sum(n for _, n, _ in running.holes)}


def picture_rate(every_s: float) -> Callable[[ClipSet], Figures]:
    """A picture every `every_s`: exactly the seconds that have a picture are sampled."""

    def scenario(clips: ClipSet) -> Figures:
        path, length_s = clips.folder / f"every{every_s:.3f}.ts", max(2, math.ceil(every_s))
        times = [n * every_s for n in range(round(length_s / every_s))]
        pictures = ((t, media.picture(8, t, 160, 90)) for t in times)
        media.write_clip(path, pictures, fps=max(1, round(1 / every_s)), gop=max(1, round(1 / every_s)), b_frames=0)
        timeouts = replace(SHORT_TIMEOUTS, no_progress_s=6 + 4 * every_s)
        with (
            serve_stream(LiveStream(path, length_s)) as web,
            running_source(f"http://127.0.0.1:{web.port}/x.ts", f"every{every_s:.3f}", timeouts=timeouts) as running,
        ):
            running.wait_for_more(5)
            assert {n for _, n, _ in running.holes} <= {max(0, round(every_s) - 1)}, running.holes
            assert len(running.epochs) == 1, running.epochs
            reconnects = sum_of(running, "copywatch_reconnects_total")
            # FFmpeg needs three pictures within 10 s to open a stream; at one every 5 s this may take a second attempt.
            assert reconnects <= (every_s > 2), (reconnects, running.seconds)
            return {"seconds": len(running.samples), "reconnects": reconnects}

    return scenario
