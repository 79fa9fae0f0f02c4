"""What happens to streams, each as a story with a real server, a fault proxy and a real decoding child.

A story raises AssertionError where the channel did not end in the state it should, did not recover by itself, or was
not honest about what it missed; it returns its figures. The F-numbers are those of the list of faults that
`scripts/chaos.py streams` runs. All stories can run at once.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests import media
from tests.air import PACKET, WRAP, Air, LivePlaylist, WebServer, on_air, retimed
from tests.fault_proxy import Fault, FaultProxy
from tests.watching import FPS, HASTY, LENGTH_S, Watching, watching, write_air, write_still

Figures = dict[str, float]

LASTING_S = 4.0  # of air, that a fault takes at least


class Studio:
    """The clips, made once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.clip = write_air(folder / "air.ts")
        self.larger = write_air(folder / "larger.ts", 2, width=320, height=180)
        self.mpeg4 = write_air(folder / "mpeg4.ts", 3, codec="mpeg4")
        self.black = write_still(folder / "black.ts", 16)
        self.frozen = write_still(folder / "frozen.ts")
        self.sound = write_sound_air(folder / "sound.ts")
        self.both = write_both(folder / "both.ts")

    @contextmanager
    def channel(self, name: str, clip: Path | None = None, *, mode: str = "exact") -> Iterator[Story]:
        """A channel of its own on air, behind a fault proxy, watched and up."""
        air = Air(clip or self.clip, LENGTH_S)
        began = time.monotonic()
        with (
            on_air(air) as web,
            FaultProxy(web.port) as proxy,
            watching(f"http://127.0.0.1:{proxy.port}/{name}.ts", name, mode=mode) as watched,
        ):
            watched.wait_for_state("up")
            start_s = time.monotonic() - began
            watched.wait_for_more()
            yield Story(air, proxy, watched, start_s)


def write_sound_air(path: Path) -> Path:
    """Sound alone, in MPEG-TS."""
    import av

    with av.open(str(path), "w") as container:
        media._write_tone(container, container.add_stream("mp2", rate=16000), float(LENGTH_S))
    return path


def write_both(path: Path) -> Path:
    """Pictures and sound."""
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    pictures = ((t, media.picture(4, t, 160, 90)) for t in times)
    return media.write_clip(path, pictures, fps=FPS, gop=FPS, b_frames=0, sound=True)


class Story:
    """One channel that something happens to."""

    def __init__(self, air: Air, proxy: FaultProxy, watched: Watching, start_s: float) -> None:
        self.air, self.proxy, self.watched, self.start_s = air, proxy, watched, start_s

    def after(self, fault: Fault, *states: str) -> Figures:
        """The fault, the state it leads to, its end, and the recovery in the same epoch with the gap told."""
        watched, air = self.watched, self.air
        fell_s = air.at_s
        self.proxy.fault = fault
        watched.wait(lambda: watched.source.state in states, " or ".join(states))
        noticed_s = air.at_s - fell_s
        # The server begins each connection with a second of the past: a shorter fault may leave no gap at all.
        watched.wait(lambda: air.at_s - fell_s >= LASTING_S, "the fault lasts")
        self.proxy.fault = "none"
        lasted_s, healed_s = air.at_s - fell_s, air.at_s
        watched.wait_for_state("up")
        watched.wait_for_more()
        back_s = air.at_s - healed_s
        assert len(watched.epochs) == 1, watched.epochs
        assert watched.holes, "a gap must be told"
        assert {reason for _, _, reason in watched.holes} == {"reconnect"}
        assert sum_of(watched, "copywatch_reconnects_total") >= 1
        missed = sum(n for _, n, _ in watched.holes)
        assert missed <= lasted_s + back_s + 3
        return {"noticed_s": noticed_s, "back_s": back_s, "missed_s": missed}


def sum_of(watched: Watching, name: str) -> float:
    """Over all labels but the channel."""
    return sum(
        sample.value
        for family in watched.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and sample.labels.get("channel") == watched.source.channel
    )


def stall(studio: Studio) -> Figures:
    with studio.channel("stall") as story:
        return story.after("stall", "stalled")


