"""What happens to streams, each as a story with a real server, a fault proxy and a real decoding child.

A story raises AssertionError where the channel did not end in the state it should, did not recover by itself, or was
not honest about what it missed; it returns its figures. The F-numbers are those of the list of faults that
`scripts/chaos.py streams` runs. All stories can run at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos import clocks, losses, outage, transports
from tests.chaos.studio import Figures, Studio
from tests.support.fault_proxy import FaultProxy
from tests.support.live_stream import Air, WebServer, on_air
from tests.support.running_source import HASTY, LENGTH_S, watching


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
        assert tries <= 6 + away_s / (0.8 * patience.last_retry_s), (tries, away_s)
        proxy.fault = "none"
        watched.wait_for_state("up")
        watched.wait_for_more()
        assert len(watched.epochs) > 1, watched.epochs
        return {"away_s": away_s, "tries": tries}


def killed(studio: Studio, times: int = 1) -> Figures:
    """kill -9 of the decoder: it is started again at once, and what it costs is its own start."""
    with studio.channel("killed") as story:
        watched, back_s = story.watched, 0.0
        for _ in range(times):
            pid, killed_at = watched.pid, time.monotonic()
            os.kill(pid, signal.SIGKILL)
            watched.wait(lambda old=pid: watched.pid not in (0, old), "another decoder")  # type: ignore[misc]
            watched.wait_for_more(1)  # of the new one
            back_s = max(back_s, time.monotonic() - killed_at)
            watched.wait_for_more(2)
        assert watched.value("copywatch_reconnects_total", reason="crashed") == times
        assert len(watched.epochs) == 1
        missed = max((n for _, n, _ in watched.holes), default=0)
        # 2 s; more only where this machine needed more to start a decoder at all
        assert missed <= max(2.0, story.start_s), (missed, story.start_s)
        return {"back_s": back_s, "missed_s": missed, "start_s": story.start_s}


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
    "F40 401": transports.answers(401, "denied"),
    "F40 403": transports.answers(403, "denied"),
    "F40 404": transports.answers(404, "denied"),
    "F40 503": transports.answers(503, "failed"),
    "F41 untrusted certificate": transports.untrusted,
    "F41 expired certificate": transports.expired,
    "F42 one wrap": clocks.one_wrap,
    "F43 jump back": clocks.jump(-3600.0),
    "F44 jump forward": clocks.jump(3600.0),
    "F45 no times": clocks.vanished_times,
    "F46 splice": transports.playlist("splice"),
    "F47 frozen playlist": transports.playlist("frozen-playlist"),
    "F47 numbers anew": transports.playlist("numbers-anew"),
    "F47 missing segments": transports.playlist("missing-segments"),
    "F48 other size": larger_picture,
    "F49 other codec": other_codec,
    "F50 sound alone": sound_alone,
    "F51 black": _impaired("black"),
    "F51 frozen": _impaired("frozen"),
    "F51 held is not frozen": held_is_not_frozen,
    "F52 variable rate": clocks.variable_rate,
    "F54 datagrams lost, 1 %": transports.datagrams(0.01),
    "F54 datagrams lost, 5 %": transports.datagrams(0.05),
    "F54 datagrams lost, 20 %": transports.datagrams(0.20),
    "F54 RTSP datagrams lost": losses.rtsp_datagrams(0.05),
    "F54 RTSP in TCP torn and cut": losses.rtsp_in_tcp(),
    "F54 RTMP bytes spoilt": losses.rtmp_bytes(),
    "F55 recording as live": clocks.recording_as_live,
    "F61 no processor": stopped,
}


def long_stories(gone_for_s: float) -> dict[str, Callable[[Studio], Figures]]:
    """Minutes of computing, or an hour of waiting, so not part of the tests. The longest begins first."""
    return {
        "F37 gone for an hour": outage.gone(gone_for_s),
        "F15 decoder killed, 4 times": partial(killed, times=4),
        "F42 many wraps": clocks.many_wraps,
        "F47 segments of 12 s": transports.long_segments,
        "F52 a picture every 5 s": clocks.picture_rate(5.0),
        "F52 120 pictures a second": clocks.picture_rate(1 / 120),
        "F54 RTSP datagrams lost, 1 %": losses.rtsp_datagrams(0.01, 60),
        "F54 RTSP datagrams lost, 20 %": losses.rtsp_datagrams(0.20, 60),
        "F54 RTSP datagrams lost, key pictures": losses.rtsp_datagrams(0.05, 60, mode="economy"),
        "F54 RTSP in TCP torn and cut, 5 times": losses.rtsp_in_tcp(5),
        "F54 RTMP bytes spoilt, 5 times": losses.rtmp_bytes(5),
    }


def run(
    stories: dict[str, Callable[[Studio], Figures]],
    folder: Path,
    at_once: int,
    say: Callable[[str, dict[str, Any]], None] = lambda name, figures: None,
) -> dict[str, dict[str, Any]]:
    """Tells the stories, several at once, beside a witness; `wrong` is 1 where one did not go as it should.

    `say` hears of each as it ends.
    """
    studio, told = Studio(folder), dict[str, dict[str, Any]]()

    def tell(name: str) -> None:
        began = time.monotonic()
        try:
            told[name] = {**{key: round(value, 1) for key, value in stories[name](studio).items()}, "wrong": 0}
        except Exception as error:  # a story that could not be told is as bad as one that went wrong
            told[name] = {"wrong": 1, "error": f"{type(error).__name__}: {error}"[:400]}
        say(f"{name} ({time.monotonic() - began:.0f} s)", told[name])

    with (
        on_air(Air(studio.clip, LENGTH_S)) as web,
        watching(f"http://127.0.0.1:{web.port}/x.ts", "witness", pictures=False) as witness,
    ):
        witness.wait_for_more()
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            list(pool.map(tell, stories))
        witness.wait_for_more()
        missed = sum(n for _, n, _ in witness.holes)
        wrong = int(missed > 0 or len(witness.epochs) > 1)
        told["witness"] = {"seconds": len(witness.samples), "missed_s": missed, "wrong": wrong}
        say("witness", told["witness"])
    return told
