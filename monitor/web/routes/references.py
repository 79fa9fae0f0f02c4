"""`/references`: the registered videos, how well each can be recognised, and the spans that never alert."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field

from monitor.web.context import AppContext, Context, CurrentCaller, CurrentTrail
from monitor.web.quality_reports import ReportFailed, ReportPending
from monitor.web.reference_views import ReferenceOut, damaged_view, report_view
from monitor.web.requests.downloads import Download
from monitor.web.requests.etags import UNCHANGED, IfMatch, IfNoneMatch, check_match, etag, unchanged
from monitor.web.requests.paging import Cursor, Limit, Page, page_of
from monitor.web.requests.problems import BYTES, ERROR_RESPONSES, JPEG, not_found
from monitor.web.routes.jobs import AcceptedOut, remove_later
from reference_db.errors import CatalogLocked, DamagedReference, UnknownReference
from reference_db.library import EXPORT_SUFFIX, ReferenceLibrary
from reference_db.store.catalog import Reference, ReferenceId
from reference_db.store.references import ID_PATTERN

BUSY_S = 1.0  # that a removal waits for another writer of the library before it becomes a job
BUSY_POLL_S = 0.1
ReferenceName = Annotated[str, Path(pattern=f"^{ID_PATTERN.pattern}$")]

router = APIRouter(tags=["references"], responses=ERROR_RESPONSES)


class ExclusionIn(BaseModel):
    """A span of a reference that never alerts: an ident, end credits."""

    start_s: float = Field(ge=0, le=10**9)
    end_s: float = Field(gt=0, le=10**9)
    note: str = Field(default="", max_length=1000)


class ExclusionOut(BaseModel):
    """A stored span that never alerts."""

    id: int
    reference: str
    start_s: float
    end_s: float
    note: str
    added_at: str


@router.get("/api/v1/references")
def list_references(
    context: Context,
    q: Annotated[str | None, Query(max_length=200, description="Words in id, title, owner or tags.")] = None,
    owner: Annotated[str | None, Query(max_length=1000)] = None,
    tag: Annotated[str | None, Query(max_length=2001, description="`key` or `key=value`.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[ReferenceOut]:
    """The references, by id. Overlaps are reported by the single reference only."""
    contents = context.contents()
    found: list[tuple[str, Reference | str]] = [
        (one.id, one) for one in contents.references if _matches(one, q, owner, tag)
    ]
    if q is None and owner is None and tag is None:
        found += list(contents.damaged.items())
    part, following = page_of(sorted(found, key=lambda one: one[0]), limit, cursor, lambda one: one[0])
    items = []
    with context.catalog() as catalog:
        for id, one in part:
            if isinstance(one, str):
                items.append(damaged_view(id, one))
                continue
            with suppress(UnknownReference):  # removed since the contents were read
                items.append(context.reference_views.view(one, catalog))
    return Page(items=items, next=following)


@router.get("/api/v1/references/{id}", responses=UNCHANGED, response_model=ReferenceOut)
async def show_reference(
    context: Context, id: ReferenceName, response: Response, if_none_match: IfNoneMatch = None
) -> ReferenceOut | Response:
    """One reference with its quality report. Its ETag stands for the reference, not for overlaps.

    A large library takes a while to search for overlaps; until that is done, a warning says so.
    """
    one = await asyncio.to_thread(_reference_or_damage, context, id)
    response.headers["ETag"] = now = etag(one)
    if (reply := unchanged(if_none_match, now)) is not None:
        return reply
    if isinstance(one, str):
        return damaged_view(id, one)
    checksum = (await asyncio.to_thread(context.contents)).checksum
    try:
        return report_view(one, await context.quality_reports.get(one, checksum))
    except ReportPending:
        note = "Overlaps with other references are still being searched; ask again in a minute."
    except ReportFailed:
        note = "Overlaps with other references could not be searched."
    return await asyncio.to_thread(_view_alone, context, one, note)


@router.get(
    "/api/v1/references/{id}/thumbnails/{second}",
    responses=UNCHANGED | JPEG,
    response_class=Response,
)
def show_thumbnail(
    context: Context,
    id: ReferenceName,
    second: Annotated[int, Path(ge=0, le=10**9)],
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The stored thumbnail of one second."""
    with context.catalog() as catalog:
        try:
            jpeg = catalog.thumbnail(ReferenceId(id), second)
        except DamagedReference:
            jpeg = None
    if jpeg is None:
        raise not_found(f"picture of second {second} of reference {id}")
    now = etag(jpeg)
    headers = {"Cache-Control": "private, max-age=3600", "ETag": now}
    return unchanged(if_none_match, now) or Response(jpeg, media_type="image/jpeg", headers=headers)