def trickle(studio: Studio) -> Figures:
    with studio.channel("trickle") as story:
        return story.after("trickle", "stalled")


def reset(studio: Studio) -> Figures:
    with studio.channel("reset") as story:
        return story.after("reset", "stalled", "failed")


def hang_up(studio: Studio) -> Figures:
    with studio.channel("eof") as story:
        return story.after("eof", "stalled", "failed")


def cut_short(studio: Studio) -> Figures:
    """Every connection dies after some bytes, for a while: it still moves on."""
    with studio.channel("cut") as story:
        story.proxy.cut_after = 40_000
        story.proxy.fault = "reset"
        story.watched.wait(lambda: story.watched.source.state != "up", "cut")
        story.proxy.fault = "none"
        n_before = story.proxy.n_connections
        story.watched.wait(lambda: story.proxy.n_connections >= n_before + 3, "three more connections")
        story.watched.wait_for_more()
        story.proxy.cut_after = None
        story.watched.wait_for_state("up")
        assert len(story.watched.epochs) == 1
        return {"connections": story.proxy.n_connections}


def no_headers(studio: Studio) -> Figures:
    """The server takes the connection and never says a word."""
    with WebServer(lambda request: time.sleep(3600)) as web:  # the fault itself: a server that hangs
        hasty = replace(HASTY, opening_s=3)
        with watching(f"http://127.0.0.1:{web.port}/x.ts", "silent", patience=hasty) as watched:
            began = time.monotonic()
            watched.wait_for_state("stalled")
            return {"noticed_s": time.monotonic() - began}


def unknown_host(studio: Studio) -> Figures:
    with watching("http://no-such-host.invalid/x.ts", "nowhere") as watched:
        watched.wait_for_state("failed")
        watched.wait(lambda: watched.value("copywatch_reconnects_total", reason="unreachable") >= 1, "retry")
        return {}


def _answers(code: int, state: str) -> Callable[[Studio], Figures]:
    def story(studio: Studio) -> Figures:
        air, refuses = Air(studio.clip, LENGTH_S), [True]

        def answer(request: BaseHTTPRequestHandler) -> None:
            if refuses[0]:
                request.send_error(code)
                return
            request.send_response(200)
            request.end_headers()
            for piece in air.pieces():
                request.wfile.write(piece)

        with WebServer(answer) as web, watching(f"http://127.0.0.1:{web.port}/x.ts", f"http-{code}") as watched:
            watched.wait_for_state(state)
            watched.wait(lambda: sum_of(watched, "copywatch_reconnects_total") >= 2, "two retries")
            refuses[0] = False
            healed = time.monotonic()
            watched.wait_for_state("up")
            watched.wait_for_more()
            return {"back_s": time.monotonic() - healed}

    return story


def larger_picture(studio: Studio) -> Figures:
    """Another size in mid-stream costs nothing."""
    with studio.channel("size") as story:
        n_before = story.proxy.n_connections
        story.air.use(studio.larger)
        story.watched.wait_for_more(5)
        assert story.watched.holes == []
        assert story.proxy.n_connections == n_before
        return {"missed_s": 0}


def other_codec(studio: Studio) -> Figures:
    """Another codec on the same PID is noticed, and the stream opened anew."""
    with studio.channel("codec") as story:
        changed_s = story.air.at_s
        story.air.use(studio.mpeg4)
        n_before = story.proxy.n_connections
        story.watched.wait(lambda: story.proxy.n_connections > n_before, "new connection")
        story.watched.wait_for_state("up")
        story.watched.wait_for_more()
        assert len(story.watched.epochs) == 1
        return {"back_s": story.air.at_s - changed_s, "missed_s": sum(n for _, n, _ in story.watched.holes)}


def sound_alone(studio: Studio) -> Figures:
    with studio.channel("sound", studio.both) as story:
        vanished_s = story.air.at_s
        story.air.use(studio.sound)
        story.watched.wait_for_state("no_video")
        noticed_s = story.air.at_s - vanished_s
        n_before = story.proxy.n_connections
        story.watched.wait(lambda: story.proxy.n_connections > n_before, "retry")
        story.watched.wait(lambda: story.watched.source.state == "no_video", "no_video again")
        story.air.use(studio.both)
        story.watched.wait_for_state("up")
        story.watched.wait_for_more()
        return {"noticed_s": noticed_s}


