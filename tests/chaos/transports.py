"""Stories of the way that a stream takes: what a web server answers, playlists, datagrams, certificates."""

from __future__ import annotations

import os
import random
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.chaos.studio import Figures, Studio, sum_of
from tests.support.live_stream import PACKET, Air, LivePlaylist, WebServer
from tests.support.running_source import HASTY, LENGTH_S, watching


def answers(code: int, state: str) -> Callable[[Studio], Figures]:
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


def playlist(what: str) -> Callable[[Studio], Figures]:
    def story(studio: Studio) -> Figures:
        air = Air(studio.clip, LENGTH_S)
        playlist = LivePlaylist(air)
        playlist.less = -1000 if what == "numbers-anew" else 0
        with WebServer(playlist.answer) as web, watching(f"http://127.0.0.1:{web.port}/live.m3u8", what) as watched:
            watched.wait_for_state("up")
            watched.wait_for_more()
            now = int(air.at_s) // 2
            if what == "frozen-playlist":
                playlist.frozen_at = now
                watched.wait_for_state("stalled")
                playlist.frozen_at = None
                watched.wait_for_state("up")
            elif what == "numbers-anew":  # FFmpeg waits for a number that will not come for long
                playlist.less = 0
                watched.wait_for_state("stalled")
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


def long_segments(studio: Studio) -> Figures:
    """Segments of 12 s: nothing comes for longer than another stream may be silent, and nobody reconnects for it."""
    playlist = LivePlaylist(Air(studio.clip, LENGTH_S), segment_s=12)
    patience = replace(HASTY, segments_s=30)
    with (
        WebServer(playlist.answer) as web,
        watching(f"http://127.0.0.1:{web.port}/live.m3u8", "long-segments", patience=patience) as watched,
    ):
        watched.wait_for_state("up")
        before = sum_of(watched, "copywatch_reconnects_total")  # while there was no segment yet
        watched.wait_for_more(38)
        after = sum_of(watched, "copywatch_reconnects_total")
        assert after == before, (before, after)
        assert watched.holes == []
        assert len(watched.epochs) == 1
        return {"seconds": len(watched.samples), "missed_s": 0}


def datagrams(loss: float) -> Callable[[Studio], Figures]:
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
