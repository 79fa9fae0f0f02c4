"""Stream addresses: which ones are opened, where they may lead, and how messages name them without secrets.

The operator configures an address, but others control what is behind it: its DNS name, its redirects, playlists and
keys. They may lead to any public host, but to a private one (loopback, 10.x, link-local, ...) only if an admin named
that host as private: by its number, by the channel's `private: true`, or in its `allow`. Every connection is checked,
so a name that is public today cannot lead inside tomorrow (DNS rebinding).
Messages contain scheme and host only, or a redacted address: it may hold a password, a token or a stream key.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from reference_db.media.address_ranges import embedded_ipv4, is_public

# Formats of a file. Playlists (hls, concat, sdp) are excluded: they would open other files and hosts.
FILE_FORMATS = (
    "mov,mp4,matroska,webm,mpegts,mpeg,mpegvideo,avi,flv,asf,ogg,mxf,mxf_opatom,gxf,dv,rm,nut,wtv,gif,ivf,"
    "h264,hevc,m4v,obu,av1,vc1,yuv4mpegpipe,mp3,wav,flac,aac"
)
HTTP_FORMATS = FILE_FORMATS + ",live_flv,mpjpeg,hls,ac3,eac3,webvtt"
RTMP_FORMATS = "flv,live_flv"
RTSP_FORMATS = "rtsp,rtp,sdp,mpegts,mpegtsraw"
RTSP_PROTOCOLS = "rtsp,rtsps,rtp,srtp,udp,tcp,tls"
# scheme -> protocols and formats that FFmpeg may use for it. Other schemes are refused.
# HTTP goes through our relay on loopback, so FFmpeg itself connects to no other web server.
SCHEME_RULES = {
    "file": ("file", FILE_FORMATS),
    "http": ("http,tcp,crypto", HTTP_FORMATS),
    "https": ("http,tcp,crypto", HTTP_FORMATS),
    "rtmp": ("rtmp,tcp", RTMP_FORMATS),
    "rtmps": ("rtmps,tcp,tls", RTMP_FORMATS),
    "rtsp": (RTSP_PROTOCOLS, RTSP_FORMATS),
    "rtsps": (RTSP_PROTOCOLS, RTSP_FORMATS),
    "udp": ("udp", FILE_FORMATS),
    "rtp": ("rtp,udp", "rtp,sdp,mpegts"),
}
SCHEMES = tuple(SCHEME_RULES)
SRT_ADVICE = (
    "SRT is not in the FFmpeg that PyAV ships; run `ffmpeg -i 'srt://HOST:PORT' -c copy -f mpegts "
    "'udp://127.0.0.1:5000?pkt_size=1316'` beside Copywatch and watch udp://127.0.0.1:5000"
)
DEFAULT_PORTS = {"http": 80, "https": 443, "rtmp": 1935, "rtmps": 443, "rtsp": 554, "rtsps": 322}
# Parameters that only tune a protocol. All others are redacted: every CDN has its own name for its token.
_HARMLESS_PARAMETERS = frozenset(
    ("buffer_size", "fifo_size", "localaddr", "overrun_nonfatal", "pkt_size", "rtsp_transport", "timeout", "ttl")
)
# A path segment of this length with letters and several digits is more likely a token than a name.
_TOKEN = re.compile(r"(?=(?:[^/]*[0-9]){3})(?=[^/]*[A-Za-z])[A-Za-z0-9_~+=%-]{16,}")


class AddressRefused(Exception):
    """An address that may not be opened; the message is a sentence without secrets."""


def scheme_of(url: str) -> str:
    """The scheme, if it is supported. Raises AddressRefused with the remedy."""
    scheme = url.partition(":")[0].lower() if "://" in url else ""
    if scheme == "srt":
        raise AddressRefused(SRT_ADVICE + ".")
    if scheme not in SCHEME_RULES:
        known = ", ".join(SCHEME_RULES)
        raise AddressRefused(f"A stream's address begins with one of {known} and ://, not {scheme[:20]!r}.")
    return scheme


# --- where an address may lead -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReachPolicy:
    """The private hosts that a channel may reach: those of its `allow`, and its own host and port if named so.

    An own host that is a number, or `localhost`, is named by the address itself: no DNS answer changes it.
    """

    host: str
    port: int
    allow: tuple[str, ...] = ()  # hosts, addresses or networks
    private: bool = False  # an admin named the own host as private

    @classmethod
    def of(cls, url: str, allow: Sequence[str] = (), *, private: bool = False) -> "ReachPolicy":
        """The policy of a channel with this address. Raises AddressRefused if it has no host."""
        host, port = host_and_port(url)
        return cls(host, port, tuple(allow), private)

    def resolve(self, host: str, port: int) -> list[tuple[str, int]]:
        """The numeric addresses of the host, each of them permitted.

        Connect to these and do not resolve the name again: its DNS answer may change (DNS rebinding). Raises
        AddressRefused, and OSError if the name is unknown.
        """
        found = [(str(one[4][0]), port) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        addresses = list(dict.fromkeys(found))
        is_own = (host.lower(), port) == (self.host, self.port)
        if (is_own and self._may_be_private) or host.lower() in map(str.lower, self.allow):
            return addresses
        for address, _ in addresses:
            if not is_public(address) and not self._is_allowed(address):
                raise self._refusal(host, port)
        return addresses

    def check(self, address: str, port: int, *, is_stream: bool) -> None:
        """Raises AddressRefused unless this numeric address is public, allowed, or that of a private own host.

        Datagrams of the own host may use any port, since RTSP negotiates them.
        """
        if is_public(address) or self._is_allowed(address):
            return
        own = [self.host] if self._may_be_private and (port == self.port or not is_stream) else []
        for host in (*own, *self.allow):
            with suppress(OSError, UnicodeError):
                if address in [one[4][0] for one in socket.getaddrinfo(host, None)]:
                    return
        raise self._refusal(address, port)

    @property
    def _may_be_private(self) -> bool:
        return self.private or is_fixed(self.host)

    def _refusal(self, host: str, port: int) -> AddressRefused:
        own = host.lower() == self.host and port == self.port
        remedy = "set the channel's `private: true`" if own else "add it to the channel's `allow`"
        return AddressRefused(
            f"It leads to {host}:{port}, a private address that the channel does not allow; "
            f"if this is intended, {remedy}."
        )

    def _is_allowed(self, address: str) -> bool:
        number = embedded_ipv4(ipaddress.ip_address(address.partition("%")[0]))
        for one in self.allow:
            try:
                if number in ipaddress.ip_network(one, strict=False):
                    return True
            except ValueError:
                continue  # a host name
        return False


def is_fixed(host: str) -> bool:
    """Whether a host is a number in any notation, or `localhost`: no DNS server decides where it leads."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            socket.inet_aton(host)  # 127.1, 2130706433, 0x7f000001
        except OSError:
            return False
    return True


