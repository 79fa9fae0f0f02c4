"""`/jobs`: accepted registrations, imports and removals, and their progress."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from monitor.web.context import Context
from monitor.web.requests.jobs import DONE, REMOVE, Job, Registrar, new_id
from monitor.web.requests.paging import Cursor, Limit, Page, cursor_of, number_of
from monitor.web.requests.problems import ERROR_RESPONSES, not_found

JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{24}$")]

router = APIRouter(tags=["jobs"], responses=ERROR_RESPONSES)


class JobOut(BaseModel):
    """An accepted registration, import or removal."""

    id: str
    kind: str
    state: str = Field(description="waiting, running, done or failed.")
    done_s: int
    total_s: int | None
    message: str
    result: dict[str, Any] | None = Field(description="The reference's id, the outcome and warnings.")
    created_at: str


class AcceptedOut(BaseModel):
    """The job to poll."""

    job: JobOut


@router.get("/api/v1/jobs")
def list_jobs(context: Context, limit: Limit = 50, cursor: Cursor = None) -> Page[JobOut]:
    """The jobs, newest first."""
    found = context.registrar.jobs.page(number_of(cursor), limit + 1)
    following = cursor_of(found[limit - 1].n) if len(found) > limit else None
    return Page(items=[job_view(job) for job in found[:limit]], next=following)


@router.get("/api/v1/jobs/{id}")
def show_job(context: Context, id: JobId) -> JobOut:
    """One job and its progress."""
    job = context.registrar.jobs.get(id)
    if job is None:
        raise not_found(f"job {id}")
    return job_view(job)


def remove_later(registrar: Registrar, reference: str) -> AcceptedOut:
    """Queues the removal of a reference for when no other process writes to the library."""
    job = registrar.jobs.add(new_id(), REMOVE, {"reference": reference})
    return AcceptedOut(job=job_view(job))


def job_view(job: Job) -> JobOut:
    return JobOut(
        id=job.id,
        kind=job.kind,
        state=job.state,
        done_s=job.done_s,
        total_s=job.total_s,
        message=job.message,
        result=job.result if job.state == DONE else None,
        created_at=job.created_at,
    )
