"""The secret of a server without tokens: new at every start, printed with the link to the dashboard, as notebooks do.

Without it every program, user and web page that reaches the loopback port, and every client of a proxy on this
machine, would be admin. While the server runs the secret is also in a file that only its owner reads, so that scripts
of the same user can send it as a bearer token. It is worth nothing once a token exists.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from monitor.errors import ConfigError
from monitor.web.auth.tokens import digest_of
from reference_db.store.disk import write_file

FILE = "local_secret"


class LocalSecret:
    """The secret of one run."""

    def __init__(self, data_dir: Path) -> None:
        self.value = secrets.token_urlsafe(16)  # 128 bits: it lives as long as the process, and guesses are counted
        self.sha256 = digest_of(self.value)
        self._path = data_dir / FILE

    def link(self, address: str) -> str:
        """The link that opens the dashboard and logs in. Browsers send no fragment to any server."""
        return f"{address}/#secret={self.value}"

    def store(self) -> None:
        try:
            write_file(self._path, self.value.encode(), mode=0o600)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error.strerror}).") from error

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
