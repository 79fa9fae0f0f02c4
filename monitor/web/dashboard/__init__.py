"""The dashboard: hand-written pages, served as they are in this folder.

They use the REST API and its events like any other client, so a viewer costs this process no more than a program
would. There is no build step and no third-party code. The policy sent with the page lets a browser run these files
only and create no markup from text (trusted types), so markup in a title stays text.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request, Response

FOLDER = Path(__file__).parent
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


@dataclass(frozen=True, slots=True)
class DashboardFile:
    """One file, ready to be served."""

    content: bytes
    kind: str
    etag: str

    def reply(self, request: Request) -> Response:
        """The file, or 304 if the browser's copy is up to date."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache", "Content-Security-Policy": POLICY}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def read_dashboard() -> dict[str, DashboardFile]:
    """All files by name; read once at start, so that an upgrade never mixes versions."""
    return {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in KINDS}


def _read(path: Path) -> DashboardFile:
    content = path.read_bytes()
    return DashboardFile(content, KINDS[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')