def _impaired(name: str) -> Callable[[Studio], Figures]:
    def story(studio: Studio) -> Figures:
        with studio.channel(name) as story:
            n_before = story.proxy.n_connections
            story.air.use(getattr(studio, name))
            story.watched.wait_for_state("impaired")
            story.air.use(studio.clip)
            story.watched.wait_for_state("up")
            assert story.watched.holes == []
            assert story.proxy.n_connections == n_before
            return {}

    return story


def held_is_not_frozen(studio: Studio) -> Figures:
    """Economy mode shows a key picture again and again; nobody may call that frozen."""
    with studio.channel("held", mode="economy") as story:
        story.watched.wait_for_more(HASTY.impaired_s + 4)
        assert story.watched.source.state == "up"
        assert story.watched.holes == []
        return {"seconds": len(story.watched.samples)}


def _jump(by_s: float) -> Callable[[Studio], Figures]:
    def story(studio: Studio) -> Figures:
        with studio.channel(f"jump{by_s:.0f}") as story:
            story.air.jump_s += by_s
            story.watched.wait(lambda: len(story.watched.epochs) == 2, "second epoch")
            story.watched.wait_for_more()
            epochs = story.watched.epochs
            assert len(epochs) == 2, epochs
            assert story.watched.value("copywatch_epochs_total") == 2
            after = [one.second for one in story.watched.samples if one.epoch.name == epochs[1]]
            assert after == list(range(after[0], after[0] + len(after)))  # never stretched over the jump
            return {"epochs": 2}

    return story


