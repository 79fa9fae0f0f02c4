"""The dashboard: hand-written pages, sent as they lie in this folder.

They are one more reader of the REST API and of its events, so a viewer costs this process no more than any program
that asks. There is no build and nobody else's code. The policy sent with the page lets a browser run these files only
and make no markup out of text (trusted types), so what a title says stays a title.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

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
class _File:
    content: bytes
    kind: str
    etag: str

    def reply(self, request: Request) -> Response:
        """The file, or that the browser's copy is still right."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache", "Content-Security-Policy": POLICY}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def add_dashboard(app: FastAPI) -> None:
    """Serves the page at / and its parts below /assets; read once, so that an upgrade never mixes versions."""
    files = {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in KINDS}

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].reply(request)

    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Response:
        found = files.get(name)
        return Response("There is no such file.\n", status_code=404) if found is None else found.reply(request)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, KINDS[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')
