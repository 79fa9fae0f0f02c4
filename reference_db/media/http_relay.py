"""The decoder's door to the web: a little HTTP server on loopback, inside the decoding child.

FFmpeg would follow any redirect and any playlist to any host, and checks no certificate of what an HLS playlist names.
So FFmpeg gets loopback addresses only. Each stands for one real address, which the relay fetches by our own rules:
every host is checked before connecting (`ReachPolicy`), every certificate is verified, redirects are counted, and the
addresses inside a playlist are replaced by loopback ones. FFmpeg never learns users, passwords and tokens, so it cannot
leak them.
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
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from reference_db.media.addresses import AddressRefused, ReachPolicy, place_of, shown

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 15.0  # a little more than the decoder's own patience, which knows a stall from a hang-up
CHUNK_BYTES = 1 << 16
AT_ONCE_S = 0.001  # a reply that takes longer has nothing more to read yet
LITTLE_S = 0.5  # then we wait so long for more: live air wakes us and the decoder twice a second, not 30 times
MAX_PLAYLIST_BYTES = 8 << 20
MAX_ADDRESSES = 1 << 16  # of segments; the oldest are forgotten, a live playlist never comes back to them
MAX_REDIRECTS = 8
PASSED_ON = ("Content-Type", "Content-Length", "Content-Range", "Accept-Ranges")

Trouble = Callable[[str, str], None]  # told a kind and a sentence


class HttpRelay:
    """Serves until the process ends; `address` is what FFmpeg opens in place of the stream's own."""

    def __init__(self, url: str, reach: ReachPolicy, on_trouble: Trouble = lambda kind, sentence: None) -> None:
        self.trouble: tuple[str, str] | None = None  # the last one
        self.cut_off: tuple[str, str] | None = None  # how an answer broke off
        self._on_trouble = on_trouble
        self._secret = secrets.token_hex(8)  # other processes of this machine cannot use the door
        self._urls: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        self._opener = _opener(reach, self._passwords)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.address = self.local(url)
        threading.Thread(target=self._server.serve_forever, name="gateway", daemon=True).start()

    def local(self, url: str) -> str:
        """The loopback address that stands for this one; its ending is kept, since FFmpeg looks at it."""
        with self._lock:
            number = self._numbers.get(url)
            if number is None:
                number, self._next = self._next, self._next + 1
                self._numbers[url], self._urls[number] = number, url
                if len(self._urls) > MAX_ADDRESSES:
                    oldest = next(one for one in self._urls if one)  # 0 is the stream itself
                    del self._numbers[self._urls.pop(oldest)]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", urlsplit(url).path.rpartition("/")[2])[-64:]
        return f"http://127.0.0.1:{self.port}/{self._secret}/{number}/{name}"

    def fetch(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """The real answer for a loopback path. Raises what urllib raises, AddressRefused for a path of nobody's."""
        _, secret, number, _ = ([*path.split("/", 3), "", "", ""])[:4]
        url = self._urls.get(int(number)) if number.isascii() and number.isdigit() else None
        if not secrets.compare_digest(secret.encode(), self._secret.encode()) or url is None:
            raise AddressRefused("It leads to an address that is not part of the stream.")
        reply = self._opener.open(
            urllib.request.Request(self._without_user(url), headers=headers), timeout=READ_TIMEOUT_S
        )
        assert isinstance(reply, http.client.HTTPResponse)
        return reply

    def rewritten(self, playlist: bytes, base: str) -> bytes:
        """The playlist with every address in it replaced by a loopback one."""
        lines = []
        for line in playlist.decode("utf-8", "surrogateescape").splitlines():
            if line.startswith("#"):
                line = re.sub(
                    r'(URI=")([^"]*)(")', lambda found: found[1] + self._linked(base, found[2]) + found[3], line
                )
            elif line.strip():
                line = self._linked(base, line.strip())
            lines.append(line + "\n")
        return "".join(lines).encode("utf-8", "surrogateescape")

    def troubled(self, error: Exception, url: str = "") -> tuple[str, str]:
        """Keeps and tells the kind and sentence of what went wrong."""
        self.trouble = _explained(error, shown(url) if url else "It")
        self._on_trouble(*self.trouble)
        return self.trouble

    def named(self, path: str) -> str:
        """The real address of a loopback path, for messages."""
        number = path.split("/", 3)[2] if path.count("/") > 2 else ""
        return self._urls.get(int(number), "") if number.isascii() and number.isdigit() else ""

    def is_stream(self, path: str) -> bool:
        """Whether a loopback path stands for the stream itself, and not for a segment, which is to come at once."""
        return path.split("/", 3)[2:3] == ["0"]

    def _linked(self, base: str, uri: str) -> str:
        try:
            url = urljoin(base, uri)
            is_web = urlsplit(url).scheme.lower() in ("http", "https")
        except ValueError:  # not an address at all
            is_web = False
        if not is_web:
            self.troubled(AddressRefused("Its playlist names something that is neither http nor https."))
            return f"http://127.0.0.1:{self.port}/refused"
        return self.local(url)

    def _without_user(self, url: str) -> str:
        parts = urlsplit(url)
        place_of(url)
        if "@" not in parts.netloc:
            return urlunsplit(parts._replace(fragment=""))
        user, _, host = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        plain = urlunsplit(parts._replace(netloc=host, fragment=""))
        self._passwords.add_password(None, f"{parts.scheme}://{host}/", unquote(name), unquote(password))
        return plain

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class RelayServer(_RelayHandler):
            pass

        RelayServer.gateway = gateway
        return RelayServer


class _RelayHandler(BaseHTTPRequestHandler):
    """Answers one request of FFmpeg's."""

    protocol_version = "HTTP/1.1"
    gateway: HttpRelay

    def do_GET(self) -> None:
        self.close_connection = True
        path = urlsplit(self.path).path if "://" in self.path else self.path
        headers = {name: value for name in ("Range", "User-Agent") if (value := self.headers.get(name))}
        url = self.gateway.named(path)
        try:
            if "://" in self.path and urlsplit(self.path).netloc != f"127.0.0.1:{self.gateway.port}":
                raise AddressRefused("It leads to an address that is not part of the stream.")
            with self.gateway.fetch(path, headers) as reply:
                self._pass_on(reply, self.gateway.is_stream(path))
        except urllib.error.HTTPError as error:
            with error:
                if error.code < 400:
                    self.gateway.troubled(
                        AddressRefused("It redirects in circles, or to what is neither http nor https.")
                    )
                self._refuse(error.code if 400 <= error.code < 600 else 502)
        except (OSError, AddressRefused, http.client.HTTPException, ValueError) as error:
            kind, _ = self.gateway.troubled(error, url)
            self._refuse(403 if kind == "refused" else 502)

    def _refuse(self, status: int) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        except OSError:
            return  # FFmpeg hung up

    def _pass_on(self, reply: http.client.HTTPResponse, is_stream: bool) -> None:
        head = b""
        while len(head) < 7 and (part := reply.read1(CHUNK_BYTES)):
            head += part
        if head.lstrip(b"\xef\xbb\xbf\r\n\t ").startswith(b"#EXTM3U"):
            self._pass_on_playlist(head, reply)
            return
        length = reply.headers.get("Content-Length")
        send = self._send if length is not None else self._send_chunk
        try:
            self.send_response(reply.status)
            for name in PASSED_ON:
                if value := reply.headers.get(name):
                    self.send_header(name, value)
            if length is None:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._stream(head, reply, send, LITTLE_S if is_stream and length is None else 0.0)
        except OSError:
            return  # one of the two hung up; without the last chunk or byte FFmpeg can tell

    def _stream(
        self, head: bytes, reply: http.client.HTTPResponse, send: Callable[[bytes], None], wait_s: float
    ) -> None:
        part = head
        while part:
            send(part)
            asked_at = time.monotonic()
            try:
                part = reply.read1(CHUNK_BYTES)  # of a chunked reply, at most one chunk, however small
            except (http.client.HTTPException, OSError) as error:  # FFmpeg takes a missing last chunk for the end
                self.gateway.cut_off = self.gateway.troubled(error, reply.url)
                return
            if wait_s and time.monotonic() - asked_at > AT_ONCE_S:
                time.sleep(wait_s)
        if send == self._send_chunk:
            self._send_chunk(b"")

    def _pass_on_playlist(self, head: bytes, reply: http.client.HTTPResponse) -> None:
        rest = reply.read(MAX_PLAYLIST_BYTES)
        if len(rest) >= MAX_PLAYLIST_BYTES:
            raise AddressRefused("Its playlist is larger than 8 MB.")
        body = self.gateway.rewritten(head.lstrip(b"\xef\xbb\xbf\r\n\t ") + rest, reply.url)
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
        """Says nothing: its lines would hold addresses."""


def _explained(error: Exception, name: str) -> tuple[str, str]:
    """The kind and sentence of what urllib or a socket raised; their own texts may hold an address."""
    cause = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception) else error
    match cause:
        case AddressRefused():
            return "refused", str(cause)
        case ssl.SSLCertVerificationError():
            return "untrusted", f"{name} shows a certificate that is not trusted: {cause.verify_message}."
        case ssl.SSLError():
            return "untrusted", f"{name} does not speak TLS as it should."
        case socket.gaierror():
            return "unreachable", f"{name} is a name that is not known."
        case TimeoutError():
            return "stalled", f"{name} did not answer in time."
        case ConnectionRefusedError():
            return "unreachable", f"{name} refuses the connection; check host and port."
        case (
            ConnectionResetError() | BrokenPipeError() | http.client.RemoteDisconnected() | http.client.IncompleteRead()
        ):
            return "lost", f"{name} hung up."
        case OSError() if cause.errno:
            return "unreachable", f"{name} cannot be reached ({type(cause).__name__})."
    return "unreachable", f"{name} does not answer as a web server does."


