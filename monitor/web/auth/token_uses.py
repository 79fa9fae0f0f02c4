"""When each token was last used: noted by the server, written to a file from time to time, shown by `tokens list`."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from monitor.ops.timestamps import rfc3339
from reference_db.store.disk import write_file

logger = logging.getLogger(__name__)

FILE = "token_uses.json"


class TokenUses:
    """The last use of every token, by the token's SHA-256, as Unix time."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._used_at = _read(self._path)
        self._is_changed = False

    def note(self, sha256: str) -> None:
        """The token is used now."""
        self._used_at[sha256], self._is_changed = time.time(), True

    def last(self, sha256: str) -> str | None:
        """The time of its last use (RFC 3339); None if it was never used."""
        used_at = self._used_at.get(sha256)
        return None if used_at is None else rfc3339(datetime.fromtimestamp(used_at, UTC))

    def save(self, known: set[str]) -> None:
        """Writes the uses of these tokens, if there was one since the last time; runs in a thread."""
        if not self._is_changed:
            return
        self._is_changed = False
        values = {sha256: used_at for sha256, used_at in list(self._used_at.items()) if sha256 in known}
        try:
            write_file(self._path, json.dumps(values).encode(), mode=0o600)
        except OSError as error:
            logger.warning("the last use of tokens could not be stored (%s)", error.strerror)


def _read(path: Path) -> dict[str, float]:
    try:
        return {str(sha256): float(used_at) for sha256, used_at in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        logger.warning("%s cannot be read; uses of tokens before now are unknown", path)
        return {}
