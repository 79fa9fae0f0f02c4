"""`/references`: the library, and how well each of its videos can be recognised."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Annotated

from fastapi import FastAPI, Path, Query, Response
from pydantic import BaseModel, Field

from monitor.ops.timestamps import rfc3339
from monitor.web.context import AppContext
from monitor.web.requests.etags import UNCHANGED, IfMatch, IfNoneMatch, check_meant, etag, unchanged
from monitor.web.requests.jobs import Registrar
from monitor.web.requests.paging import Cursor, Limit, Page, page_of
from monitor.web.requests.problems import BYTES, JPEG, MAY_FAIL, Problem, not_found
from monitor.web.routes.uploads import AcceptedOut, remove_later
from reference_db.errors import CatalogLocked, DamagedReference, UnknownReference
from reference_db.library import EXPORT_ENDING, ReferenceLibrary
from reference_db.registration import QualityReport, examine
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, Reference, ReferenceId
from reference_db.store.references import ID_PATTERN

BUSY_S = 1.0  # that a removal waits for another writer of the library before it becomes a job
ReferenceName = Annotated[str, Path(pattern=f"^{ID_PATTERN.pattern}$")]


class ReferenceOut(BaseModel):
    """One registered video."""

    id: str
    title: str
    owner: str
    tags: dict[str, str]
    seconds: int
    state: str = Field(description="`ready`, or `quarantined`: damaged, and kept out of every search.")
    added_at: str | None
    low_information_share: float | None
    longest_static_s: int | None
    warnings: list[str]
    has_thumbnails: bool


class ExclusionIn(BaseModel):
    """A span of a reference that never alerts: an ident, end credits."""

    start_s: float = Field(ge=0, le=10**9)
    end_s: float = Field(gt=0, le=10**9)
    note: str = Field(default="", max_length=1000)


class ExclusionOut(BaseModel):
    """The same, kept."""

    id: int
    reference: str
    start_s: float
    end_s: float
    note: str
    added_at: str


def add_references(api: FastAPI, station: AppContext, registrar: Registrar) -> None:
    reports, library = Reports(station), ReferenceLibrary(station.settings.data_dir)

    @api.get("/api/v1/references", responses=MAY_FAIL, tags=["references"])
    def list_references(
        q: Annotated[str | None, Query(max_length=200, description="Words in id, title, owner or tags.")] = None,
        owner: Annotated[str | None, Query(max_length=1000)] = None,
        tag: Annotated[str | None, Query(max_length=2001, description="`key` or `key=value`.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Page[ReferenceOut]:
        """The references, by id. Overlaps are told by the single reference only."""
        contents = station.contents()
        found: list[tuple[str, Reference | str]] = [
            (one.id, one) for one in contents.references if _fits(one, q, owner, tag)
        ]
        if q is None and owner is None and tag is None:
            found += list(contents.damaged.items())
        part, following = page_of(sorted(found, key=lambda one: one[0]), limit, cursor, lambda one: one[0])
        items = []
        with station.catalog() as catalog:
            for id, one in part:
                with suppress(Problem):  # removed just now
                    items.append(_damaged(id, one) if isinstance(one, str) else reports.told(one, catalog, whole=False))
        return Page(items=items, next=following)

    @api.get(
        "/api/v1/references/{id}", responses=MAY_FAIL | UNCHANGED, response_model=ReferenceOut, tags=["references"]
    )
    def show_reference(
        id: ReferenceName, response: Response, if_none_match: IfNoneMatch = None
    ) -> ReferenceOut | Response:
        """One reference, with all that is to be known of it. Its ETag stands for the reference, not for overlaps."""
        one = _kept(station, id)
        response.headers["ETag"] = now = etag(one)
        if (answer := unchanged(if_none_match, now)) is not None:
            return answer
        if isinstance(one, str):
            return _damaged(id, one)
        with station.catalog() as catalog:
            return reports.told(one, catalog, whole=True)

    @api.get(
        "/api/v1/references/{id}/thumbnails/{second}",
        responses=MAY_FAIL | UNCHANGED | JPEG,
        response_class=Response,
        tags=["references"],
    )
    def show_thumbnail(
        id: ReferenceName, second: Annotated[int, Path(ge=0, le=10**9)], if_none_match: IfNoneMatch = None
    ) -> Response:
        """The small picture that was kept of one second."""
        with station.catalog() as catalog:
            try:
                jpeg = catalog.thumbnail(ReferenceId(id), second)
            except DamagedReference:
                jpeg = None
        if jpeg is None:
            raise not_found(f"picture of second {second} of reference {id}")
        now = etag(jpeg)
        kept = {"Cache-Control": "private, max-age=3600", "ETag": now}
        return unchanged(if_none_match, now) or Response(jpeg, media_type="image/jpeg", headers=kept)

    @api.delete(
        "/api/v1/references/{id}",
        status_code=204,
        responses={**MAY_FAIL, 202: {"model": AcceptedOut, "description": "Somebody writes: ask for the job."}},
        response_class=Response,
        tags=["references"],
    )
    async def drop_reference(id: ReferenceName, if_match: IfMatch = None) -> Response:
        """Takes a reference out, for good; an alert of it that is on air ends. It waits while one is registered."""
        if if_match is not None:
            check_meant(if_match, etag(await asyncio.to_thread(_kept, station, id)))
        loop = asyncio.get_running_loop()
        until = loop.time() + BUSY_S
        while True:
            try:
                await asyncio.to_thread(library.rm, id)
                return Response(status_code=204)
            except CatalogLocked:
                if loop.time() > until:
                    break
                await asyncio.sleep(0.1)  # whoever writes may be done in a moment
        accepted = await asyncio.to_thread(remove_later, registrar, id)
        registrar.ring()
        place = {"Location": f"/api/v1/jobs/{accepted.job.id}"}
        return Response(accepted.model_dump_json(), 202, place, media_type="application/json")

    @api.get(
        "/api/v1/references/{id}/export",
        responses=MAY_FAIL | UNCHANGED | BYTES,
        response_class=Response,
        tags=["references"],
    )
    def export_reference(id: ReferenceName, if_none_match: IfNoneMatch = None) -> Response:
        """The reference in one file: features only, nobody can see the video in it."""
        now = etag(_kept(station, id))
        if (answer := unchanged(if_none_match, now)) is not None:
            return answer
        named = {"Content-Disposition": f'attachment; filename="{id}{EXPORT_ENDING}"', "ETag": now}
        return Response(library.exported(id), media_type="application/octet-stream", headers=named)

    @api.get("/api/v1/references/{id}/exclusions", responses=MAY_FAIL, tags=["references"])
    def list_exclusions(id: ReferenceName, limit: Limit = 50, cursor: Cursor = None) -> Page[ExclusionOut]:
        """The spans of a reference that never alert."""
        _kept(station, id)
        found = sorted(station.rights.exclusions(id), key=lambda one: f"{one.id:020}")
        part, following = page_of(found, limit, cursor, lambda one: f"{one.id:020}")
        return Page(items=[ExclusionOut.model_validate(one.as_dict()) for one in part], next=following)

    @api.post("/api/v1/references/{id}/exclusions", status_code=201, responses=MAY_FAIL, tags=["references"])
    def new_exclusion(id: ReferenceName, asked: ExclusionIn) -> ExclusionOut:
        """Keeps a span from alerting, on every channel; running monitors heed it within seconds."""
        _kept(station, id)
        return ExclusionOut.model_validate(station.rights.exclude(id, asked.start_s, asked.end_s, asked.note).as_dict())

    @api.delete("/api/v1/references/{id}/exclusions/{n}", status_code=204, responses=MAY_FAIL, tags=["references"])
    def drop_exclusion(id: ReferenceName, n: Annotated[int, Path(ge=1, lt=2**63)]) -> None:
        """Lets the span alert again."""
        station.rights.remove_exclusion(id, n)


def _kept(station: AppContext, id: str) -> Reference | str:
    """The reference, or in words why it cannot be used. Raises Problem 404."""
    contents = station.contents()
    for one in contents.references:
        if one.id == id:
            return one
    for damaged, what in contents.damaged.items():
        if damaged == id:
            return what
    raise not_found(f"reference {id}")


class Reports:
    """Hygiene reports, made when they are first asked for; those of features that are gone are forgotten."""

    KEPT = 4096

    def __init__(self, station: AppContext) -> None:
        self._station = station
        self._made: OrderedDict[tuple[str, bool], QualityReport | None] = OrderedDict()
        self._lock = threading.Lock()

    def told(self, reference: Reference, catalog: Catalog, *, whole: bool) -> ReferenceOut:
        """The reference as it is told; with overlaps where `whole`, which takes a while in a large library."""
        report = self._report(reference, catalog, whole)
        return ReferenceOut(
            id=reference.id,
            title=reference.title,
            owner=reference.owner,
            tags=reference.tags,
            seconds=reference.n_seconds,
            state="ready" if report is not None else "quarantined",
            added_at=rfc3339(reference.added_at),
            low_information_share=round(reference.n_uninformative / reference.n_seconds, 4),
            longest_static_s=None if report is None else report.longest_static_s,
            warnings=["Its features are damaged: run `copywatch refs verify`."]
            if report is None
            else list(report.warnings),
            has_thumbnails=bool(reference.thumbnails_sha256),
        )

    def _report(self, reference: Reference, catalog: Catalog, whole: bool) -> QualityReport | None:
        key = (reference.features_sha256, whole)
        with self._lock:
            if key in self._made and not whole:  # overlaps change with the library
                self._made.move_to_end(key)
                return self._made[key]
        try:
            features = catalog.exact_features(reference)
            index = self._station.library.index if whole else ReferenceIndex.from_features([])
            report = examine(features, index, itself=reference.id)
        except DamagedReference:
            report = None
        except UnknownReference:
            raise not_found(f"reference {reference.id}") from None
        with self._lock:
            self._made[key] = report
            while len(self._made) > self.KEPT:
                self._made.popitem(last=False)
        return report


def _fits(one: Reference, q: str | None, owner: str | None, tag: str | None) -> bool:
    if owner is not None and one.owner != owner:
        return False
    if tag is not None:
        key, equals, value = tag.partition("=")
        if key not in one.tags or (equals and one.tags[key] != value):
            return False
    words = " ".join([one.id, one.title, one.owner, *(f"{k}={v}" for k, v in one.tags.items())]).casefold()
    return q is None or all(word in words for word in q.casefold().split())


def _damaged(id: str, what: str) -> ReferenceOut:
    return ReferenceOut(
        id=id,
        title=id,
        owner="",
        tags={},
        seconds=0,
        state="quarantined",
        added_at=None,
        low_information_share=None,
        longest_static_s=None,
        warnings=[f"It is damaged and is not searched: {what}."],
        has_thumbnails=False,
    )
