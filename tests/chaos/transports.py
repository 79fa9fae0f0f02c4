"""Transport scenarios: HTTP status codes, playlists, datagrams, certificates."""

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

from tests.chaos.faulty_channel import ClipSet, Figures, sum_of
from tests.support.live_stream import PACKET, LivePlaylist, LiveStream, WebServer
from tests.support.running_source import LENGTH_S, SHORT_TIMEOUTS, running_source


def answers(code: int, state: str) -> Callable[[ClipSet], Figures]:
    def scenario(clips: ClipSet) -> Figures:
        stream, is_refusing = LiveStream(clips.clip, LENGTH_S), [True]

        def answer(request: BaseHTTPRequestHandler) -> None:
            if is_refusing[0]:
                request.send_error(code)
                return
            request.send_response(200)
            request.end_headers()
            for piece in stream.pieces():
                request.wfile.write(piece)

        with WebServer(answer) as web, running_source(f"http://127.0.0.1:{web.port}/x.ts", f"http-{code}") as running:
            running.wait_for_state(state)
            running.wait(lambda: sum_of(running, "copywatch_reconnects_total") >= 2, "two retries")
            is_refusing[0] = False
            lifted = time.monotonic()
            running.wait_for_state("up")
            running.wait_for_more()
            return {"back_s": time.monotonic() - lifted}

    return scenario


def playlist(what: str) -> Callable[[ClipSet], Figures]:
    def scenario(clips: ClipSet) -> Figures:
        stream = LiveStream(clips.clip, LENGTH_S)
        playlist = LivePlaylist(stream)
        playlist.less = -1000 if what == "restarted-numbers" else 0
        with (
            WebServer(playlist.answer) as web,
            running_source(f"http://127.0.0.1:{web.port}/live.m3u8", what) as running,
        ):
            running.wait_for_state("up")
            running.wait_for_more()
            now = int(stream.at_s) // 2
            if what == "frozen-playlist":
                playlist.frozen_at = now
                running.wait_for_state("stalled")
                playlist.frozen_at = None
                running.wait_for_state("up")
            elif what == "restarted-numbers":  # FFmpeg waits for a number that is far ahead
                playlist.less = 0
                running.wait_for_state("stalled")
                running.wait_for_state("up")
            elif what == "missing-segments":
                playlist.missing = {now + 1, now + 2}
            elif what == "splice":
                playlist.discontinuity = now + 2
                running.wait(lambda: stream.at_s > 2 * (now + 2), "splice")
                stream.jump_s += 1000.0
            running.wait_for_more(6)
            if what == "splice":
                running.wait(lambda: len(running.epochs) == 2, "second epoch")
            else:
                assert len(running.epochs) == 1
            return {"seconds": len(running.samples), "missed_s": sum(n for _, n, _ in running.holes)}

    return scenario


def long_segments(clips: ClipSet) -> Figures:
    """Segments of 12 s: longer without data than other streams may be, without a reconnect."""
    playlist = LivePlaylist(LiveStream(clips.clip, LENGTH_S), segment_s=12)
    timeouts = replace(SHORT_TIMEOUTS, segments_s=30)
    with (
        WebServer(playlist.answer) as web,
        running_source(f"http://127.0.0.1:{web.port}/live.m3u8", "long-segments", timeouts=timeouts) as running,
    ):
        running.wait_for_state("up")
        before = sum_of(running, "copywatch_reconnects_total")  # reconnects before the first segment
        running.wait_for_more(38)
        after = sum_of(running, "copywatch_reconnects_total")
        assert after == before, (before, after)
        assert running.holes == []
        assert len(running.epochs) == 1
        return {"seconds": len(running.samples), "missed_s": 0}


def datagrams(loss: float) -> Callable[[ClipSet], Figures]:
    """UDP with datagrams lost, duplicated and reordered."""

    def scenario(clips: ClipSet) -> Figures:
        stream, over, luck = LiveStream(clips.clip, LENGTH_S), threading.Event(), random.Random(5)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]

        def send() -> None:
            late: bytes | None = None
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                for piece in stream.pieces():
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
            timeouts = replace(SHORT_TIMEOUTS, no_progress_s=10)
            with running_source(f"udp://127.0.0.1:{port}", f"loss{100 * loss:.0f}", timeouts=timeouts) as running:
                running.wait_for_more(12)
                missed = sum(n for _, n, _ in running.holes)
                damaged = running.value("copywatch_damaged_pictures_total")
                assert damaged > 0 or missed > 0 or loss < 0.05
                return {"seconds": len(running.samples), "missed_s": missed, "damaged": damaged}
        finally:
            over.set()
            thread.join()

    return scenario


SELF_SIGNED, EXPIRED = 18, 10  # verification errors of OpenSSL


def untrusted(clips: ClipSet) -> Figures:
    """A self-signed certificate is an error, without a fall-back."""
    assert _refused_by_tls(*_certificate(clips.folder, "untrusted", days=2)) == SELF_SIGNED
    return {}


def expired(clips: ClipSet) -> Figures:
    """A trusted certificate that has expired is an error."""
    context, public = _certificate(clips.folder, "expired", days=-1)
    os.environ["SSL_CERT_FILE"] = str(public)  # trusted by decoders that start from now on
    try:
        assert _refused_by_tls(context, public) == EXPIRED
    finally:
        del os.environ["SSL_CERT_FILE"]
    return {}


def _certificate(folder: Path, name: str, days: int) -> tuple[ssl.SSLContext, Path]:
    """A TLS server context with a self-signed certificate that is valid for `days`, and the certificate."""
    key, request, public = (folder / f"{name}-{what}.pem" for what in ("key", "request", "certificate"))
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    request_command: list[str | Path] = [
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
    sign_command: list[str | Path] = [
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
    for command in (request_command, [*sign_command, "-out", public]):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    return context, public


def _refused_by_tls(context: ssl.SSLContext, public: Path) -> int:
    """OpenSSL's verification error for the certificate; checks that a channel refuses it too."""
    requests: list[str] = []
    with (
        WebServer(lambda request: requests.append(request.path), context) as web,
        running_source(f"https://127.0.0.1:{web.port}/x.ts", public.stem) as running,
    ):
        running.wait_for_state("failed")
        running.wait(lambda: running.value("copywatch_reconnects_total", reason="untrusted") >= 1, "retry")
        assert requests == []
        with socket.create_connection(("127.0.0.1", web.port)) as plain:
            try:
                ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1").close()
            except ssl.SSLCertVerificationError as error:
                return error.verify_code
    return 0