def host_and_port(url: str) -> tuple[str, int]:
    """Host (lower case) and port of an address; raises AddressRefused."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme.lower(), 0)
    except ValueError:
        host, port = None, 0
    if not host or any(ord(c) < 33 for c in url):
        raise AddressRefused("An address must have a host, as in http://host:port/path, and no spaces.")
    return host.lower(), port


# --- addresses in messages ----------------------------------------------------------------------------------------


def display_name(url: str) -> str:
    """The name of a URL or path for messages: the file name, or scheme and host without user, path and token."""
    if "://" not in url or url.lower().startswith("file:"):
        return url.rsplit("/", 1)[-1] or url
    scheme, _, rest = url.partition("://")
    host = _split_host(rest.partition("#")[0] if "@" not in rest.partition("#")[2] else rest)[0]
    return f"{scheme[:20]}://{host.rpartition('@')[2]}"


def redact_url(url: str) -> str:
    """The address with possible credentials replaced by `***`.

    These are user, password, values in the query, `name=value`, stream keys and long tokens in the path.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    # A password may hold an unescaped `#`; then the text before it is not the host.
    address, hash_mark, fragment = rest.partition("#")
    if "@" in fragment and "@" not in address:
        address, hash_mark = rest.replace("#", ""), ""
    host, path = _split_host(address)
    path, question_mark, query = path.partition("?")
    path = re.sub(r"([/;])([^/;=]+)=[^/;]*", r"\1\2=***", path)
    path = re.sub(r"(?<=/)([^/;]+)", lambda part: _TOKEN.sub("***", part.group()), path)
    if scheme.lower() in ("rtmp", "rtmps") and path.count("/") > 1:
        path = path.rpartition("/")[0] + "/***"  # rtmp://host/application/streamkey
    query = "&".join(_redact_parameter(part) for part in query.split("&")) if question_mark else ""
    return f"{scheme}://{host}{path}{question_mark}{query}{'#***' if hash_mark else ''}"


def _split_host(address: str) -> tuple[str, str]:
    """Host (its credentials redacted) and the rest."""
    end = min((at for at in (address.find(c) for c in "/?\\") if at >= 0), default=len(address))
    host, path = address[:end], address[end:]
    port = host.rpartition("]")[2].partition(":")[2]
    if "@" not in host and port and not port.isdigit() and "@" in path:
        hidden, _, tail = path.rpartition("@")  # an unescaped password that holds a slash: user:pa/ss@host/...
        return _split_host(f"{host}{re.sub(r'[/?#]', '', hidden)}@{tail}")
    if "@" in host:
        host = "***@" + host.rpartition("@")[2]
    name, colon, port = host.rpartition(":")
    if colon and not port.isdigit() and not host.endswith("]"):
        host = f"{name}:***"
    return host, path


def _redact_parameter(part: str) -> str:
    name, equals, _ = part.partition("=")
    if equals:
        return part if name in _HARMLESS_PARAMETERS else f"{name}=***"
    return "***" if part else ""


def redact_text(text: str) -> str:
    """The text with every address in it redacted."""
    # Punctuation that ends the sentence, or FFmpeg's colon after the address, is not part of it.
    found = r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+?(?=[:,.;]*(?:[\s\"'<>]|$))"
    return re.sub(found, lambda address: redact_url(address.group()), text)
