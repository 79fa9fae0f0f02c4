"""Downloads: a response that is read from disk piece by piece, no faster than the client takes it.

A client that does not read holds a few pieces of memory and one of few slots, for SEND_S at most.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from monitor.web.requests.limits import Slot

logger = logging.getLogger(__name__)

T = TypeVar("T")

PIECE_BYTES = 1 << 18  # sent at once
SEND_S = 20.0  # for the client to take a piece: 13 kB per second, as a poor mobile connection has


class RecentlyUsed(Generic[T]):
    """A cache of the values used last; usable from any thread."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: str, value: T) -> None:
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._max_values:
                self._values.popitem(last=False)


class Download(Response):
    """The pieces as one file; releases the slot when it is sent, or when the client does not take it."""

    def __init__(
        self, pieces: Iterator[bytes], n_bytes: int, slot: Slot, *, media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(None, media_type=media_type, headers={**headers, "Content-Length": str(n_bytes)})
        self._pieces, self._slot = pieces, slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slot:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                while (piece := await asyncio.to_thread(next, self._pieces, None)) is not None:
                    for at in range(0, len(piece), PIECE_BYTES):
                        body = piece[at : at + PIECE_BYTES]
                        async with asyncio.timeout(SEND_S):
                            await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                logger.info("ended the download of %s: the client took nothing for %.0f s", scope["path"], SEND_S)
                return  # the server closes a connection whose response is incomplete
            await send({"type": "http.response.body", "body": b"", "more_body": False})