# --- how a real address is opened ---------------------------------------------------------------------------------


def _opener(reach: ReachPolicy, passwords: urllib.request.HTTPPasswordMgr) -> urllib.request.OpenerDirector:
    proxies = urllib.request.getproxies()

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = _connected(reach, self.host, self.port, proxies)
            if self._tunnel_host:  # type: ignore[attr-defined]
                self._tunnel()  # type: ignore[attr-defined]

    class Secure(http.client.HTTPSConnection):
        def connect(self) -> None:
            plain = _connected(reach, self.host, self.port, proxies)
            self.sock = plain
            if self._tunnel_host:  # type: ignore[attr-defined]
                self._tunnel()  # type: ignore[attr-defined]
            host = self._tunnel_host or self.host  # type: ignore[attr-defined]
            self.sock = trust.wrap_socket(plain, server_hostname=host)

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Plain, request)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Secure, request)

    trust = ssl.create_default_context()
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies),
        PlainHandler(),
        SecureHandler(context=trust),
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


def _connected(reach: ReachPolicy, host: str, port: int | None, proxies: dict[str, str]) -> socket.socket:
    """A connection to the first of the host's permitted addresses that answers. A proxy of the operator's is trusted
    to keep its own rules."""
    port = port or 80
    if any(urlsplit(proxy).hostname == host and urlsplit(proxy).port == port for proxy in proxies.values()):
        return socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    problem: OSError = OSError("no address")
    for place in reach.places(host, port):
        try:
            connection = socket.create_connection(place, timeout=CONNECT_TIMEOUT_S)
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
            raise AddressRefused("It redirects to something that is neither http nor https.")
        place_of(url)
        return super().redirect_request(request, fp, code, message, headers, url)
