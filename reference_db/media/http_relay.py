"""HTTP relay: a small HTTP server on loopback inside the decoding child, through which FFmpeg reads the web.

FFmpeg would follow any redirect and any playlist to any host, and does not verify certificates of URLs in an HLS
playlist. So FFmpeg gets loopback URLs only. Each stands for one real URL, which the relay fetches by our own rules: it
checks every host before it connects (`ReachPolicy`), verifies every certificate, limits redirects, and replaces the
URLs inside a playlist by loopback ones. FFmpeg never sees users, passwords and tokens, so it cannot leak them.
"""

import http.client
import re
import secrets
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from reference_db.media.addresses import AddressRefused, ReachPolicy, display_name, host_and_port

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 15.0  # a little more than the decoder's own time-out, which detects stalls
CHUNK_BYTES = 1 << 16
READY_S = 0.001  # a read that takes longer had to wait for new bytes
PAUSE_S = 0.5  # then the relay pauses: a live stream wakes relay and decoder twice a second, not 30 times
MAX_PLAYLIST_BYTES = 8 << 20
MAX_URLS = 1 << 16  # of segments; the oldest are dropped, a live playlist never returns to them
MAX_REDIRECTS = 8
OTHER_EDGE = 3  # segments by which one server of a network may be behind another
FORWARDED_HEADERS = ("Content-Type", "Content-Length", "Content-Range", "Accept-Ranges")

ProblemCallback = Callable[[str, str], None]  # called with a kind and a sentence


