"""Stream faults: each is a scenario with a real server, a fault proxy and a real decoding child.

A scenario returns its figures. It raises AssertionError if the channel does not reach the expected state, does not
recover, or does not report what it missed. The F-numbers are those of the faults that `scripts/chaos.py streams` runs.
All scenarios can run at once.
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
from tests.chaos.faulty_channel import ClipSet, Figures
from tests.support.fault_proxy import FaultProxy
from tests.support.live_stream import LiveStream, WebServer, serve_stream
from tests.support.running_source import LENGTH_S, SHORT_TIMEOUTS, running_source


def stall(clips: ClipSet) -> Figures:
    with clips.channel("stall") as channel:
        return channel.recover_from("stall", "stalled")


def trickle(clips: ClipSet) -> Figures:
    with clips.channel("trickle") as channel:
        return channel.recover_from("trickle", "stalled")


def reset(clips: ClipSet) -> Figures:
    with clips.channel("reset") as channel:
        return channel.recover_from("reset", "stalled", "failed")


def close_connection(clips: ClipSet) -> Figures:
    with clips.channel("eof") as channel:
        return channel.recover_from("eof", "stalled", "failed")


def cut_short(clips: ClipSet) -> Figures:
    """Every connection is cut after some bytes, for a while: the channel still advances."""
    with clips.channel("cut") as channel:
        channel.proxy.cut_after = 40_000
        channel.proxy.fault = "reset"
        channel.running.wait(lambda: channel.running.source.state != "up", "cut")
        channel.proxy.fault = "none"
        n_before = channel.proxy.n_connections
        channel.running.wait(lambda: channel.proxy.n_connections >= n_before + 3, "three more connections")
        channel.running.wait_for_more()
        channel.proxy.cut_after = None
        channel.running.wait_for_state("up")
        assert len(channel.running.epochs) == 1
        return {"connections": channel.proxy.n_connections}


def no_headers(clips: ClipSet) -> Figures:
    """The server accepts the connection and never responds."""
    with WebServer(lambda request: time.sleep(3600)) as web:  # the fault itself: a server that hangs
        timeouts = replace(SHORT_TIMEOUTS, opening_s=3)
        with running_source(f"http://127.0.0.1:{web.port}/x.ts", "silent", timeouts=timeouts) as running:
            began = time.monotonic()
            running.wait_for_state("stalled")
            return {"noticed_s": time.monotonic() - began}


def unknown_host(clips: ClipSet) -> Figures:
    with running_source("http://no-such-host.invalid/x.ts", "nowhere") as running:
        running.wait_for_state("failed")
        running.wait(lambda: running.value("copywatch_reconnects_total", reason="unreachable") >= 1, "retry")
        return {}


def larger_picture(clips: ClipSet) -> Figures:
    """A change of picture size loses nothing."""
    with clips.channel("size") as channel:
        n_before = channel.proxy.n_connections
        channel.stream.use(clips.larger)
        channel.running.wait_for_more(5)
        assert channel.running.holes == []
        assert channel.proxy.n_connections == n_before
        return {"missed_s": 0}


def other_codec(clips: ClipSet) -> Figures:
    """A change of codec on the same PID is detected, and the stream reopened."""
    with clips.channel("codec") as channel:
        changed_s = channel.stream.at_s
        channel.stream.use(clips.mpeg4)
        n_before = channel.proxy.n_connections
        channel.running.wait(lambda: channel.proxy.n_connections > n_before, "new connection")
        channel.running.wait_for_state("up")
        channel.running.wait_for_more()
        assert len(channel.running.epochs) == 1
        return {"back_s": channel.stream.at_s - changed_s, "missed_s": sum(n for _, n, _ in channel.running.holes)}


def sound_only(clips: ClipSet) -> Figures:
    with clips.channel("sound", clips.both) as channel:
        changed_s = channel.stream.at_s
        channel.stream.use(clips.sound)
        channel.running.wait_for_state("no_video")
        noticed_s = channel.stream.at_s - changed_s
        n_before = channel.proxy.n_connections
        channel.running.wait(lambda: channel.proxy.n_connections > n_before, "retry")
        channel.running.wait(lambda: channel.running.source.state == "no_video", "no_video again")
        channel.stream.use(clips.both)
        channel.running.wait_for_state("up")
        channel.running.wait_for_more()
        return {"noticed_s": noticed_s}


def _impaired(name: str) -> Callable[[ClipSet], Figures]:
    def scenario(clips: ClipSet) -> Figures:
        with clips.channel(name) as channel:
            n_before = channel.proxy.n_connections
            channel.stream.use(getattr(clips, name))
            channel.running.wait_for_state("impaired")
            channel.stream.use(clips.clip)
            channel.running.wait_for_state("up")
            assert channel.running.holes == []
            assert channel.proxy.n_connections == n_before
            return {}

    return scenario


def held_is_not_frozen(clips: ClipSet) -> Figures:
    """Economy mode repeats key frames; this must not count as frozen."""
    with clips.channel("held", mode="economy") as channel:
        channel.running.wait_for_more(SHORT_TIMEOUTS.impaired_s + 4)
        assert channel.running.source.state == "up"
        assert channel.running.holes == []
        return {"seconds": len(channel.running.samples)}


def away_for_long(clips: ClipSet) -> Figures:
    """Away for longer than the silence that a clock bridges: slow retries, then a new epoch."""
    stream = LiveStream(clips.clip, LENGTH_S)
    timeouts = replace(SHORT_TIMEOUTS, silence_s=4.0)
    with (
        serve_stream(stream) as web,
        FaultProxy(web.port) as proxy,
        running_source(f"http://127.0.0.1:{proxy.port}/x.ts", "away", timeouts=timeouts) as running,
    ):
        running.wait_for_state("up")
        running.wait_for_more()
        proxy.fault = "refuse"
        running.wait(lambda: running.source.state in ("failed", "stalled"), "failed")
        n_before, began = proxy.n_connections, time.monotonic()
        running.wait(lambda: time.monotonic() - began > 8 and proxy.n_connections >= n_before + 2, "paced retries")
        tries, away_s = proxy.n_connections - n_before, time.monotonic() - began
        assert tries <= 6 + away_s / (0.8 * timeouts.last_retry_s), (tries, away_s)
        proxy.fault = "none"
        running.wait_for_state("up")
        running.wait_for_more()
        assert len(running.epochs) > 1, running.epochs
        return {"away_s": away_s, "tries": tries}


def killed(clips: ClipSet, times: int = 1) -> Figures:
    """kill -9 of the decoder: it is restarted at once, and only its start-up time is lost."""
    with clips.channel("killed") as channel:
        running, back_s = channel.running, 0.0
        for _ in range(times):
            pid, killed_at = running.pid, time.monotonic()
            os.kill(pid, signal.SIGKILL)
            running.wait(lambda old=pid: running.pid not in (0, old), "another decoder")  # type: ignore[misc]
            running.wait_for_more(1)  # of the new decoder
            back_s = max(back_s, time.monotonic() - killed_at)
            running.wait_for_more(2)
        assert running.value("copywatch_reconnects_total", reason="crashed") == times
        assert len(running.epochs) == 1
        missed = max((n for _, n, _ in running.holes), default=0)
        # 2 s; more only if this machine needed longer to start a decoder
        assert missed <= max(2.0, channel.start_s), (missed, channel.start_s)
        return {"back_s": back_s, "missed_s": missed, "start_s": channel.start_s}


def crash_loop(clips: ClipSet) -> Figures:
    """A decoder that keeps crashing is restarted less often, and the channel is reported as failed."""
    with clips.channel("loop") as channel:
        running, killed_pids = channel.running, set[int]()

        def is_failed() -> bool:
            child = running.source._child
            if child is not None and child.pid not in killed_pids and not running.source._retries.is_crash_loop:
                killed_pids.add(child.pid)
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            return running.source._retries.is_crash_loop and running.source.state == "failed"

        running.wait(is_failed, "failed")
        assert len(killed_pids) >= SHORT_TIMEOUTS.crashes
        running.wait_for_state("up")
        return {"kills": len(killed_pids)}


def stopped(clips: ClipSet) -> Figures:
    """A decoder that gets no CPU is replaced."""
    with clips.channel("stopped") as channel:
        child = channel.running.source._child
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        channel.running.wait_for_state("stalled")
        channel.running.wait_for_state("up")
        channel.running.wait_for_more()
        assert len(channel.running.epochs) == 1
        return {"missed_s": sum(n for _, n, _ in channel.running.holes)}


# fault -> scenario
SCENARIOS: dict[str, Callable[[ClipSet], Figures]] = {
    "F15 decoder killed": killed,
    "F16 crash loop": crash_loop,
    "F34 stall": stall,
    "F35 trickle": trickle,
    "F36 reset": reset,
    "F36 cut short": cut_short,
    "F37 closed by the server": close_connection,
    "F37 away for long": away_for_long,
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
    "F45 no timestamps": clocks.missing_times,
    "F46 splice": transports.playlist("splice"),
    "F47 frozen playlist": transports.playlist("frozen-playlist"),
    "F47 sequence numbers restarted": transports.playlist("restarted-numbers"),
    "F47 missing segments": transports.playlist("missing-segments"),
    "F48 other size": larger_picture,
    "F49 other codec": other_codec,
    "F50 sound only": sound_only,
    "F51 black": _impaired("black"),
    "F51 frozen": _impaired("frozen"),
    "F51 held is not frozen": held_is_not_frozen,
    "F52 variable rate": clocks.variable_rate,
    "F54 datagrams lost, 1 %": transports.datagrams(0.01),
    "F54 datagrams lost, 5 %": transports.datagrams(0.05),
    "F54 datagrams lost, 20 %": transports.datagrams(0.20),
    "F54 RTSP datagrams lost": losses.rtsp_datagrams(0.05),
    "F54 RTSP in TCP torn and cut": losses.rtsp_in_tcp(),
    "F54 RTMP bytes damaged": losses.rtmp_bytes(),
    "F55 recording as live": clocks.recording_as_live,
    "F61 no CPU": stopped,
}


def long_scenarios(away_s: float) -> dict[str, Callable[[ClipSet], Figures]]:
    """Scenarios that take minutes or an hour, so not part of the tests; the longest starts first."""
    return {
        "F37 away for an hour": outage.away(away_s),
        "F15 decoder killed, 4 times": partial(killed, times=4),
        "F42 many wraps": clocks.many_wraps,
        "F47 segments of 12 s": transports.long_segments,
        "F52 a picture every 5 s": clocks.picture_rate(5.0),
        "F52 120 pictures a second": clocks.picture_rate(1 / 120),
        "F54 RTSP datagrams lost, 1 %": losses.rtsp_datagrams(0.01, 60),
        "F54 RTSP datagrams lost, 20 %": losses.rtsp_datagrams(0.20, 60),
        "F54 RTSP datagrams lost, economy mode": losses.rtsp_datagrams(0.05, 60, mode="economy"),
        "F54 RTSP in TCP torn and cut, 5 times": losses.rtsp_in_tcp(5),
        "F54 RTMP bytes damaged, 5 times": losses.rtmp_bytes(5),
    }


def run(
    scenarios: dict[str, Callable[[ClipSet], Figures]],
    folder: Path,
    at_once: int,
    say: Callable[[str, dict[str, Any]], None] = lambda name, figures: None,
) -> dict[str, dict[str, Any]]:
    """Runs the scenarios, several at once, beside a witness channel; `failures` is 1 where one failed.

    Calls `say` with the figures of each as it ends.
    """
    clips, results = ClipSet(folder), dict[str, dict[str, Any]]()

    def run_one(name: str) -> None:
        began = time.monotonic()
        try:
            figures = scenarios[name](clips)
            results[name] = {**{key: round(value, 1) for key, value in figures.items()}, "failures": 0}
        except Exception as error:  # a scenario that cannot run has failed too
            results[name] = {"failures": 1, "error": f"{type(error).__name__}: {error}"[:400]}
        say(f"{name} ({time.monotonic() - began:.0f} s)", results[name])

    with (
        serve_stream(LiveStream(clips.clip, LENGTH_S)) as web,
        running_source(f"http://127.0.0.1:{web.port}/x.ts", "witness", pictures=False) as witness,
    ):
        witness.wait_for_more()
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            list(pool.map(run_one, scenarios))
        witness.wait_for_more()
        missed = sum(n for _, n, _ in witness.holes)
        failures = int(missed > 0 or len(witness.epochs) > 1)
        results["witness"] = {"seconds": len(witness.samples), "missed_s": missed, "failures": failures}
        say("witness", results["witness"])
    return results
