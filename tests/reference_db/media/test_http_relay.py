"""The HTTP relay: what it forwards, and what it never connects to.

A canary is a listener on a private address that the channel does not allow; a connection to it is a breakout.
"""

import base64
import secrets
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from reference_db.errors import MediaError
from reference_db.media.addresses import ReachPolicy
from reference_db.media.decoding import DecodingChild
from reference_db.media.http_relay import HttpRelay, PlaylistProgress, PlaylistRestarted
from tests.support.changing_names import ChangingNames
from tests.support.media import write_film

SECRET = "c4naryPa55word123"
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(
    handler: Callable[..., BaseHTTPRequestHandler], trust: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        if trust is not None:
            server.socket = trust.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answering(answer: Answer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Folder(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def canary() -> Iterator[list[str]]:
    """The first item is its address; every connection adds another."""
    visits: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        visits.append(f"127.0.0.1:{listener.getsockname()[1]}")

        def listen() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                visits.append("a connection")
                connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        yield visits
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_film(tmp_path_factory.mktemp("web") / "film.ts", 1, 4, width=160, height=90)


def relay_for(url: str, *allow: str) -> tuple[HttpRelay, list[str]]:
    problems: list[str] = []
    return HttpRelay(url, ReachPolicy.of(url, allow), lambda _kind, sentence: problems.append(sentence)), problems


def test_a_name_that_leads_inside_later_is_not_followed_there(
    canary: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ChangingNames(monkeypatch)
    with serving(answering(lambda request: request.send_error(404))) as public:
        url = f"http://rebind.example:{canary[0].rpartition(':')[2]}/admin/do?delete=1"
        relay, problems = relay_for(url)
        for inside in ("127.0.0.1", "localhost", "::1"):
            names.numbers["rebind.example"] = inside
            with pytest.raises(urllib.error.HTTPError, match="403"):
                read(relay.url)
        own = relay_for(f"http://localhost:{public.server_address[1]}/")[0]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(own.url)
    assert canary[1:] == []
    assert "set the channel's `private: true`" in problems[0]


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as reply:
        body: bytes = reply.read()
        return body


HOSTILE_LINES = [
    "http://{}/x.ts",
    "http://user@{}/x.ts",
    "HTTP://{}/x.ts",
    "https://{}/x.ts",
    "//{}/x.ts",
    "http://localhost:{port}/x.ts",
    "http://2130706433:{port}/x.ts",
    "http://0x7f.1:{port}/x.ts",
    "http://[::ffff:127.0.0.1]:{port}/x.ts",
    "http://0:{port}/x.ts",
    "tcp://{}",
    "file:///etc/passwd",
    "/etc/passwd",
    "concat:http://{}/a|http://{}/b",
    "crypto+http://{}/x.ts",
    "subfile,,start,0,end,9,,:/etc/passwd",
    "data:text/plain,x",
    "udp://{}",
    "rtsp://{}/x",
    "gopher://{}/x",
    "http://{}\\@cdn.example.com/x.ts",
    "http://{}#@cdn.example.com/x.ts",
]
HOSTILE_TAGS = [
    '#EXT-X-KEY:METHOD=AES-128,URI="{}"',
    '#EXT-X-MAP:URI="{}"',
    '#EXT-X-MEDIA:TYPE=AUDIO,GROUP-ID="a",NAME="a",URI="{}"',
    '#EXT-X-I-FRAME-STREAM-INF:BANDWIDTH=1,URI="{}"',
]


def test_no_url_of_a_playlist_reaches_a_private_address(canary: list[str]) -> None:
    port = canary[0].rpartition(":")[2]
    lines = [one.replace("{}", canary[0]).replace("{port}", port) for one in HOSTILE_LINES]
    tags = [tag.replace("{}", line) for tag in HOSTILE_TAGS for line in lines if '"' not in line]
    playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:2\n" + "".join(f"{one}\n" for one in [*tags, *lines])

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200 if request.path == "/live.m3u8" else 404)
        request.end_headers()
        if request.path == "/live.m3u8":
            request.wfile.write(playlist.encode())

    with serving(answering(answer)) as web:
        relay, problems = relay_for(f"http://127.0.0.1:{web.server_address[1]}/live.m3u8")
        rewritten = read(relay.url).decode()
        links = [word for line in rewritten.splitlines() for word in line.split('"') if "://" in word]
        assert len(links) == len(lines) + len(tags)
        for link in links:
            assert link.startswith(f"http://127.0.0.1:{relay.port}/")
            with pytest.raises(urllib.error.HTTPError):
                read(link)
    assert canary[1:] == []
    assert any("a private address that the channel does not allow" in sentence for sentence in problems)
    assert any("neither http nor https" in sentence for sentence in problems)


def redirecting(to: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", to)
        request.end_headers()

    return answer


@pytest.mark.parametrize("to", ["http://{}/x", "https://{}/x", "//{}/x", "file:///etc/passwd", "tcp://{}", "/again"])
def test_a_redirect_reaches_no_private_address_and_does_not_loop(canary: list[str], to: str) -> None:
    with serving(answering(redirecting(to.replace("{}", canary[0])))) as web:
        relay, problems = relay_for(f"http://127.0.0.1:{web.server_address[1]}/live.ts")
        with pytest.raises(urllib.error.HTTPError):
            read(relay.url)
    assert canary[1:] == []
    assert problems


def test_a_private_host_that_is_allowed_is_reached(film: Path) -> None:
    with (
        serving(partial(Folder, directory=str(film.parent))) as web,
        serving(answering(redirecting(f"http://localhost:{web.server_address[1]}/film.ts"))) as redirect,
    ):
        url = f"http://127.0.0.1:{redirect.server_address[1]}/x"
        assert read(relay_for(url, "localhost")[0].url) == film.read_bytes()
        assert read(relay_for(url, "127.0.0.0/8", "::1")[0].url) == film.read_bytes()
        with pytest.raises(urllib.error.HTTPError):
            read(relay_for(url, "10.0.0.0/8")[0].url)


def test_other_processes_of_this_machine_cannot_use_the_relay(film: Path) -> None:
    with serving(partial(Folder, directory=str(film.parent))) as web:
        relay, _ = relay_for(f"http://127.0.0.1:{web.server_address[1]}/film.ts")
        base = f"http://127.0.0.1:{relay.port}"
        for path in ("/", "/0/film.ts", "/0000000000000000/0/film.ts", "//0/", "/x/y/z"):
            with pytest.raises(urllib.error.HTTPError):
                read(base + path)


def test_user_and_password_are_sent_to_their_host_only() -> None:
    requests: list[tuple[str, str | None]] = []

    def protected(request: BaseHTTPRequestHandler) -> None:
        given = request.headers.get("Authorization")
        requests.append((request.path, given))
        if given != "Basic " + base64.b64encode(f"us er:{SECRET}@".encode()).decode():
            request.send_response(401)
            request.send_header("WWW-Authenticate", 'Basic realm="x"')
        elif request.path == "/away":
            request.send_response(302)
            request.send_header("Location", f"http://127.0.0.1:{other.server_address[1]}/elsewhere")
        else:
            request.send_response(200)
        request.end_headers()
        if request.path == "/in":
            request.wfile.write(b"content")

    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        requests.append((request.path, request.headers.get("Authorization")))
        request.send_response(401)
        request.send_header("WWW-Authenticate", 'Basic realm="x"')
        request.end_headers()

    with serving(answering(protected)) as web, serving(answering(elsewhere)) as other:
        host = f"us%20er:{SECRET}%40@127.0.0.1:{web.server_address[1]}"
        assert read(relay_for(f"http://{host}/in")[0].url) == b"content"
        with pytest.raises(urllib.error.HTTPError) as refused:
            read(relay_for(f"http://{host}/away", "127.0.0.1")[0].url)
        assert refused.value.code == 401
    assert ("/elsewhere", None) in requests
    assert not any(path == "/elsewhere" and given for path, given in requests)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    """A TLS context for a server on 127.0.0.1, and the certificate that a client would have to trust."""
    folder = tmp_path_factory.mktemp("tls")
    key, public = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(public), *subject]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    return context, public


@pytest.mark.system
def test_an_untrusted_certificate_is_refused_and_a_trusted_one_accepted(
    film: Path, certificate: tuple[ssl.SSLContext, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, public = certificate
    (film.parent / "live.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\nfilm.ts\n#EXT-X-ENDLIST\n")
    with serving(partial(Folder, directory=str(film.parent)), context) as web:
        url = f"https://127.0.0.1:{web.server_address[1]}/live.m3u8"
        with DecodingChild(url, live=True) as child:
            with pytest.raises(MediaError, match="certificate that is not trusted"):
                list(child.frames())
            assert child.failure == "untrusted"
        # Segments over HTTPS are verified even if the playlist came over plain HTTP.
        (film.parent / "plain.m3u8").write_text(
            f"#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\n{url.replace('live.m3u8', 'film.ts')}\n#EXT-X-ENDLIST\n"
        )
        with serving(partial(Folder, directory=str(film.parent))) as plain:
            relay, problems = relay_for(f"http://127.0.0.1:{plain.server_address[1]}/plain.m3u8", "127.0.0.1")
            segment = read(relay.url).decode().splitlines()[3]
            with pytest.raises(urllib.error.HTTPError):
                read(segment)
            assert "certificate that is not trusted" in problems[-1]
        monkeypatch.setenv("SSL_CERT_FILE", str(public))
        with DecodingChild(url, live=True) as child:
            assert [frame.second for frame in child.frames()] == [0, 1, 2, 3, 4]


def test_small_chunks_that_are_ready_are_forwarded_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b"piece %03d " % n for n in range(300)]
    pauses: list[float] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.protocol_version = "HTTP/1.1"
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n")

    with serving(answering(answer)) as web:
        relay, _ = relay_for(f"http://127.0.0.1:{web.server_address[1]}/x")
        monkeypatch.setattr("reference_db.media.http_relay.time.sleep", pauses.append)
        assert read(relay.url) == b"".join(pieces)
    assert len(pauses) < 30  # one for each piece would be 300


def test_the_relay_pauses_in_the_stream_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("reference_db.media.http_relay.READY_S", -1.0)  # everything counts as slow
    monkeypatch.setattr("reference_db.media.http_relay.time.sleep", pauses.append)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"x" * 200_000)

    with serving(answering(answer)) as web:
        base = f"http://127.0.0.1:{web.server_address[1]}"
        relay, _ = relay_for(f"{base}/live.ts")
        segment = relay.local_url(f"{base}/segment.ts")
        assert len(read(segment)) == 200_000
        assert not pauses  # FFmpeg reads many segments one after the other
        assert len(read(relay.url)) == 200_000
        assert pauses


@pytest.mark.parametrize("length", [True, False])
def test_a_stream_that_ends_is_no_failure_with_or_without_a_length(film: Path, length: bool) -> None:
    content = film.read_bytes()

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        if length:
            request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    with (
        serving(answering(answer)) as web,
        DecodingChild(f"http://127.0.0.1:{web.server_address[1]}/x", live=True) as child,
    ):
        assert len(list(child.frames())) == 5
        assert child.failure is None


def test_a_truncated_stream_counts_as_lost(film: Path) -> None:
    content = film.read_bytes()

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.protocol_version = "HTTP/1.1"
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

    with (
        serving(answering(answer)) as web,
        DecodingChild(f"http://127.0.0.1:{web.server_address[1]}/x", live=True) as child,
    ):
        with pytest.raises(MediaError, match="closed the connection"):
            list(child.frames())
        assert child.failure == "lost"


def test_a_hostile_playlist_reaches_no_canary_through_a_real_decoder(canary: list[str]) -> None:
    body = f'#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXT-X-KEY:METHOD=AES-128,URI="http://{canary[0]}/k"\n'
    body += "".join(f"#EXTINF:1,\n{line}\n" for line in (f"http://{canary[0]}/x.ts", "file:///etc/hostname"))

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write((body + "#EXT-X-ENDLIST\n").encode())

    with (
        serving(answering(answer)) as web,
        DecodingChild(f"http://127.0.0.1:{web.server_address[1]}/x.m3u8", live=True, opening_s=20) as child,
        pytest.raises(MediaError, match=r"does not allow|neither http nor https"),
    ):
        list(child.frames())
    assert canary[1:] == []


def media_playlist(first: int, n_segments: int, *more: str) -> bytes:
    segments = [f"#EXTINF:4,\ns{number}.ts?token={secrets.token_hex(4)}" for number in range(first, first + n_segments)]
    head = ["#EXTM3U", "#EXT-X-TARGETDURATION:4", f"#EXT-X-MEDIA-SEQUENCE:{first}"]
    return "\n".join([*head, *segments, *more]).encode()


def test_a_playlist_moves_only_with_segments_beyond_all_before() -> None:
    progress, found = PlaylistProgress(), []
    for first in (7, 7, 6, 7, 8, 8, 7, 9):  # two servers of a network, one a segment behind
        progress.push(media_playlist(first, 3))
        found.append(progress.n_moves)
    assert found == [0, 0, 0, 0, 1, 1, 1, 2]
    assert (progress.segment_s, progress.recording) == (4.0, "")


def test_a_playlist_whose_numbers_start_again_is_reported() -> None:
    for first, again in ((1000, 0), (4, 0), (4, 1)):
        progress = PlaylistProgress()
        progress.push(media_playlist(first, 6))
        with pytest.raises(PlaylistRestarted):
            progress.push(media_playlist(again, 2))


def test_a_playlist_with_its_end_is_a_recording_that_stays_the_same() -> None:
    names = []
    for n_segments in (3, 3, 4):
        progress = PlaylistProgress()
        progress.push(media_playlist(7, n_segments, "#EXT-X-ENDLIST"))
        names.append(progress.recording)
    assert names[0] == names[1] != names[2]
    assert "" not in names


@pytest.mark.parametrize("status", [410, 503])
def test_the_status_that_a_server_answers_with_is_named(status: int) -> None:
    with serving(answering(lambda request: request.send_error(status))) as server:
        url = f"http://u:{SECRET}@127.0.0.1:{server.server_address[1]}/x.ts?token={SECRET}"
        with DecodingChild(url, live=True) as child, pytest.raises(MediaError) as caught:
            list(child.frames())
    assert str(caught.value) == f"http://127.0.0.1:{server.server_address[1]} answers with HTTP status {status}."
    assert child.failure == "failed"
