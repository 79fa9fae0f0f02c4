"""Jobs: accepted registrations, imports and removals, run one at a time beside the monitoring.

    jobs.sqlite        the request and the result of each job
    uploads/ID/NAME    the file of each unfinished job

A job is on disk before it is acknowledged. After a restart, waiting and interrupted jobs run from the start, since
registering is idempotent; nothing is ever half registered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from monitor.audit.log import Actor, AuditLog, Change
from monitor.config.settings import Settings
from monitor.errors import AuditFailed, JobsFailed
from monitor.ops.sqlite_store import SqliteStore
from monitor.ops.timestamps import rfc3339
from monitor.web.requests.child_lines import match_settings, run_child
from monitor.web.requests.problems import hide_paths
from reference_db.errors import CatalogError, CatalogLocked
from reference_db.library import ReferenceLibrary

logger = logging.getLogger(__name__)

FILE, FOLDER = "jobs.sqlite", "uploads"
MAX_FINISHED = 1000  # jobs that are done or failed; the oldest are deleted
LOCKED_S = 2.0  # between two attempts while another process writes to the library
REGISTER, IMPORT, REMOVE = "register", "import", "remove"
ACTIONS = {REGISTER: "refs add", IMPORT: "refs import", REMOVE: "refs rm"}  # in the audit log
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
NO_RESULT = (
    "The registration process ended without a result: it was stopped, or the file needs more memory than "
    "registration.memory_bytes; upload it again."
)
SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, state TEXT NOT NULL,
    message TEXT NOT NULL, result TEXT, request TEXT NOT NULL, created_at TEXT NOT NULL
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One job and its state."""

    n: int
    id: str
    kind: str  # register, import or remove
    state: str
    message: str
    result: dict[str, Any] | None
    request: dict[str, Any]
    created_at: str
    done_s: int = 0
    total_s: int | None = None


class Jobs:
    """The jobs of a data folder; usable from any thread. Raises JobsFailed on disk errors."""

    def __init__(self, data_dir: Path) -> None:
        self._file, self.folder = SqliteStore(data_dir / FILE, (SCHEMA,), JobsFailed), data_dir / FOLDER
        self._old_folders = list(self.folder.iterdir()) if self.folder.is_dir() else []  # of the previous run
        self.progress: dict[str, tuple[int, int | None]] = {}  # of running jobs: seconds done, and the total

    def add(self, id: str, kind: str, request: Mapping[str, Any]) -> Job:
        """Adds a job, on disk when this returns; its file is in `folder / id`."""
        with self._file.writing() as db:
            db.execute(
                "INSERT INTO job (id, kind, state, message, request, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                (id, kind, WAITING, "queued", json.dumps(request), rfc3339(datetime.now(UTC))),
            )
            oldest = "SELECT id FROM job WHERE state IN (?, ?) ORDER BY n DESC LIMIT -1 OFFSET ?"
            db.execute(f"DELETE FROM job WHERE id IN ({oldest})", (DONE, FAILED, MAX_FINISHED))  # noqa: S608 - our own text only
        job = self.get(id)
        assert job is not None
        return job

    def get(self, id: str) -> Job | None:
        return next(iter(self._select("WHERE id = ?", (id,))), None)

    def page(self, before: int | None, limit: int) -> list[Job]:
        """Newest first."""
        return self._select("WHERE ?1 IS NULL OR n < ?1 ORDER BY n DESC LIMIT ?2", (before, limit))

    def waiting(self) -> list[Job]:
        """The waiting jobs, oldest first."""
        return self._select("WHERE state = ? ORDER BY n", (WAITING,))

    def unfinished(self) -> list[Job]:
        """The jobs that wait or run: their files are on disk."""
        return self._select("WHERE state IN (?, ?)", (WAITING, RUNNING))

    def update(self, id: str, state: str, message: str, result: dict[str, Any] | None = None) -> None:
        """Sets the state; removes the file of a finished job."""
        with self._file.writing() as db:
            text = None if result is None else json.dumps(result)
            db.execute("UPDATE job SET state = ?, message = ?, result = ? WHERE id = ?", (state, message, text, id))
        if state in (DONE, FAILED):
            shutil.rmtree(self.folder / id, ignore_errors=True)

    def requeue(self) -> None:
        """After a restart: queues interrupted jobs again, and removes files that belong to no job."""
        with self._file.writing() as db:
            db.execute(
                "UPDATE job SET state = ?, message = 'queued again after a restart' WHERE state = ?", (WAITING, RUNNING)
            )
        wanted = {job.id for job in self.waiting()}
        for folder in self._old_folders:
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)

    def _select(self, where: str, values: tuple[Any, ...]) -> list[Job]:
        columns = "n, id, kind, state, message, result, request, created_at"
        rows = self._file.rows(f"SELECT {columns} FROM job {where}", values)  # noqa: S608 - our own text only
        jobs = []
        for n, id, kind, state, message, result, request, created_at in rows:
            done_s, total_s = self.progress.get(id, (0, None))
            outcome = None if result is None else json.loads(result)
            jobs.append(Job(n, id, kind, state, message, outcome, json.loads(request), created_at, done_s, total_s))
        return jobs


