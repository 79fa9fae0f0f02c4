"""Jobs: registrations, imports and removals that were accepted, done one after another beside the monitoring.

    jobs.sqlite        what was asked for and what came of it
    uploads/ID/NAME    the file of each job that is not done

A job is on disk before it is acknowledged. After a restart, one that waited or was being worked on is done from its
beginning, since registering is idempotent; nothing is ever half registered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from monitor.config.settings import Settings
from monitor.errors import JobsFailed
from monitor.ops.sqlite_store import SqliteStore
from monitor.ops.timestamps import rfc3339
from reference_db.errors import CatalogError, CatalogLocked
from reference_db.library import ReferenceLibrary

logger = logging.getLogger(__name__)

FILE, FOLDER = "jobs.sqlite", "uploads"
KEPT = 1000  # jobs that are done or failed, the newest
LOCKED_S = 2.0  # until a library that another process writes to is tried again
REGISTER, IMPORT, REMOVE = "register", "import", "remove"
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, state TEXT NOT NULL,
    message TEXT NOT NULL, result TEXT, request TEXT NOT NULL, created_at TEXT NOT NULL
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One job as it is now."""

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
    """The jobs of a data folder; any thread may ask. Raises JobsFailed where the disk does not do it."""

    def __init__(self, data_dir: Path) -> None:
        self._file, self.folder = SqliteStore(data_dir / FILE, (SCHEMA,), JobsFailed), data_dir / FOLDER
        self._found = list(self.folder.iterdir()) if self.folder.is_dir() else []  # of an earlier life
        self.progress: dict[str, tuple[int, int | None]] = {}  # of those that run: seconds done, and of how many

    def add(self, id: str, kind: str, request: Mapping[str, Any]) -> Job:
        """A new job, on disk when this returns; its file is in `folder / id`."""
        with self._file.writing() as db:
            db.execute(
                "INSERT INTO job (id, kind, state, message, request, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                (id, kind, WAITING, "waits for its turn", json.dumps(request), rfc3339(datetime.now(UTC))),
            )
            done = "SELECT id FROM job WHERE state IN (?, ?) ORDER BY n DESC LIMIT -1 OFFSET ?"
            db.execute(f"DELETE FROM job WHERE id IN ({done})", (DONE, FAILED, KEPT))  # noqa: S608 - no words of others
        job = self.get(id)
        assert job is not None
        return job

    def get(self, id: str) -> Job | None:
        return next(iter(self._select("WHERE id = ?", (id,))), None)

    def page(self, before: int | None, limit: int) -> list[Job]:
        """The newest first."""
        return self._select("WHERE ?1 IS NULL OR n < ?1 ORDER BY n DESC LIMIT ?2", (before, limit))

    def waiting(self) -> list[Job]:
        """Those that wait, the oldest first."""
        return self._select("WHERE state = ? ORDER BY n", (WAITING,))

    def settle(self, id: str, state: str, message: str, result: dict[str, Any] | None = None) -> None:
        """What became of it; the file of one that is over is removed."""
        with self._file.writing() as db:
            text = None if result is None else json.dumps(result)
            db.execute("UPDATE job SET state = ?, message = ?, result = ? WHERE id = ?", (state, message, text, id))
        if state in (DONE, FAILED):
            shutil.rmtree(self.folder / id, ignore_errors=True)

    def begin_again(self) -> None:
        """After a restart: what ran waits again, and files that belong to no job are cleared away."""
        with self._file.writing() as db:
            db.execute(
                "UPDATE job SET state = ?, message = 'begins again after a restart' WHERE state = ?", (WAITING, RUNNING)
            )
        wanted = {job.id for job in self.waiting()}
        for folder in self._found:
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)

    def _select(self, where: str, values: tuple[Any, ...]) -> list[Job]:
        columns = "n, id, kind, state, message, result, request, created_at"
        rows = self._file.rows(f"SELECT {columns} FROM job {where}", values)  # noqa: S608 - no words of others
        jobs = []
        for n, id, kind, state, message, result, request, created_at in rows:
            done_s, total_s = self.progress.get(id, (0, None))
            came_of_it = None if result is None else json.loads(result)
            asked = json.loads(request)
            jobs.append(Job(n, id, kind, state, message, came_of_it, asked, created_at, done_s, total_s))
        return jobs