class HttpRelay:
    """Serves until the process ends; FFmpeg opens `url` in place of the stream's own."""

    def __init__(self, url: str, reach: ReachPolicy, on_problem: ProblemCallback = lambda kind, sentence: None) -> None:
        self.last_problem: tuple[str, str] | None = None  # kind and sentence
        self.truncation: tuple[str, str] | None = None  # why a response ended early
        self.recording = ""  # identifies the stream if it is complete: a file, or a playlist with its end
        self.progress: PlaylistProgress | None = None  # of the playlist that moved most; None if there is none
        self._playlists: dict[str, PlaylistProgress] = {}
        self._on_problem = on_problem
        self._secret = secrets.token_hex(8)  # other processes of this machine cannot use the relay
        self._urls: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        self._opener = _build_opener(reach, self._passwords)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = self.local_url(url)
        threading.Thread(target=self._server.serve_forever, name="http relay", daemon=True).start()

    def local_url(self, url: str) -> str:
        """The loopback URL that stands for this one; it has the same file extension, which FFmpeg checks."""
        with self._lock:
            number = self._numbers.get(url)
            if number is None:
                number, self._next = self._next, self._next + 1
                self._numbers[url], self._urls[number] = number, url
                if len(self._urls) > MAX_URLS:
                    oldest = next(one for one in self._urls if one)  # 0 is the stream itself
                    del self._numbers[self._urls.pop(oldest)]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", urlsplit(url).path.rpartition("/")[2])[-64:]
        return f"http://127.0.0.1:{self.port}/{self._secret}/{number}/{name}"

    def fetch(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """The real server's response for a loopback path. Raises urllib's errors, AddressRefused for an unknown one."""
        _, secret, number, _ = ([*path.split("/", 3), "", "", ""])[:4]
        url = self._urls.get(int(number)) if number.isascii() and number.isdigit() else None
        if not secrets.compare_digest(secret.encode(), self._secret.encode()) or url is None:
            raise AddressRefused("It leads to an address that is not part of the stream.")
        reply = self._opener.open(
            urllib.request.Request(self._strip_credentials(url), headers=headers), timeout=READ_TIMEOUT_S
        )
        assert isinstance(reply, http.client.HTTPResponse)
        return reply

    def rewrite_playlist(self, playlist: bytes, base: str) -> bytes:
        """The playlist with every URL in it replaced by a loopback one."""
        lines = []
        for line in playlist.decode("utf-8", "surrogateescape").splitlines():
            if line.startswith("#"):
                line = re.sub(
                    r'(URI=")([^"]*)(")', lambda found: found[1] + self._local_link(base, found[2]) + found[3], line
                )
            elif line.strip():
                line = self._local_link(base, line.strip())
            lines.append(line + "\n")
        return "".join(lines).encode("utf-8", "surrogateescape")

    def note_playlist(self, url: str, playlist: bytes) -> None:
        """Follows how the playlist at this URL moves. Raises PlaylistRestarted where its numbers start again."""
        if b"#EXTINF" not in playlist:
            return  # it only names other playlists
        progress = self._playlists.setdefault(url, PlaylistProgress())
        progress.push(playlist)
        if self.progress is None or progress.n_moves >= self.progress.n_moves:
            self.progress, self.recording = progress, progress.recording

    def note_status(self, status: int, url: str) -> None:
        """Stores a problem that the server reports by an HTTP status other than those that FFmpeg tells apart."""
        if status not in (401, 403, 404):
            self.last_problem = "failed", f"{display_name(url) if url else 'It'} answers with HTTP status {status}."

    def report(self, error: Exception, url: str = "") -> tuple[str, str]:
        """Stores and reports a problem; its kind and sentence."""
        self.last_problem = _explain(error, display_name(url) if url else "It")
        self._on_problem(*self.last_problem)
        return self.last_problem

    def real_url(self, path: str) -> str:
        """The real URL of a loopback path, for messages."""
        number = path.split("/", 3)[2] if path.count("/") > 2 else ""
        return self._urls.get(int(number), "") if number.isascii() and number.isdigit() else ""

    def is_stream(self, path: str) -> bool:
        """Whether a loopback path stands for the stream itself; a segment is forwarded without pauses."""
        return path.split("/", 3)[2:3] == ["0"]

    def _local_link(self, base: str, uri: str) -> str:
        try:
            url = urljoin(base, uri)
            is_web = urlsplit(url).scheme.lower() in ("http", "https")
        except ValueError:  # not a URL
            is_web = False
        if not is_web:
            self.report(AddressRefused("Its playlist has a URL that is neither http nor https."))
            return f"http://127.0.0.1:{self.port}/refused"
        return self.local_url(url)

    def _strip_credentials(self, url: str) -> str:
        parts = urlsplit(url)
        host_and_port(url)
        if "@" not in parts.netloc:
            return urlunsplit(parts._replace(fragment=""))
        user, _, host = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        plain = urlunsplit(parts._replace(netloc=host, fragment=""))
        self._passwords.add_password(None, f"{parts.scheme}://{host}/", unquote(name), unquote(password))
        return plain

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        class BoundRequest(_RelayRequest):
            relay = self

        return BoundRequest


class PlaylistRestarted(Exception):
    """The numbers of a playlist start again, as after a restart of the encoder; FFmpeg would wait for the old ones."""


class PlaylistProgress:
    """How one media playlist of HLS moves while it is read.

    An origin whose encoder has died serves its last playlist for ever; only one that moves shows that it is live.
    """

    def __init__(self) -> None:
        self.n_moves = 0  # times it had segments beyond all before
        self.recording = ""  # identifies a playlist that has its end
        self.segment_s = 0.0  # the longest segment, as the playlist announces it
        self._first, self._end = 0, -1  # numbers of its first segment and after its last

    def push(self, playlist: bytes) -> None:
        """The playlist as it is now. Raises PlaylistRestarted."""
        lines = [line.strip() for line in playlist.splitlines() if line.strip()]
        first = _tag(lines, b"#EXT-X-MEDIA-SEQUENCE:")
        end = first + sum(not line.startswith(b"#") for line in lines)
        if self._end >= 0 and (end < self._end - OTHER_EDGE or end <= self._first):
            raise PlaylistRestarted("has started its playlist again.")
        self.n_moves += 0 <= self._end < end
        self._first, self._end = first, max(end, self._end)
        self.segment_s = float(_tag(lines, b"#EXT-X-TARGETDURATION:"))
        if b"#EXT-X-ENDLIST" in lines:
            self.recording = f"{end} {zlib.crc32(b' '.join(line.partition(b'?')[0] for line in lines))}"


def _tag(lines: list[bytes], name: bytes) -> int:
    """The whole number of a tag; 0 without it."""
    found = (line.removeprefix(name) for line in lines if line.startswith(name))
    number = re.match(rb"\d{1,18}", next(found, b""))
    return int(number.group()) if number else 0


class _RelayRequest(BaseHTTPRequestHandler):
    """Answers one request from FFmpeg."""

    protocol_version = "HTTP/1.1"
    relay: HttpRelay

    def do_GET(self) -> None:
        self.close_connection = True
        path = urlsplit(self.path).path if "://" in self.path else self.path
        headers = {name: value for name in ("Range", "User-Agent") if (value := self.headers.get(name))}
        url = self.relay.real_url(path)
        try:
            if "://" in self.path and urlsplit(self.path).netloc != f"127.0.0.1:{self.relay.port}":
                raise AddressRefused("It leads to an address that is not part of the stream.")
            with self.relay.fetch(path, headers) as reply:
                self._forward(reply, path)
        except urllib.error.HTTPError as error:
            with error:
                if error.code < 400:
                    self.relay.report(
                        AddressRefused("It redirects in a loop, or to a URL that is neither http nor https.")
                    )
                else:
                    self.relay.note_status(error.code, url)
                self._refuse(error.code if 400 <= error.code < 600 else 502)
        except PlaylistRestarted as restarted:
            self.relay.truncation = "restarted", f"{display_name(url)} {restarted}"
            self._refuse(410)
        except (OSError, AddressRefused, http.client.HTTPException, ValueError) as error:
            kind, _ = self.relay.report(error, url)
            self._refuse(403 if kind == "refused" else 502)

    def _refuse(self, status: int) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        except OSError:
            return  # FFmpeg closed the connection

    def _forward(self, reply: http.client.HTTPResponse, path: str) -> None:
        head, is_stream = b"", self.relay.is_stream(path)
        while len(head) < 7 and (part := reply.read1(CHUNK_BYTES)):
            head += part
        if head.lstrip(b"\xef\xbb\xbf\r\n\t ").startswith(b"#EXTM3U"):
            self._forward_playlist(head, reply, path)
            return
        length = reply.headers.get("Content-Length")
        version = reply.headers.get("ETag") or reply.headers.get("Last-Modified")
        if is_stream and length is not None and version is not None:  # some servers give a stream any length
            self.relay.recording = f"{length} {version}"
        send = self._send if length is not None else self._send_chunk
        try:
            self.send_response(reply.status)
            for name in FORWARDED_HEADERS:
                if value := reply.headers.get(name):
                    self.send_header(name, value)
            if length is None:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._stream(head, reply, send, PAUSE_S if is_stream and length is None else 0.0)
        except OSError:
            return  # one side closed the connection; FFmpeg sees that the last chunk or byte is missing

    def _stream(
        self, head: bytes, reply: http.client.HTTPResponse, send: Callable[[bytes], None], pause_s: float
    ) -> None:
        part = head
        while part:
            send(part)
            started_at = time.monotonic()
            try:
                part = reply.read1(CHUNK_BYTES)  # of a chunked reply, at most one chunk, however small
            except (http.client.HTTPException, OSError) as error:  # FFmpeg treats a missing last chunk as the end
                self.relay.truncation = self.relay.report(error, reply.url)
                return
            if pause_s and time.monotonic() - started_at > READY_S:
                time.sleep(pause_s)
        if send == self._send_chunk:
            self._send_chunk(b"")

    def _forward_playlist(self, head: bytes, reply: http.client.HTTPResponse, path: str) -> None:
        rest = reply.read(MAX_PLAYLIST_BYTES)
        if len(rest) >= MAX_PLAYLIST_BYTES:
            raise AddressRefused("Its playlist is larger than 8 MB.")
        playlist = head.lstrip(b"\xef\xbb\xbf\r\n\t ") + rest
        self.relay.note_playlist(self.relay.real_url(path), playlist)
        body = self.relay.rewrite_playlist(playlist, reply.url)
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.apple.mpegurl")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, part: bytes) -> None:
        self.wfile.write(part)

    def _send_chunk(self, part: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: its lines would contain URLs."""


def _explain(error: Exception, name: str) -> tuple[str, str]:
    """Kind and sentence of an error of urllib or a socket; their own messages may contain a URL."""
    cause = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception) else error
    match cause:
        case AddressRefused():
            return "refused", str(cause)
        case ssl.SSLCertVerificationError():
            return "untrusted", f"{name} has a certificate that is not trusted: {cause.verify_message}."
        case ssl.SSLError():
            return "untrusted", f"{name} failed the TLS handshake."
        case socket.gaierror():
            return "unreachable", f"{name} is an unknown host name."
        case TimeoutError():
            return "stalled", f"{name} did not answer in time."
        case ConnectionRefusedError():
            return "unreachable", f"{name} refuses the connection; check host and port."
        case (
            ConnectionResetError() | BrokenPipeError() | http.client.RemoteDisconnected() | http.client.IncompleteRead()
        ):
            return "lost", f"{name} closed the connection."
        case OSError() if cause.errno:
            return "unreachable", f"{name} cannot be reached ({type(cause).__name__})."
    return "unreachable", f"{name} does not answer with valid HTTP."


# --- connections to real servers ----------------------------------------------------------------------------------


def _build_opener(reach: ReachPolicy, passwords: urllib.request.HTTPPasswordMgr) -> urllib.request.OpenerDirector:
    proxies = urllib.request.getproxies()

    class CheckedHTTPConnection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = _connect(reach, self.host, self.port, proxies)
            if self._tunnel_host:  # type: ignore[attr-defined]
                self._tunnel()  # type: ignore[attr-defined]

    class CheckedHTTPSConnection(http.client.HTTPSConnection):
        def connect(self) -> None:
            plain = _connect(reach, self.host, self.port, proxies)
            self.sock = plain
            if self._tunnel_host:  # type: ignore[attr-defined]
                self._tunnel()  # type: ignore[attr-defined]
            host = self._tunnel_host or self.host  # type: ignore[attr-defined]
            self.sock = tls.wrap_socket(plain, server_hostname=host)

    class HTTPHandler(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(CheckedHTTPConnection, request)

    class HTTPSHandler(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(CheckedHTTPSConnection, request)

    tls = ssl.create_default_context()
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies),
        HTTPHandler(),
        HTTPSHandler(context=tls),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPBasicAuthHandler(passwords),
        urllib.request.HTTPDigestAuthHandler(passwords),
        urllib.request.HTTPCookieProcessor(),
    ):
        opener.add_handler(handler)
    opener.addheaders = []
    return opener


def _connect(reach: ReachPolicy, host: str, port: int | None, proxies: dict[str, str]) -> socket.socket:
    """A connection to the first of the host's permitted addresses that answers.

    A proxy that the operator configured is trusted to apply its own rules.
    """
    port = port or 80
    if any(urlsplit(proxy).hostname == host and urlsplit(proxy).port == port for proxy in proxies.values()):
        return socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    problem: OSError = OSError("no address")
    for address in reach.resolve(host, port):
        try:
            connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            problem = error
            continue
        connection.settimeout(READ_TIMEOUT_S)
        return connection
    raise problem


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = MAX_REDIRECTS

    def redirect_request(
        self, request: urllib.request.Request, fp: IO[bytes], code: int, message: str, headers: Any, url: str
    ) -> urllib.request.Request | None:
        if urlsplit(url).scheme.lower() not in ("http", "https"):
            raise AddressRefused("It redirects to a URL that is neither http nor https.")
        host_and_port(url)
        return super().redirect_request(request, fp, code, message, headers, url)
