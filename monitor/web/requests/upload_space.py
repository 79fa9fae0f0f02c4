"""Disk space of uploads: each reserves its space before a byte arrives, so that they never fill the disk together.

An upload counts from its first byte until its job is done. All of them and those of one token have a quota, and some
space of the disk is left free for alerts, evidence and the library.
"""

from __future__ import annotations

import shutil
import threading
from types import TracebackType
from typing import Self

from monitor.config.settings import WebSettings
from monitor.web.auth.gatekeeper import Caller
from monitor.web.requests.jobs import Jobs
from monitor.web.requests.problems import Problem

STEP_BYTES = 64 << 20  # reserved at a time for an upload that does not state its length


class UploadSpace:
    """The space that uploads may take; usable from any thread."""

    def __init__(self, web: WebSettings, jobs: Jobs) -> None:
        self._web, self._jobs = web, jobs
        self._open: set[Reservation] = set()
        self._lock = threading.Lock()

    def reserve(self, id: str, caller: Caller, n_bytes: int | None) -> Reservation:
        """Space for an upload of this length, None if it is unknown; reads the disk. Raises Problem 429 or 507."""
        reservation = Reservation(self, id, caller)
        self.extend(reservation, STEP_BYTES if n_bytes is None else n_bytes)
        return reservation

    def extend(self, reservation: Reservation, n_bytes: int) -> None:
        """Reserves so much more for an upload that is being received."""
        waiting = [
            (job.id, str(job.request.get("by", "")), int(job.request.get("n_bytes", 0)))
            for job in self._jobs.unfinished()
        ]
        with self._lock:
            ids = {one.id for one in self._open}
            used = [(by, n) for id, by, n in waiting if id not in ids]
            used += [(one.caller.name, one.n_reserved) for one in self._open]
            self._check_quota(sum(n for _, n in used) + n_bytes, self._web.upload_quota_bytes, "All uploads")
            if not reservation.caller.is_local:
                name = reservation.caller.name
                own = sum(n for by, n in used if by == name) + n_bytes
                self._check_quota(own, self._web.upload_token_quota_bytes, f"The uploads of {name}")
            unwritten = sum(one.n_reserved - one.n_written for one in self._open)
            free = shutil.disk_usage(self._jobs.folder.parent).free
            if free - unwritten - n_bytes < self._web.upload_reserve_bytes:
                raise Problem(507, "The server's disk has not enough free space for this upload.")
            reservation.n_reserved += n_bytes
            self._open.add(reservation)

    def release(self, reservation: Reservation) -> None:
        with self._lock:
            self._open.discard(reservation)

    def _check_quota(self, n_bytes: int, quota_bytes: int, what: str) -> None:
        if n_bytes > quota_bytes:
            detail = f"{what} that are not registered yet may have {quota_bytes} bytes; try again later."
            raise Problem(429, detail, {"Retry-After": "60"})


class Reservation:
    """The space of one upload, until it is closed."""

    def __init__(self, space: UploadSpace, id: str, caller: Caller) -> None:
        self.id, self.caller = id, caller
        self.n_reserved, self.n_written = 0, 0
        self._space = space

    def is_full(self, n_bytes: int) -> bool:
        """Whether so many bytes more need `extend` first."""
        return self.n_written + n_bytes > self.n_reserved

    def extend(self) -> None:
        """Reserves another step; reads the disk. Raises Problem 429 or 507."""
        self._space.extend(self, STEP_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._space.release(self)