class Registrar:
    """Does the jobs, one at a time, each in a child process; `run` works until it is cancelled."""

    def __init__(self, jobs: Jobs, settings: Settings) -> None:
        self.jobs, self._settings = jobs, settings
        self._news = asyncio.Event()
        self._finished: dict[str, asyncio.Event] = {}

    def ring(self) -> None:
        """There is a new job."""
        self._news.set()

    async def wait_for(self, id: str, patience_s: float) -> None:
        """Returns when the job is over, or after so long."""
        finished = self._finished.setdefault(id, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await finished.wait()

    async def run(self) -> None:
        await asyncio.to_thread(self._begin)
        while True:
            self._news.clear()
            try:
                waiting = await asyncio.to_thread(self.jobs.waiting)
                if waiting:
                    await self._do(waiting[0])
                    continue
            except JobsFailed as error:
                logger.error("%s; uploads wait", error)
                await asyncio.sleep(LOCKED_S)
                continue
            await self._news.wait()

    def _begin(self) -> None:
        try:
            self.jobs.begin_again()
        except JobsFailed as error:
            logger.error("%s; uploads of an earlier start are left as they are", error)

    async def _do(self, job: Job) -> None:
        is_removal = job.kind == REMOVE
        message = "is being removed" if is_removal else "is being registered"
        await asyncio.to_thread(self.jobs.settle, job.id, RUNNING, message)
        answer = await (asyncio.to_thread(self._removed, job) if is_removal else self._answer(job))
        if answer.get("locked"):
            await asyncio.to_thread(self.jobs.settle, job.id, WAITING, "waits for another writer of the library")
            await asyncio.sleep(LOCKED_S)
            return
        if (result := answer.get("result")) is not None:
            await asyncio.to_thread(self.jobs.settle, job.id, DONE, str(result["outcome"]), result)
        else:
            kind = {"kind": answer["kind"]} if "kind" in answer else None
            await asyncio.to_thread(self.jobs.settle, job.id, FAILED, str(answer["error"]), kind)
            logger.warning("job %s failed: %s", job.id, answer["error"])
        self.jobs.progress.pop(job.id, None)
        if (finished := self._finished.pop(job.id, None)) is not None:
            finished.set()

    def _removed(self, job: Job) -> dict[str, Any]:
        """What came of taking a reference out."""
        try:
            ReferenceLibrary(self._settings.data_dir).rm(job.request["reference"])
        except CatalogLocked:
            return {"locked": True}
        except CatalogError as error:
            return {"error": str(error), "kind": type(error).__name__}
        return {"result": {"reference": job.request["reference"], "outcome": "removed", "warnings": []}}

    async def _answer(self, job: Job) -> dict[str, Any]:
        """What the child said last; its progress is noted on the way."""
        path = self.jobs.folder / job.id / job.request["name"]
        if not path.is_file():
            return {"error": "The uploaded file is gone; upload it again."}
        settings = self._settings
        request = {
            **job.request,
            "kind": job.kind,
            "path": str(path),
            "data_dir": str(settings.data_dir),
            "encoder": str(settings.encoder) if settings.encoder else None,
            "threads": settings.compute.threads,
            "thumbnails": settings.registration.thumbnails,
            "parent": os.getpid(),
        }
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "monitor.roles.registration_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            process_group=0,  # Ctrl-C is for us; we end the child ourselves
        )
        assert child.stdin
        assert child.stdout
        said: dict[str, Any] = {"error": "The registering process ended without a word; upload the file again."}
        try:
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
            async for line in child.stdout:
                values = json.loads(line)
                if "done_s" in values:
                    self.jobs.progress[job.id] = (values["done_s"], values["total_s"])
                else:
                    said = values
            await child.wait()
        except (BrokenPipeError, ConnectionResetError, ValueError):
            pass  # it died at once, or in the middle of a line
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
                await child.wait()  # killed, it is gone at once; nothing of it is left behind
        return said


def new_id() -> str:
    return secrets.token_hex(12)
