"""Quality reports of references, each computed once for a generation of the library, in a child process.

A report compares a reference with all others, which takes memory and seconds. So requests only wait for it: those for
the same report share it, one child at a time computes what is wanted, and a request that waits too long is answered
without.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

from monitor.config.settings import Settings
from monitor.web.requests.child_lines import match_settings, run_child
from monitor.web.requests.problems import Problem
from reference_db.registration import QualityReport
from reference_db.store.catalog import Reference

logger = logging.getLogger(__name__)

MAX_REPORTS = 4096  # cached; those least recently used are dropped
MAX_WANTED = 256  # reports that requests wait for
BATCH = 32  # reports of one child: it loads the index once for all of them
WAIT_S = 20.0  # that a request waits for a report; a large index takes longer to load

Key = tuple[str, str, str]  # the reference's id, the hash of its features, the checksum of the library


class ReportPending(Exception):
    """The report is not there yet; a later request gets it."""


class ReportFailed(Exception):
    """The child ended without the report."""


class QualityReports:
    """The reports; `run` works until cancelled. Used on the event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: OrderedDict[Key, QualityReport | None] = OrderedDict()
        self._wanted: dict[Key, asyncio.Future[QualityReport | None]] = {}
        self._has_work = asyncio.Event()

    async def get(self, reference: Reference, library_checksum: str) -> QualityReport | None:
        """The report, None if the reference is damaged or gone. Raises ReportPending, ReportFailed, Problem 429."""
        key = (reference.id, reference.features_sha256, library_checksum)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if key not in self._wanted:
            if len(self._wanted) >= MAX_WANTED:
                raise Problem(429, "Too many reports are being computed; try again later.", {"Retry-After": "10"})
            self._wanted[key] = asyncio.get_running_loop().create_future()
            self._has_work.set()
        done, _ = await asyncio.wait([self._wanted[key]], timeout=WAIT_S)
        if not done:
            raise ReportPending
        return done.pop().result()

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._wanted:
                await self._compute(list(self._wanted)[:BATCH])

    async def _compute(self, keys: list[Key]) -> None:
        """Has one child compute these reports; whatever it does not answer has failed."""

        def on_line(line: dict[str, Any]) -> None:
            report = None if line["report"] is None else _report(line["report"])
            for key in keys:
                if key[0] == line["id"]:
                    self._finish(key, report)

        request = {
            "ids": sorted({key[0] for key in keys}),
            "data_dir": str(self._settings.data_dir),
            "memory_bytes": self._settings.registration.memory_bytes,
            "settings": match_settings(self._settings),
        }
        try:
            await run_child("monitor.roles.quality_child", request, on_line)
        finally:
            for key in keys:
                if (waiting := self._wanted.pop(key, None)) is not None:
                    logger.warning("the quality report of %s could not be computed", key[0])
                    waiting.set_exception(ReportFailed())
                    waiting.exception()  # nobody may be waiting any more

    def _finish(self, key: Key, report: QualityReport | None) -> None:
        self._known[key] = report
        while len(self._known) > MAX_REPORTS:
            self._known.popitem(last=False)
        if (waiting := self._wanted.pop(key, None)) is not None:
            waiting.set_result(report)


def _report(values: dict[str, Any]) -> QualityReport:
    overlaps = tuple((other, share) for other, share in values["overlaps"])
    return QualityReport(**values | {"overlaps": overlaps, "warnings": tuple(values["warnings"])})