@router.delete(
    "/api/v1/references/{id}",
    status_code=204,
    responses={202: {"model": AcceptedOut, "description": "Another writer holds the library: poll the job."}},
    response_class=Response,
)
async def drop_reference(context: Context, id: ReferenceName, if_match: IfMatch = None) -> Response:
    """Removes a reference for good; its open alerts end. While another process writes, it becomes a job."""
    if if_match is not None:
        check_match(if_match, etag(await asyncio.to_thread(_reference_or_damage, context, id)))
    library = ReferenceLibrary(context.settings.data_dir)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BUSY_S
    while True:
        try:
            await asyncio.to_thread(library.rm, id)
            return Response(status_code=204)
        except CatalogLocked:
            if loop.time() > deadline:
                break
            await asyncio.sleep(BUSY_POLL_S)
    accepted = await asyncio.to_thread(remove_later, context.registrar, id)
    context.registrar.wake()
    headers = {"Location": f"/api/v1/jobs/{accepted.job.id}"}
    return Response(accepted.model_dump_json(), 202, headers, media_type="application/json")


@router.get("/api/v1/references/{id}/export", responses=UNCHANGED | BYTES, response_class=Response)
def export_reference(
    context: Context, caller: CurrentCaller, id: ReferenceName, if_none_match: IfNoneMatch = None
) -> Response:
    """The reference in one file: features only, from which the video cannot be seen."""
    now = etag(_reference_or_damage(context, id))
    if (reply := unchanged(if_none_match, now)) is not None:
        return reply
    headers = {"Content-Disposition": f'attachment; filename="{id}{EXPORT_SUFFIX}"', "ETag": now}
    slot = context.limits.downloads.take(caller)
    try:
        library = ReferenceLibrary(context.settings.data_dir)
        export = library.open_export(id, context.export_headers.get(now))
        context.export_headers.put(now, export.header)
    except BaseException:
        slot.release()
        raise
    return Download(export.pieces, export.n_bytes, slot, media_type="application/octet-stream", headers=headers)


@router.get("/api/v1/references/{id}/exclusions")
def list_exclusions(
    context: Context, id: ReferenceName, limit: Limit = 50, cursor: Cursor = None
) -> Page[ExclusionOut]:
    """The spans of a reference that never alert."""
    _reference_or_damage(context, id)
    found = sorted(context.rights.exclusions(id), key=lambda one: f"{one.id:020}")
    part, following = page_of(found, limit, cursor, lambda one: f"{one.id:020}")
    return Page(items=[ExclusionOut.model_validate(one.as_dict()) for one in part], next=following)


@router.post("/api/v1/references/{id}/exclusions", status_code=201)
def new_exclusion(context: Context, trail: CurrentTrail, id: ReferenceName, body: ExclusionIn) -> ExclusionOut:
    """Excludes a span from alerts on every channel; running monitors apply it within seconds."""
    _reference_or_damage(context, id)
    exclusion = context.rights.exclude(id, body.start_s, body.end_s, body.note)
    trail.object, trail.details = f"{id}/{exclusion.id}", {"span": exclusion.span}
    return ExclusionOut.model_validate(exclusion.as_dict())


@router.delete("/api/v1/references/{id}/exclusions/{n}", status_code=204)
def drop_exclusion(context: Context, id: ReferenceName, n: Annotated[int, Path(ge=1, lt=2**63)]) -> None:
    """Lets the span alert again."""
    context.rights.remove_exclusion(id, n)


def _view_alone(context: AppContext, reference: Reference, note: str) -> ReferenceOut:
    """The reference without its overlaps."""
    with context.catalog() as catalog:
        return context.reference_views.view(reference, catalog, note)


def _reference_or_damage(context: AppContext, id: str) -> Reference | str:
    """The reference, or in words why it cannot be used. Raises Problem 404."""
    contents = context.contents()
    for one in contents.references:
        if one.id == id:
            return one
    for damaged, problem in contents.damaged.items():
        if damaged == id:
            return problem
    raise not_found(f"reference {id}")


def _matches(one: Reference, q: str | None, owner: str | None, tag: str | None) -> bool:
    if owner is not None and one.owner != owner:
        return False
    if tag is not None:
        key, equals, value = tag.partition("=")
        if key not in one.tags or (equals and one.tags[key] != value):
            return False
    words = " ".join([one.id, one.title, one.owner, *(f"{k}={v}" for k, v in one.tags.items())]).casefold()
    return q is None or all(word in words for word in q.casefold().split())