class Registrar:
    """Runs the jobs one at a time, registrations in a child process; `run` works until cancelled."""

    def __init__(self, jobs: Jobs, settings: Settings) -> None:
        self.jobs, self._settings = jobs, settings
        self._audit = AuditLog(settings.data_dir)
        self._has_work = asyncio.Event()
        self._finished: dict[str, asyncio.Event] = {}

    def wake(self) -> None:
        """Call it after adding a job."""
        self._has_work.set()

    async def wait_for(self, id: str, timeout_s: float) -> None:
        """Returns when the job is finished, or after the time-out."""
        finished = self._finished.setdefault(id, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await finished.wait()

    async def run(self) -> None:
        await asyncio.to_thread(self._requeue)
        while True:
            self._has_work.clear()
            try:
                waiting = await asyncio.to_thread(self.jobs.waiting)
                if waiting:
                    await self._run_job(waiting[0])
                    continue
            except JobsFailed as error:
                logger.error("%s; uploads wait", error)
                await asyncio.sleep(LOCKED_S)
                continue
            await self._has_work.wait()

    def _requeue(self) -> None:
        try:
            self.jobs.requeue()
        except JobsFailed as error:
            logger.error("%s; uploads of the previous run are left untouched", error)

    async def _run_job(self, job: Job) -> None:
        is_removal = job.kind == REMOVE
        message = "removing" if is_removal else "registering"
        await asyncio.to_thread(self.jobs.update, job.id, RUNNING, message)
        outcome = await (asyncio.to_thread(self._remove, job) if is_removal else self._register(job))
        if outcome.get("locked"):
            await asyncio.to_thread(self.jobs.update, job.id, WAITING, "waiting for another writer of the library")
            await asyncio.sleep(LOCKED_S)
            return
        await asyncio.to_thread(self._record, job, outcome)
        if (result := outcome.get("result")) is not None:
            await asyncio.to_thread(self.jobs.update, job.id, DONE, str(result["outcome"]), result)
        else:
            kind = {"kind": outcome["kind"]} if "kind" in outcome else None
            await asyncio.to_thread(self.jobs.update, job.id, FAILED, hide_paths(str(outcome["error"])), kind)
            logger.warning("job %s failed: %s", job.id, outcome["error"])
        self.jobs.progress.pop(job.id, None)
        if (finished := self._finished.pop(job.id, None)) is not None:
            finished.set()

    def _record(self, job: Job, outcome: Mapping[str, Any]) -> None:
        """Adds the result to the audit log; the entry of the request has the job's id and the caller's name."""
        result = outcome.get("result") or {}
        change = Change(
            action=ACTIONS[job.kind],
            actor=Actor(None, None, "monitor"),
            result="done" if result else "failed",
            object=result.get("reference"),
            details={"job": job.id, "outcome": result.get("outcome")},
        )
        try:
            self._audit.append(change)
        except AuditFailed as error:
            logger.error("%s; the result of job %s is not recorded", error, job.id)

    def _remove(self, job: Job) -> dict[str, Any]:
        """Removes a reference; the outcome in the form of the child's last line."""
        try:
            ReferenceLibrary(self._settings.data_dir).rm(job.request["reference"])
        except CatalogLocked:
            return {"locked": True}
        except CatalogError as error:
            return {"error": str(error), "kind": type(error).__name__}
        return {"result": {"reference": job.request["reference"], "outcome": "removed", "warnings": []}}

    async def _register(self, job: Job) -> dict[str, Any]:
        """Runs the child and records its progress; the outcome is its last line."""
        path = self.jobs.folder / job.id / job.request["name"]
        if not path.is_file():
            return {"error": "The uploaded file is missing; upload it again."}
        settings = self._settings
        request = {
            **job.request,
            "kind": job.kind,
            "path": str(path),
            "data_dir": str(settings.data_dir),
            "encoder": str(settings.encoder) if settings.encoder else None,
            "threads": settings.compute.threads,
            "thumbnails": settings.registration.thumbnails,
            "memory_bytes": settings.registration.memory_bytes,
            "settings": match_settings(settings),
        }
        outcome: dict[str, Any] = {"error": NO_RESULT}

        def on_line(values: dict[str, Any]) -> None:
            nonlocal outcome
            if "done_s" in values:
                self.jobs.progress[job.id] = (values["done_s"], values["total_s"])
            else:
                outcome = values

        await run_child("monitor.roles.registration_child", request, on_line)
        return outcome


def new_id() -> str:
    return secrets.token_hex(12)
