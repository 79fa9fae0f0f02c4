"""Tokens: who may use the API, in a file that holds no token.

A token is `cw_` and 256 random bits. Of such a number SHA-256 is all the hashing there need be: nobody can try them
all, so a slow hash made for passwords would only cost us time. Each is told once, when it is made. The file is
readable by its owner alone; it is read anew when it changes, and while it cannot be read nobody is let in.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from monitor.errors import ConfigError
from monitor.ops.timestamps import rfc3339
from reference_db.store.disk import write_file

FILE = "tokens.json"
TOKEN_PREFIX = "cw_"
Scope = Literal["read", "write", "admin"]  # each may do what the one before it may
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
LOOK_S = 0.5  # how often the file is looked at while it is in use


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of a token."""

    name: str
    scope: Scope
    sha256: str
    created_at: str


class Tokens:
    """The tokens of a data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._mark: tuple[int, int, int] | None = None
        self._held: list[Token] = []
        self._looked_at = -LOOK_S

    def all(self) -> list[Token]:
        """All of them; ConfigError where the file cannot be read."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            mark = _mark(self._path)
            if mark != self._mark:
                self._held, self._mark = _read(self._path), mark
            self._looked_at = time.monotonic()
        return self._held

    def any(self) -> bool:
        return bool(self.all())

    def find(self, token: str) -> Token | None:
        """What is known of this token. Takes as long for a wrong one as for a right one, whichever it is."""
        digest, found = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest(), None
        for one in self.all():
            if hmac.compare_digest(one.sha256, digest):
                found = one
        return found

    def add(self, name: str, scope: Scope) -> str:
        """A new token, told here and never again; ConfigError for a name that is taken or cannot be one."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} cannot name a token: use up to 64 letters, digits and . _ @ -.")
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        with self._changing() as tokens:
            if name in [one.name for one in tokens]:
                raise ConfigError(f"there is a token {name} already; choose another name or remove it.")
            digest = hashlib.sha256(token.encode()).hexdigest()
            tokens.append(Token(name, scope, digest, rfc3339(datetime.now(UTC))))
        return token

    def remove(self, name: str) -> None:
        """Whoever has it is out within a second; ConfigError where there is none of this name."""
        with self._changing() as tokens:
            kept = [one for one in tokens if one.name != name]
            if len(kept) == len(tokens):
                raise ConfigError(f"there is no token {name}; `copywatch tokens list` shows those there are.")
            tokens[:] = kept

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """The tokens, written when the block ends; nobody else changes them meanwhile."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used ({error.strerror}); set data_dir elsewhere.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = _read(self._path)
            yield tokens
            write_file(self._path, json.dumps([asdict(one) for one in tokens], indent=1).encode(), mode=0o600)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error.strerror}).") from error
        finally:
            os.close(lock)
        self._looked_at = -LOOK_S


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> list[Token]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        tokens = [Token(**value) for value in values]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged; remove it and make the tokens again.") from error
    if not all(one.scope in ("read", "write", "admin") and len(one.sha256) == 64 for one in tokens):
        raise ConfigError(f"{path} is damaged; remove it and make the tokens again.")
    return tokens
