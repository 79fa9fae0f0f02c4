"""API tokens: names, scopes and hashes in a file that contains no token.

A token is `cw_` and 256 random bits. SHA-256 is enough for such a number: it cannot be guessed, so a slow password
hash would only cost time. A token is shown once, when it is created, and may expire. The file is readable by its owner
only; it is read again when it changes, and while it cannot be read every request is refused.
"""

from __future__ import annotations

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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from monitor.errors import ConfigError
from monitor.ops.timestamps import rfc3339
from reference_db.store.disk import PRIVATE_FILE, create_private_folder, wait_for_lock, write_file

FILE = "tokens.json"
LOCK_FILE = "tokens.lock"
TOKEN_PREFIX = "cw_"
Scope = Literal["read", "write", "admin"]  # each includes the one before it
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
CHECK_S = 0.5  # at most so often the file is checked for changes


@dataclass(frozen=True, slots=True)
class Token:
    """The stored form of a token."""

    name: str
    scope: Scope
    sha256: str
    created_at: str
    expires_at: str | None = None  # RFC 3339

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= now


def digest_of(token: str) -> str:
    """What is stored of a token: its SHA-256."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Tokens:
    """The tokens of a data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._version: tuple[int, int, int] | None = None
        self._tokens: list[Token] = []
        self._checked_at = -CHECK_S

    def all(self) -> list[Token]:
        """All tokens; ConfigError if the file cannot be read."""
        if time.monotonic() - self._checked_at >= CHECK_S:
            version = _version(self._path)
            if version != self._version:
                self._tokens, self._version = _read(self._path), version
            self._checked_at = time.monotonic()
        return self._tokens

    def any(self) -> bool:
        return bool(self.all())

    def find(self, token: str) -> Token | None:
        """The stored form of this token, unless it has expired."""
        return self.find_digest(digest_of(token))

    def find_digest(self, sha256: str) -> Token | None:
        """The token with this SHA-256, unless it has expired. Takes equally long for valid and invalid ones."""
        found = None
        for one in self.all():
            if hmac.compare_digest(one.sha256, sha256):
                found = one
        return None if found is None or found.is_expired(datetime.now(UTC)) else found

    def add(self, name: str, scope: Scope, days: float | None = None) -> str:
        """Creates a token, valid for so many days, returned here and never again.

        ConfigError for an invalid or existing name.
        """
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} is not a valid token name: use up to 64 letters, digits and . _ @ -.")
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        with self._changing() as tokens:
            if name in [one.name for one in tokens]:
                raise ConfigError(f"token {name} already exists; choose another name or remove it.")
            now = datetime.now(UTC)
            expires_at = None if days is None else rfc3339(now + timedelta(days=days))
            tokens.append(Token(name, scope, digest_of(token), rfc3339(now), expires_at))
        return token

    def remove(self, name: str) -> None:
        """Removes a token, in effect within a second; ConfigError if there is none of this name."""
        with self._changing() as tokens:
            others = [one for one in tokens if one.name != name]
            if len(others) == len(tokens):
                raise ConfigError(f"there is no token {name}; `copywatch tokens list` lists all tokens.")
            tokens[:] = others

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """The tokens, written when the block ends; other processes wait meanwhile."""
        folder = self._path.parent
        try:
            create_private_folder(folder)
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used ({error.strerror}); set data_dir elsewhere.") from error
        try:
            wait_for_lock(lock)
            tokens = _read(self._path)
            yield tokens
            write_file(self._path, json.dumps([asdict(one) for one in tokens], indent=1).encode(), mode=0o600)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error.strerror}).") from error
        finally:
            os.close(lock)
        self._checked_at = -CHECK_S


def _version(path: Path) -> tuple[int, int, int] | None:
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
        raise ConfigError(f"{path} is damaged; remove it and create the tokens again.") from error
    if not all(map(_is_valid, tokens)):
        raise ConfigError(f"{path} is damaged; remove it and create the tokens again.")
    return tokens


def _is_valid(token: Token) -> bool:
    try:
        token.is_expired(datetime.now(UTC))
    except (TypeError, ValueError):  # not a time with a zone
        return False
    return token.scope in ("read", "write", "admin") and len(token.sha256) == 64