def one_wrap(studio: Studio) -> Figures:
    """The clock passes 2^33 ticks on air."""
    air = Air(studio.clip, LENGTH_S, start_s=WRAP / 90_000 - 8)
    with on_air(air) as web, watching(f"http://127.0.0.1:{web.port}/x.ts", "wrap") as watched:
        watched.wait(lambda: air.at_s > 11 and len(watched.samples) >= 6, "wrap")
        watched.wait_for_more()
        assert len(watched.epochs) == 1
        assert watched.holes == []
        # A decoder that begins behind the wrap knows nothing of it.
        os.kill(watched.source._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
        watched.wait_for_more(4)
        assert len(watched.epochs) == 1
        return {"seconds": len(watched.samples)}


def many_wraps(studio: Studio, laps: float = 4.2) -> Figures:
    """Several wraps in one connection, as many days of air: a picture every 9 s, sent as fast as it is read."""
    air = Air(studio.clip, LENGTH_S)
    second = air.seconds(0, 1)
    step, n_steps = 9, int(laps * WRAP / 90_000 / 9)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for n in range(n_steps):
            request.wfile.write(_numbered_packets(retimed(second, n * step * 90_000), n))
        time.sleep(3600)  # keeps the connection open, so that it is no hang-up; nobody waits for it

    from prometheus_client import CollectorRegistry

    from monitor.ingest.live import LiveSource
    from monitor.metrics import Metrics
    from monitor.settings import ChannelSettings

    metrics = Metrics(CollectorRegistry())
    with WebServer(answer) as web:
        settings = ChannelSettings(name="wraps", url=f"http://127.0.0.1:{web.port}/x.ts", mode="exact")
        patience = replace(HASTY, no_progress_s=30)
        watched = Watching(LiveSource(settings, metrics, patience=patience, real_time=False), metrics)
        try:
            while not watched.samples or watched.samples[-1].second < (n_steps - 9) * step:
                watched.wait_for_more()
            seconds = watched.seconds
            assert len(watched.epochs) == 1, watched.epochs
            assert all(b > a for a, b in pairwise(seconds))
            span_s = seconds[-1] - seconds[0]
            assert abs(span_s - n_steps * step) < 5 * step
            return {"wraps": int(laps), "hours": span_s / 3600}
        finally:
            watched.close()


def _numbered_packets(packets: bytes, n: int) -> bytes:
    """Continuity counters that go on, since the same packets are sent again and again."""
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


def gone_for_long(studio: Studio) -> Figures:
    """Away for longer than the silence that a clock bridges: paced retries, then a new epoch."""
    air = Air(studio.clip, LENGTH_S)
    patience = replace(HASTY, silence_s=4.0)
    with (
        on_air(air) as web,
        FaultProxy(web.port) as proxy,
        watching(f"http://127.0.0.1:{proxy.port}/x.ts", "gone", patience=patience) as watched,
    ):
        watched.wait_for_state("up")
        watched.wait_for_more()
        proxy.fault = "refuse"
        watched.wait(lambda: watched.source.state in ("failed", "stalled"), "failed")
        n_before, began = proxy.n_connections, time.monotonic()
        watched.wait(lambda: time.monotonic() - began > 8 and proxy.n_connections >= n_before + 2, "paced retries")
        tries, away_s = proxy.n_connections - n_before, time.monotonic() - began
        assert tries <= 6 + away_s / (0.8 * patience.last_retry_s)
        proxy.fault = "none"
        watched.wait_for_state("up")
        watched.wait_for_more()
        assert len(watched.epochs) > 1
        return {"away_s": away_s, "tries": tries}


def killed(studio: Studio, times: int = 1) -> Figures:
    """kill -9 of the decoder: it is started again at once, and what it costs is its own start."""
    with studio.channel("killed") as story:
        watched = story.watched
        for _ in range(times):
            before = len(watched.samples)
            os.kill(watched.source._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
            watched.wait(lambda n=before: len(watched.samples) >= n + 3, "seconds after the kill")  # type: ignore[misc]
        assert watched.value("copywatch_reconnects_total", reason="crashed") == times
        assert len(watched.epochs) == 1
        missed = max((n for _, n, _ in watched.holes), default=0)
        # 2 s; more only where this machine needed more to start a decoder at all
        assert missed <= max(2.0, story.start_s), (missed, story.start_s)
        return {"missed_s": missed, "start_s": story.start_s}


def crash_loop(studio: Studio) -> Figures:
    """A decoder that dies again and again is started seldom, and the channel is called failed."""
    with studio.channel("loop") as story:
        watched, killed_pids = story.watched, set[int]()

        def is_failed() -> bool:
            child = watched.source._child
            if child is not None and child.pid not in killed_pids and not watched.source._retry.is_crash_loop:
                killed_pids.add(child.pid)
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            return watched.source._retry.is_crash_loop and watched.source.state == "failed"

        watched.wait(is_failed, "failed")
        assert len(killed_pids) >= HASTY.crashes
        watched.wait_for_state("up")
        return {"kills": len(killed_pids)}


def recording_as_live(studio: Studio) -> Figures:
    """A recording that is served as fast as it can: a burst is taken, then it is read as time passes."""
    times = [n / 1 for n in range(150)]
    path = studio.folder / "vod.ts"
    media.write_clip(path, ((t, media.numbered(int(t))) for t in times), fps=1, gop=1, b_frames=0)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(path.stat().st_size))
        request.end_headers()
        request.wfile.write(path.read_bytes())

    with WebServer(answer) as web, watching(f"http://127.0.0.1:{web.port}/vod.ts", "vod") as watched:
        watched.wait(lambda: len(watched.samples) >= 60, "burst")
        began, n = time.monotonic(), len(watched.samples)
        time.sleep(4)  # what must not come in this time cannot be waited for
        came = len(watched.samples) - n
        assert came <= 1.02 * (time.monotonic() - began) + 4, came
        return {"after_burst_s": came}


def _playlist(what: str) -> Callable[[Studio], Figures]:
    def story(studio: Studio) -> Figures:
        air = Air(studio.clip, LENGTH_S)
        playlist = LivePlaylist(air)
        with WebServer(playlist.answer) as web, watching(f"http://127.0.0.1:{web.port}/live.m3u8", what) as watched:
            time.sleep(5)
            watched.wait_for_state("up")
            watched.wait_for_more()
            now = int(air.at_s) // 2
            if what == "frozen-playlist":
                playlist.frozen_at = now
                watched.wait_for_state("stalled")
                playlist.frozen_at = None
                watched.wait_for_state("up")
            elif what == "missing-segments":
                playlist.missing = {now + 1, now + 2}
            elif what == "splice":
                playlist.discontinuity = now + 2
                watched.wait(lambda: air.at_s > 2 * (now + 2), "splice")
                air.jump_s += 1000.0
            watched.wait_for_more(6)
            if what == "splice":
                watched.wait(lambda: len(watched.epochs) == 2, "second epoch")
            else:
                assert len(watched.epochs) == 1
            return {"seconds": len(watched.samples), "missed_s": sum(n for _, n, _ in watched.holes)}

    return story


def vanished_times(studio: Studio) -> Figures:
    """A raw stream has no times at all: it is numbered as it comes."""
    path = studio.folder / "raw.h264"
    times = [n / FPS for n in range(8 * FPS)]
    media.write_clip(path, ((t, media.picture(5, t, 160, 90)) for t in times), fps=FPS, gop=FPS, b_frames=0)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while True:
            request.wfile.write(path.read_bytes())
            time.sleep(2)

    with WebServer(answer) as web, watching(f"http://127.0.0.1:{web.port}/x.h264", "raw") as watched:
        watched.wait(lambda: len(watched.samples) >= 4, "seconds")
        seconds = watched.seconds
        assert seconds == list(range(seconds[0], seconds[0] + len(seconds)))
        return {"seconds": len(seconds)}


def variable_rate(studio: Studio) -> Figures:
    """Ten pictures a second, then none for three: what was not shown is a hole, and nobody reconnects for it."""
    path = studio.folder / "variable.ts"
    if not path.exists():
        times = [n / 10 for n in range(11)] + [3.9]
        media.write_clip(path, ((t, media.picture(6, t, 160, 90)) for t in times), fps=10, gop=1, b_frames=0)
    patience = replace(HASTY, no_progress_s=10)
    with (
        on_air(Air(path, LENGTH_S)) as web,
        watching(f"http://127.0.0.1:{web.port}/x.ts", "variable", patience=patience) as watched,
    ):
        watched.wait_for_more(8)
        assert watched.holes
        assert {reason for _, _, reason in watched.holes} == {"unseen"}
        assert len(watched.epochs) == 1
        assert sum_of(watched, "copywatch_reconnects_total") == 0
        return {"seconds": len(watched.samples), "missed_s": sum(n for _, n, _ in watched.holes)}


def _datagrams(loss: float) -> Callable[[Studio], Figures]:
    """UDP where some datagrams are lost, some come twice and some too late."""

    def story(studio: Studio) -> Figures:
        air, over, luck = Air(studio.clip, LENGTH_S), threading.Event(), random.Random(5)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]

        def send() -> None:
            late: bytes | None = None
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                for piece in air.pieces():
                    for start in range(0, len(piece), 7 * PACKET):
                        datagram = piece[start : start + 7 * PACKET]
                        fate = luck.random()
                        if late is not None:
                            out.sendto(late, ("127.0.0.1", port))
                            late = None
                        if fate < loss:
                            continue
                        if fate < loss + 0.02:
                            late = datagram
                            continue
                        for _ in range(2 if fate < loss + 0.04 else 1):
                            out.sendto(datagram, ("127.0.0.1", port))
                    if over.is_set():
                        return

        thread = threading.Thread(target=send)
        thread.start()
        try:
            patience = replace(HASTY, no_progress_s=10)
            with watching(f"udp://127.0.0.1:{port}", f"loss{100 * loss:.0f}", patience=patience) as watched:
                watched.wait_for_more(12)
                missed = sum(n for _, n, _ in watched.holes)
                damaged = watched.value("copywatch_damaged_pictures_total")
                assert damaged > 0 or missed > 0 or loss < 0.05
                return {"seconds": len(watched.samples), "missed_s": missed, "damaged": damaged}
        finally:
            over.set()
            thread.join()

    return story


