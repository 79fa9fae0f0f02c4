"""`/audit`: who changed what, when and from where; sign-ins and refused requests."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from monitor.ops.timestamps import rfc3339
from monitor.web.context import AppContext, Context
from monitor.web.requests.paging import Cursor, Limit, Moment, Page, cursor_of, number_of
from monitor.web.requests.problems import ERROR_RESPONSES

NDJSON = "application/x-ndjson"
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}

router = APIRouter(tags=["audit"], responses=ERROR_RESPONSES)


class AuditEntryOut(BaseModel):
    """One entry of the audit log."""

    n: int
    at: str
    who: str | None = Field(description="A token's name or a system user; null if unknown or erased.")
    address: str | None
    via: str = Field(description="api, dashboard, cli or monitor.")
    action: str = Field(description="In the words of the command line, such as `licences add`.")
    object: str | None
    about: str | None = Field(description="The person whom it is about: a token's name, a reviewer.")
    result: str = Field(description="done, failed, refused, or unknown if the process ended before it was recorded.")
    status: int | None = Field(description="The HTTP status.")
    alerts: list[str]
    details: dict[str, Any]
    erased: bool = Field(description="Whether name and address were erased on request.")
    hash: str


@router.get("/api/v1/audit")
def list_entries(
    context: Context,
    who: Annotated[str | None, Query(max_length=200)] = None,
    action: Annotated[str | None, Query(max_length=200, description="The whole action or its first word.")] = None,
    result: Literal["done", "failed", "refused", "unknown"] | None = None,
    since: Annotated[Moment | None, Query(description="RFC 3339.")] = None,
    until: Annotated[Moment | None, Query(description="RFC 3339.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[AuditEntryOut]:
    """The entries, newest first."""
    found = context.audit.entries(
        before=number_of(cursor),
        limit=limit + 1,
        who=who,
        action=action,
        result=result,
        since=_utc(since),
        until=_utc(until),
    )
    following = cursor_of(found[limit - 1].n) if len(found) > limit else None
    return Page(items=[AuditEntryOut.model_validate(one.as_dict()) for one in found[:limit]], next=following)


@router.get("/api/v1/audit/export", responses=LINES, response_class=Response)
def export_entries(context: Context) -> StreamingResponse:
    """The whole log as JSON lines, oldest entry first; `copywatch audit verify FILE` checks such a file."""
    headers = {"Content-Disposition": 'attachment; filename="audit.jsonl"'}
    return StreamingResponse(_lines(context), media_type=NDJSON, headers=headers)


def _lines(context: AppContext) -> Iterator[str]:
    for record in context.audit.records():
        yield record.as_line() + "\n"


def _utc(moment: datetime | None) -> str | None:
    return None if moment is None else rfc3339(moment, "milliseconds")
