"""Authorization: the scope that every route requires, in one table, and the check of one request.

A token has one of three scopes, each including the one before it. While no token exists, callers on this machine that
send the secret of this start may do everything: the peer must be loopback, and so must the Host header, since a web
page whose name was pointed here (DNS rebinding) sends its own. A browser sends a session instead of a token. Requests
that change something must come from our own pages or from no page at all.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from monitor.errors import ConfigError
from monitor.web.auth.local_secret import LocalSecret
from monitor.web.auth.sessions import SAVE_EVERY_S, Sessions
from monitor.web.auth.token_uses import TokenUses
from monitor.web.auth.tokens import TOKEN_PREFIX, Scope, Tokens, digest_of
from monitor.web.requests.problems import Problem

RANK: dict[Scope, int] = {"read": 0, "write": 1, "admin": 2}
SCOPES_OF: dict[Scope, list[Scope]] = {
    "read": ["read"],
    "write": ["read", "write"],
    "admin": ["read", "write", "admin"],
}

# Every route below /api and the scope it requires; None needs no token. A route that is not listed is disabled.
SCOPES: dict[tuple[str, str], Scope | None] = {
    ("GET", "/api/v1/system"): "read",
    ("GET", "/api/v1/session"): "read",
    ("POST", "/api/v1/session"): None,
    ("DELETE", "/api/v1/session"): None,
    ("GET", "/api/v1/tokens"): "admin",
    ("GET", "/api/v1/audit"): "admin",
    ("GET", "/api/v1/audit/export"): "admin",
    ("GET", "/api/v1/channels"): "read",
    ("POST", "/api/v1/channels"): "write",
    ("POST", "/api/v1/channels/test"): "write",
    ("GET", "/api/v1/channels/{name}"): "read",
    ("DELETE", "/api/v1/channels/{name}"): "write",
    ("GET", "/api/v1/channels/{name}/thumbnail"): "read",
    ("GET", "/api/v1/references"): "read",
    ("POST", "/api/v1/references"): "write",
    ("POST", "/api/v1/references/import"): "write",
    ("GET", "/api/v1/jobs"): "read",
    ("GET", "/api/v1/jobs/{id}"): "read",
    ("GET", "/api/v1/references/{id}"): "read",
    ("DELETE", "/api/v1/references/{id}"): "write",
    ("GET", "/api/v1/references/{id}/export"): "read",
    ("GET", "/api/v1/references/{id}/exclusions"): "read",
    ("POST", "/api/v1/references/{id}/exclusions"): "write",
    ("DELETE", "/api/v1/references/{id}/exclusions/{n}"): "write",
    ("GET", "/api/v1/references/{id}/thumbnails/{second}"): "read",
    ("GET", "/api/v1/alerts"): "read",
    ("GET", "/api/v1/alerts/{id}"): "read",
    ("POST", "/api/v1/alerts/review"): "write",
    ("POST", "/api/v1/alerts/{id}/review"): "write",
    ("GET", "/api/v1/alerts/{id}/evidence"): "read",
    ("GET", "/api/v1/alerts/{id}/evidence/{file}"): "read",
    ("GET", "/api/v1/alerts/{id}/export"): "read",
    ("GET", "/api/v1/licences"): "read",
    ("POST", "/api/v1/licences"): "write",
    ("DELETE", "/api/v1/licences/{id}"): "write",
    ("GET", "/api/v1/webhooks"): "admin",
    ("POST", "/api/v1/webhooks"): "admin",
    ("DELETE", "/api/v1/webhooks/{id}"): "admin",
    ("POST", "/api/v1/webhooks/{id}/test"): "admin",
    ("POST", "/api/v1/webhooks/{id}/enable"): "admin",
    ("POST", "/api/v1/webhooks/{id}/rotate"): "admin",
    ("GET", "/api/v1/webhooks/{id}/deliveries"): "admin",
    ("POST", "/api/v1/webhooks/{id}/deliveries/{d}/replay"): "admin",
    ("GET", "/api/v1/events"): "read",
}

COOKIE = "copywatch_session"
NEEDS_TOKEN = "A token is required: send `Authorization: Bearer cw_...`; `copywatch tokens add NAME` creates one."
NEEDS_SECRET = (
    "No token exists: open the link that `copywatch serve` printed at its start, or send the secret in it "
    "(also in the file local_secret of the data directory) as `Authorization: Bearer ...`."
)
FORWARDING_HEADERS = frozenset(
    ("forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip", "cf-connecting-ip")
)
CHANGES = frozenset(("POST", "PUT", "PATCH", "DELETE"))
BAD_TOKENS, BAD_TOKENS_S = 10, 60.0  # different invalid tokens of one peer within so many seconds, then 429
MAX_PEERS = 4096  # whose invalid tokens are counted


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: a token's name and scope, and what it was recognised by."""

    name: str
    scope: Scope
    token: str = ""  # SHA-256 of the token or secret
    session: str | None = None  # SHA-256 of the session's id

    @property
    def is_local(self) -> bool:
        return self.name == LOCAL_NAME  # no token can have this name

    def may(self, scope: Scope) -> bool:
        return RANK[self.scope] >= RANK[scope]


