"""Sessions of browsers: a cookie holds a random id, the server its token, its start and its last use.

A session ends by logging out, after some hours without a request, some days after its start, and with its token. It
survives a restart of the server: hashes of the ids are stored in a file that is readable by its owner only. Used on the
event loop, but for `save`, which writes the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from reference_db.store.disk import write_file

logger = logging.getLogger(__name__)

FILE = "sessions.json"
MAX_SESSIONS = 1000
MAX_PER_TOKEN = 50  # browsers; beyond it the one that was not used for longest is logged out
SAVE_EVERY_S = 30.0  # times of last use; a start and an end are written at once


@dataclass(slots=True)
class Session:
    """One login. Times are Unix times, so that they mean the same after a restart."""

    sha256: str  # of the id
    token: str  # SHA-256 of the token or secret that it was started with
    started_at: float
    used_at: float


class Sessions:
    """The open sessions of a data directory."""

    def __init__(self, data_dir: Path, idle_s: float, max_s: float) -> None:
        self._path, self._idle_s, self._max_s = data_dir / FILE, idle_s, max_s
        self._sessions = {one.sha256: one for one in _read(self._path)}
        self._is_changed = False
        self._writing = threading.Lock()

    def start(self, token: str) -> str:
        """Starts a session of the token with this SHA-256; its id, which is nowhere stored."""
        id, now = secrets.token_urlsafe(32), time.time()
        for one in [one for one in self._sessions.values() if not self._is_valid(one, now)]:
            del self._sessions[one.sha256]
        own = [one for one in self._sessions.values() if one.token == token]
        for among, most in ((own, MAX_PER_TOKEN), (list(self._sessions.values()), MAX_SESSIONS)):
            if len(among) >= most:
                del self._sessions[min(among, key=lambda one: one.used_at).sha256]
        self._sessions[_digest(id)] = Session(_digest(id), token, now, now)
        self._is_changed = True
        return id

    def use(self, id: str) -> Session | None:
        """The open session with this id, used now."""
        session, now = self._sessions.get(_digest(id)), time.time()
        if session is None or not self._is_valid(session, now):
            return None
        session.used_at, self._is_changed = now, True
        return session

    def is_open(self, sha256: str) -> bool:
        """Whether this session is open; asking is no use of it."""
        session = self._sessions.get(sha256)
        return session is not None and self._is_valid(session, time.time())

    def end(self, id: str) -> None:
        self._is_changed |= self._sessions.pop(_digest(id), None) is not None

    def save(self) -> None:
        """Writes the file if something changed; runs in a thread. A failure is logged: sessions then end with it."""
        with self._writing:
            if not self._is_changed:
                return
            self._is_changed = False
            values = [asdict(one) for one in list(self._sessions.values())]
            try:
                write_file(self._path, json.dumps(values).encode(), mode=0o600)
            except OSError as error:
                logger.warning("sessions could not be stored (%s); a restart will end them", error.strerror)

    def _is_valid(self, session: Session, now: float) -> bool:
        return now - session.used_at < self._idle_s and now - session.started_at < self._max_s


def _digest(id: str) -> str:
    return hashlib.sha256(id.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: Path) -> list[Session]:
    try:
        return [Session(**value) for value in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError):
        logger.warning("%s cannot be read; all sessions have ended", path)
        return []
