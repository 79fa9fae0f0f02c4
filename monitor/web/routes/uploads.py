"""`POST /references` and `/references/import`: an uploaded video or exported reference becomes a job.

Before an upload is accepted, the decoding child opens it, which can crash or be killed without touching anything
else. Of an import only the header is checked here; its job checks the rest, in a child under a memory limit. An upload
that fails or breaks off leaves no file behind.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from monitor.web.auth.gatekeeper import Caller
from monitor.web.context import AppContext, Context, CurrentCaller, CurrentTrail
from monitor.web.requests.jobs import DONE, FAILED, IMPORT, REGISTER, Job, Jobs, new_id
from monitor.web.requests.multipart import Upload, announced_bytes, receive
from monitor.web.requests.problems import ERROR_RESPONSES, Problem
from monitor.web.routes.jobs import AcceptedOut, JobOut, job_view
from reference_db.library import MAX_EXPORT_BYTES, check_export
from reference_db.media.decoding import DecodingChild
from reference_db.store.references import MAX_TEXT_LENGTH, check_id, check_texts, printable

MAX_WAITING = 64  # jobs; each holds a file
IMPORT_S = 60.0  # an import that is not done by then is answered with its job


def _form_schema(*, file: str, **fields: str) -> dict[str, Any]:
    """The OpenAPI description of a multipart body."""
    properties: dict[str, Any] = {"file": {"type": "string", "format": "binary", "description": file}}
    for name, description in fields.items():
        text = {"type": "string", "maxLength": MAX_TEXT_LENGTH, "description": description}
        properties[name] = {"type": "array", "items": text, "description": description} if name == "tags" else text
    schema = {"type": "object", "required": ["file"], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


UPLOAD_FORM = _form_schema(file="The video.", title="", owner="", id="", tags="key=value; may occur several times.")
IMPORT_FORM = _form_schema(file="A file written by `refs export`.", id="An id other than the one in the file.")

router = APIRouter(tags=["references"], responses=ERROR_RESPONSES)


class ImportedOut(BaseModel):
    """A finished import; if other jobs are ahead of it, its job."""

    reference: str | None
    outcome: str | None
    warnings: list[str]
    job: JobOut


@router.post("/api/v1/references", status_code=202, openapi_extra=UPLOAD_FORM)
async def upload_reference(
    context: Context, caller: CurrentCaller, trail: CurrentTrail, request: Request, response: Response
) -> AcceptedOut:
    """Registers a video: checks it, then registers it as a job whose progress can be polled."""
    id, jobs = new_id(), context.registrar.jobs
    with context.limits.uploads.take(caller), _upload_folder(jobs.folder / id) as folder, ExitStack() as space:
        await _check_backlog(jobs)
        upload = await _receive(context, caller, request, folder, context.settings.web.max_upload_bytes, space)
        values = {"id": upload.one("id"), "title": upload.one("title"), "owner": upload.one("owner") or ""}
        tags = upload.tags()
        if values["id"] is not None:
            check_id(values["id"])
        check_texts(values["title"] or "", values["owner"] or "", tags)
        await asyncio.to_thread(_check_video, upload.path)
        trail.object, trail.details = values["id"], {"job": id}
        title = values["title"] or printable(upload.stem)
        job_request = {**values, "title": title, "tags": tags, "name": upload.path.name, **_share(caller, upload)}
        job = await asyncio.to_thread(jobs.add, id, REGISTER, job_request)
    context.registrar.wake()
    response.headers["Location"] = f"/api/v1/jobs/{id}"
    return AcceptedOut(job=job_view(job))


@router.post(
    "/api/v1/references/import",
    status_code=201,
    responses={202: {"model": ImportedOut, "description": "Other jobs are ahead of it: poll the job."}},
    openapi_extra=IMPORT_FORM,
)
async def import_reference(
    context: Context, caller: CurrentCaller, trail: CurrentTrail, request: Request, response: Response
) -> ImportedOut:
    """Imports a reference from a file written by `refs export`, here or elsewhere."""
    id, jobs = new_id(), context.registrar.jobs
    with context.limits.uploads.take(caller), _upload_folder(jobs.folder / id) as folder, ExitStack() as space:
        await _check_backlog(jobs)
        upload = await _receive(context, caller, request, folder, MAX_EXPORT_BYTES, space)
        reference_id = upload.one("id")
        if reference_id is not None:
            check_id(reference_id)
        await asyncio.to_thread(check_export, upload.path)
        job_request = {"id": reference_id, "name": upload.path.name, **_share(caller, upload)}
        await asyncio.to_thread(jobs.add, id, IMPORT, job_request)
    trail.object, trail.details = reference_id, {"job": id}
    context.registrar.wake()
    await context.registrar.wait_for(id, IMPORT_S)
    job = await asyncio.to_thread(jobs.get, id)
    assert job is not None
    return _imported(job, response)


async def _receive(
    context: AppContext, caller: Caller, request: Request, folder: Path, max_bytes: int, space: ExitStack
) -> Upload:
    """Receives the file into this folder, whose name is the job's id; its space is reserved until `space` is closed."""
    n_bytes = announced_bytes(request, max_bytes)
    reservation = await asyncio.to_thread(context.upload_space.reserve, folder.name, caller, n_bytes)
    space.enter_context(reservation)
    return await receive(request, folder, max_bytes, context.settings.web.max_upload_s, reservation)


def _share(caller: Caller, upload: Upload) -> dict[str, Any]:
    """What the job counts for in the quotas until it is done."""
    return {"by": caller.name, "n_bytes": upload.path.stat().st_size}


def _imported(job: Job, response: Response) -> ImportedOut:
    if job.state == FAILED:
        is_conflict = (job.result or {}).get("kind") in ("ReferenceExists", "EncoderMismatch")
        raise Problem(409 if is_conflict else 422, job.message)
    result = job.result or {}
    response.headers["Location"] = f"/api/v1/references/{result['reference']}" if result else f"/api/v1/jobs/{job.id}"
    response.status_code = 201 if job.state == DONE else 202
    warnings = result.get("warnings", [])
    return ImportedOut(
        reference=result.get("reference"), outcome=result.get("outcome"), warnings=warnings, job=job_view(job)
    )


@contextmanager
def _upload_folder(folder: Path) -> Iterator[Path]:
    """Creates the folder of one upload; removes it with all content if the block fails."""
    try:
        folder.mkdir(parents=True, mode=0o700)
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def _check_backlog(jobs: Jobs) -> None:
    if len(await asyncio.to_thread(jobs.waiting)) >= MAX_WAITING:
        raise Problem(429, f"{MAX_WAITING} jobs are already waiting; try again later.", {"Retry-After": "60"})


def _check_video(path: Path) -> None:
    """Opens the file in the decoding child; raises MediaError if it is not a readable video."""
    with DecodingChild(str(path)) as child:
        child.info()