def stopped(studio: Studio) -> Figures:
    """A decoder that gets no processor at all is as good as dead, and replaced."""
    with studio.channel("stopped") as story:
        child = story.watched.source._child
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        story.watched.wait_for_state("stalled")
        story.watched.wait_for_state("up")
        story.watched.wait_for_more()
        assert len(story.watched.epochs) == 1
        return {"missed_s": sum(n for _, n, _ in story.watched.holes)}


def untrusted(studio: Studio) -> Figures:
    """A certificate that nobody vouches for: an error, never a fall-back."""
    key, public = studio.folder / "key.pem", studio.folder / "cert.pem"
    subject = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(public), *subject]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    asked: list[str] = []
    with (
        WebServer(lambda request: asked.append(request.path), context) as web,
        watching(f"https://127.0.0.1:{web.port}/x.ts", "untrusted") as watched,
    ):
        watched.wait_for_state("failed")
        watched.wait(lambda: watched.value("copywatch_reconnects_total", reason="untrusted") >= 1, "retry")
    assert asked == []
    return {}


# fault -> story
STORIES: dict[str, Callable[[Studio], Figures]] = {
    "F15 decoder killed": killed,
    "F16 crash loop": crash_loop,
    "F34 stall": stall,
    "F35 trickle": trickle,
    "F36 reset": reset,
    "F36 cut short": cut_short,
    "F37 hang-up": hang_up,
    "F37 gone for long": gone_for_long,
    "F38 no headers": no_headers,
    "F39 unknown host": unknown_host,
    "F40 401": _answers(401, "denied"),
    "F40 403": _answers(403, "denied"),
    "F40 404": _answers(404, "denied"),
    "F40 503": _answers(503, "failed"),
    "F41 untrusted certificate": untrusted,
    "F42 one wrap": one_wrap,
    "F43 jump back": _jump(-3600.0),
    "F44 jump forward": _jump(3600.0),
    "F45 no times": vanished_times,
    "F46 splice": _playlist("splice"),
    "F47 frozen playlist": _playlist("frozen-playlist"),
    "F47 missing segments": _playlist("missing-segments"),
    "F48 other size": larger_picture,
    "F49 other codec": other_codec,
    "F50 sound alone": sound_alone,
    "F51 black": _impaired("black"),
    "F51 frozen": _impaired("frozen"),
    "F51 held is not frozen": held_is_not_frozen,
    "F52 variable rate": variable_rate,
    "F54 datagrams lost, 1 %": _datagrams(0.01),
    "F54 datagrams lost, 5 %": _datagrams(0.05),
    "F54 datagrams lost, 20 %": _datagrams(0.20),
    "F55 recording as live": recording_as_live,
    "F61 no processor": stopped,
}
# Minutes of computing, so not part of the tests.
LONG_STORIES: dict[str, Callable[[Studio], Figures]] = {
    "F42 many wraps": many_wraps,
}


def run(stories: dict[str, Callable[[Studio], Figures]], folder: Path, at_once: int) -> dict[str, dict[str, Any]]:
    """Tells the stories, several at once, beside a witness; `wrong` is 1 where one did not go as it should."""
    studio, told = Studio(folder), dict[str, dict[str, Any]]()

    def tell(name: str) -> None:
        try:
            told[name] = {**{key: round(value, 1) for key, value in stories[name](studio).items()}, "wrong": 0}
        except Exception as error:  # a story that could not be told is as bad as one that went wrong
            told[name] = {"wrong": 1, "error": f"{type(error).__name__}: {error}"[:400]}

    with on_air(Air(studio.clip, LENGTH_S)) as web, watching(f"http://127.0.0.1:{web.port}/x.ts", "witness") as witness:
        witness.wait_for_more()
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            list(pool.map(tell, stories))
        witness.wait_for_more()
        missed = sum(n for _, n, _ in witness.holes)
        wrong = int(missed > 0 or len(witness.epochs) > 1)
        told["witness"] = {"seconds": len(witness.samples), "missed_s": missed, "wrong": wrong}
    return told