LOCAL_NAME = "this machine"  # a caller with the secret of this start


class Gatekeeper:
    """Authorizes requests; runs on the event loop, so nothing here blocks."""

    def __init__(self, tokens: Tokens, secret: LocalSecret, sessions: Sessions, uses: TokenUses) -> None:
        self._tokens, self._secret, self._sessions, self._uses = tokens, secret, sessions, uses
        self._invalid = _InvalidTokens()

    async def run(self) -> None:
        """Stores sessions and uses of tokens from time to time, and when cancelled."""
        try:
            while True:
                await asyncio.sleep(SAVE_EVERY_S)
                await asyncio.to_thread(self._save)
        finally:
            self._save()

    def _save(self) -> None:
        self._sessions.save()
        with suppress(ConfigError):  # the file cannot be read; requests are refused meanwhile
            self._uses.save({one.sha256 for one in self._tokens.all()})

    def authorize(self, request: HTTPConnection, method: str, path: str) -> Caller | None:
        """The caller, None if the route needs none; raises Problem. `path` is the route's template."""
        if (method, path) not in SCOPES:
            raise Problem(403, "This endpoint is disabled (no token may call it).")
        required = SCOPES[method, path]
        if method in CHANGES:
            _check_origin(request)
        caller = self._caller(request, method)
        if required is None:
            return caller
        if caller is None:
            raise Problem(401, NEEDS_TOKEN if self._tokens.any() else NEEDS_SECRET, {"WWW-Authenticate": "Bearer"})
        if not caller.may(required):
            request.scope.setdefault("state", {})["refused"] = caller.name  # for the audit log
            raise Problem(403, f"This needs a token with the scope {required}; {caller.name} has {caller.scope}.")
        return caller

    def check_reader(self, request: HTTPConnection) -> None:
        """Raises Problem unless the caller may read, for routes that are not in the table."""
        if self._caller(request, "GET") is None:
            raise Problem(401, NEEDS_TOKEN if self._tokens.any() else NEEDS_SECRET, {"WWW-Authenticate": "Bearer"})

    def caller_of(self, token: str, peer: str) -> Caller:
        """The caller with this token; raises Problem 401, or 429 after too many invalid ones."""
        caller = self._holder(digest_of(token))
        if caller is None:
            raise self._refusal(peer, token, "Unknown or expired token.")
        self._uses.note(caller.token)
        return caller

    def is_current(self, caller: Caller) -> bool:
        """Whether the caller would be recognised now: its token still exists, and its session is open.

        Long requests ask again and again, so that removing a token ends them too.
        """
        try:
            holder = self._holder(caller.token)
        except ConfigError:
            return False
        return holder is not None and (caller.session is None or self._sessions.is_open(caller.session))

    def _holder(self, sha256: str) -> Caller | None:
        """The caller with the token of this SHA-256, or with the secret while no token exists."""
        if not self._tokens.any():
            is_secret = hmac.compare_digest(sha256, self._secret.sha256)
            return Caller(LOCAL_NAME, "admin", sha256) if is_secret else None
        known = self._tokens.find_digest(sha256)
        return None if known is None else Caller(known.name, known.scope, sha256)

    def _session_caller(self, id: str, peer: str) -> Caller:
        session = self._sessions.use(id)
        caller = None if session is None else self._holder(session.token)
        if session is None or caller is None:
            raise self._refusal(peer, id, "The session has ended; log in again.")
        self._uses.note(caller.token)
        return replace(caller, session=session.sha256)

    def _refusal(self, peer: str, token: str, detail: str) -> Problem:
        wait_s = self._invalid.count(peer, token)
        if wait_s > 0:
            headers = {"Retry-After": str(math.ceil(wait_s))}
            return Problem(429, "Too many invalid tokens from this address; retry later.", headers)
        return Problem(401, detail, {"WWW-Authenticate": "Bearer"})

    def _caller(self, request: HTTPConnection, method: str) -> Caller | None:
        peer = request.client.host if request.client else ""
        if not self._tokens.any():
            if is_forwarded(request):
                raise Problem(
                    403,
                    "No token exists, so requests that a proxy forwarded are refused; "
                    "`copywatch tokens add NAME` creates a token for the clients behind it.",
                )
            if not (is_loopback(peer) and is_loopback(_host(request))):
                raise Problem(
                    403,
                    "No token exists, so only requests from this machine to a loopback name are accepted; "
                    "`copywatch tokens add` creates a token.",
                )
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self.caller_of(token.strip(), peer)
        if cookie := request.cookies.get(COOKIE):
            if method in CHANGES and request.headers.get("x-copywatch") != "1":
                raise Problem(403, "A change authorized by the session cookie needs the header `X-Copywatch: 1`.")
            try:
                return self._session_caller(cookie, peer)
            except Problem:
                if method == "POST":
                    return None  # an outdated cookie must not prevent a login
                raise
        return None


