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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.air import PACKET, Air, LivePlaylist, WebServer, on_air
from tests.chaos import clocks
from tests.chaos.studio import Figures, Studio, sum_of
from tests.fault_proxy import FaultProxy
from tests.watching import HASTY, LENGTH_S, watching


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


def _playlist(what: str) -> Callable[[Studio], Figures]:
    def story(studio: Studio) -> Figures:
        air = Air(studio.clip, LENGTH_S)
        playlist = LivePlaylist(air)
        with WebServer(playlist.answer) as web, watching(f"http://127.0.0.1:{web.port}/live.m3u8", what) as watched:
            time.sleep(5)  # real time: the air goes on until a playlist has its first segments
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


SELF_SIGNED, EXPIRED = 18, 10  # OpenSSL's numbers for what is wrong with a certificate


def untrusted(studio: Studio) -> Figures:
    """A certificate that nobody vouches for: an error, never a fall-back."""
    assert _refused_by_tls(*_certificate(studio.folder, "untrusted", days=2)) == SELF_SIGNED
    return {}


def expired(studio: Studio) -> Figures:
    """A certificate that would be trusted if its time were not over."""
    context, public = _certificate(studio.folder, "expired", days=-1)
    os.environ["SSL_CERT_FILE"] = str(public)  # trusted by the decoders that begin from now on
    try:
        assert _refused_by_tls(context, public) == EXPIRED
    finally:
        del os.environ["SSL_CERT_FILE"]
    return {}


def _certificate(folder: Path, name: str, days: int) -> tuple[ssl.SSLContext, Path]:
    """A server's side of TLS, and the certificate: of its own making, good for so many days."""
    key, request, public = (folder / f"{name}-{what}.pem" for what in ("key", "request", "certificate"))
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    ask: list[str | Path] = [
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        request,
        "-subj",
        "/CN=here",
    ]
    sign: list[str | Path] = [
        "x509",
        "-req",
        "-in",
        request,
        "-signkey",
        key,
        "-extfile",
        folder / "names",
        "-days",
        str(days),
    ]
    for command in (ask, [*sign, "-out", public]):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    return context, public


def _refused_by_tls(context: ssl.SSLContext, public: Path) -> int:
    """OpenSSL's number for what is wrong with the certificate; a channel does not take it either."""
    asked: list[str] = []
    with (
        WebServer(lambda request: asked.append(request.path), context) as web,
        watching(f"https://127.0.0.1:{web.port}/x.ts", public.stem) as watched,
    ):
        watched.wait_for_state("failed")
        watched.wait(lambda: watched.value("copywatch_reconnects_total", reason="untrusted") >= 1, "retry")
        assert asked == []
        with socket.create_connection(("127.0.0.1", web.port)) as plain:
            try:
                ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1").close()
            except ssl.SSLCertVerificationError as error:
                return error.verify_code
    return 0


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
    "F41 expired certificate": expired,
    "F42 one wrap": clocks.one_wrap,
    "F43 jump back": clocks.jump(-3600.0),
    "F44 jump forward": clocks.jump(3600.0),
    "F45 no times": clocks.vanished_times,
    "F46 splice": _playlist("splice"),
    "F47 frozen playlist": _playlist("frozen-playlist"),
    "F47 missing segments": _playlist("missing-segments"),
    "F48 other size": larger_picture,
    "F49 other codec": other_codec,
    "F50 sound alone": sound_alone,
    "F51 black": _impaired("black"),
    "F51 frozen": _impaired("frozen"),
    "F51 held is not frozen": held_is_not_frozen,
    "F52 variable rate": clocks.variable_rate,
    "F54 datagrams lost, 1 %": _datagrams(0.01),
    "F54 datagrams lost, 5 %": _datagrams(0.05),
    "F54 datagrams lost, 20 %": _datagrams(0.20),
    "F55 recording as live": clocks.recording_as_live,
    "F61 no processor": stopped,
}
# Minutes of computing, so not part of the tests.
LONG_STORIES: dict[str, Callable[[Studio], Figures]] = {
    "F42 many wraps": clocks.many_wraps,
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
