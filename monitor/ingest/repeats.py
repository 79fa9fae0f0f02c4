"""Repeats: separates new pictures of a live stream from those that were received before.

An origin whose encoder has stopped goes on serving its last segments: every connection reads them again, and a looped
playlist sends the same ones for ever. Such pictures are not new. Input: the key picture that each frame was decoded
from, identified by its time stamp and its bytes, whatever the file, the number or the connection that it came by.
Output: whether the frame is new. The same film with other time stamps is new, and so is the same film from its
beginning, with the same time stamps, once the source has shown in a new connection that it produces now. Nothing here
reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from reference_db.media.frames import KeyPicture

Verdict = Literal["new", "repeated", "looped"]

REMEMBERED_S = 300  # new seconds; longer than what origins serve again, shorter than what a channel loops on purpose
MAX_KEYS = 4096  # a stream may consist of key pictures only
MAX_STORED = 256
STORED_S = 60  # new seconds whose key pictures are stored, for a restart of this process


@dataclass(slots=True)
class _Received:
    """What was received of one key picture and those that follow it."""

    last_s: int  # the newest second that was new, by the stream's own time
    at_s: int  # the number of new seconds so far
    connection: int  # that delivered it first
    sent: int  # the last connection that sent it


class RepeatDetector:
    """Checks the frames of one channel, connection by connection."""

    def __init__(self) -> None:
        self._received: dict[int, _Received] = {}  # by fingerprint, oldest first
        self._n_seconds = 0  # new ones
        self._connection = 0
        self.is_looped = False  # since the last new key picture, a connection has sent one of them twice

    def connect(self) -> None:
        """A new connection starts."""
        self._connection += 1

    def forget(self) -> None:
        """Everything is new again."""
        self._received.clear()

    def push_key(self, key: KeyPicture) -> None:
        """A key picture of a stream in segments: nothing is sent twice in one connection unless the origin loops."""
        known = self._received.get(key.fingerprint)
        if known is None:
            before_s = math.floor(key.pts_s) - 1  # none of its seconds so far
            self._received[key.fingerprint] = _Received(before_s, self._n_seconds, self._connection, self._connection)
            self.is_looped = False
            self._evict()
        else:
            self.is_looped = self.is_looped or known.sent == self._connection
            known.sent = self._connection

    def push(self, key: KeyPicture | None, second: int, *, in_segments: bool, is_silent: bool) -> Verdict:
        """Whether this frame is new; `second` is by the stream's own time, `key` is what it was decoded from.

        `in_segments`: `push_key` was called for each key picture. `is_silent`: the last new frame came too long ago to
        be continued.
        """
        if key is None:
            return "new"
        known = self._received.get(key.fingerprint)
        if known is not None and known.connection == self._connection:
            if in_segments and second <= known.last_s:
                return "looped"
        elif known is not None and (second <= known.last_s or is_silent):
            if self.is_looped or not key.is_fresh:
                return "looped" if self.is_looped else "repeated"
            self._received.clear()  # the same film is on air again, from its beginning
        self._note(key.fingerprint, second)
        return "new"

    def stored(self) -> dict[str, int]:
        """The newest key pictures as plain values, for `resume`."""
        newest, n_older = self._n_seconds - STORED_S, len(self._received) - MAX_STORED
        items = islice(self._received.items(), max(0, n_older), None)
        return {f"{name:x}": one.last_s for name, one in items if one.at_s >= newest}

    def resume(self, stored: Mapping[str, int]) -> None:
        """Restores them: they were received in an earlier connection."""
        self._received = {int(name, 16): _Received(last_s, 0, -1, -1) for name, last_s in stored.items()}

    def _note(self, fingerprint: int, second: int) -> None:
        self._n_seconds += 1
        self._received.pop(fingerprint, None)
        self._received[fingerprint] = _Received(second, self._n_seconds, self._connection, self._connection)
        self._evict()

    def _evict(self) -> None:
        oldest = next(iter(self._received))
        while self._received[oldest].at_s < self._n_seconds - REMEMBERED_S or len(self._received) > MAX_KEYS:
            del self._received[oldest]
            oldest = next(iter(self._received))