def check_exposure(host: str, tokens: Tokens) -> None:
    """Raises ConfigError if other machines could reach the server while no token exists."""
    if not is_loopback(host) and not tokens.any():
        raise ConfigError(
            f"web.host {host} can be reached from other machines and no token exists; "
            "run `copywatch tokens add NAME --scope admin` first, or set web.host to 127.0.0.1."
        )


def is_forwarded(request: HTTPConnection) -> bool:
    """Whether a proxy says that it forwards the request for another client."""
    return any(name in FORWARDING_HEADERS or name.startswith("x-forwarded-") for name in request.headers)


def is_loopback(host: str) -> bool:
    """Whether a peer or a Host is this machine, by address or as `localhost`."""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback


def _host(request: HTTPConnection) -> str:
    """The Host header without its port; empty if invalid."""
    hosts = request.headers.getlist("host")
    try:
        return (urlsplit(f"//{hosts[0]}").hostname or "") if len(hosts) == 1 else ""
    except ValueError:
        return ""


def _check_origin(request: HTTPConnection) -> None:
    """Refuses a change sent by another site's page. Clients that are not browsers send neither header."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    host = request.headers.get("host", "")
    is_own = origin is None or origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
    by_cookie = COOKIE in request.cookies and "authorization" not in request.headers
    if not is_own or (site is not None and site not in ("same-origin", "none")) or (by_cookie and origin is None):
        raise Problem(403, "A change must come from this server's own pages; another site sent it.")


class _InvalidTokens:
    """Counts different invalid tokens by peer. Repeats of the same one are a page left open, not an attack."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, dict[int, float]] = OrderedDict()

    def count(self, peer: str, token: str) -> float:
        """How long the peer must wait; 0 below the limit."""
        now = time.monotonic()
        seen = self._seen.pop(peer, {})
        seen = {mark: at for mark, at in seen.items() if now - at < BAD_TOKENS_S}
        mark = hash(token[: 2 * len(TOKEN_PREFIX) + 128])
        self._seen[peer] = seen  # newest last
        while len(self._seen) > MAX_PEERS:
            self._seen.popitem(last=False)
        if mark in seen:
            return 0.0
        if len(seen) >= BAD_TOKENS:
            return BAD_TOKENS_S - (now - min(seen.values()))
        seen[mark] = now
        return 0.0
